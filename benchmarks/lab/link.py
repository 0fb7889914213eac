"""Do the lab's links keep to what is asked of them, for TCP, one way and both ways at once?

    python benchmarks/link.py             every case, about two minutes
    python benchmarks/link.py --quick     shorter measurements, under a minute

Needs Linux with namespaces and /dev/net/tun; no GPU, no root. Two hosts; bulk TCP over one
connection a direction (`both`) or one connection in use both ways (`duplex`, as gloo does). Rates
are payload plus the headers of full packets, over the time after the start of the connection; the
worst of the two directions is shown. The relay's share is of one core. The last line is one JSON
object.
"""

import argparse
import json
import os
import socket
import statistics
import sys
import threading
import time
from contextlib import suppress

from thinwire.lab import Lab, Line, Link
from thinwire.lab.units import format_rate

RATES = ("10mbit", "100mbit", "1gbit")
DELAYS = ("0", "20ms")
MODES = ("one way", "both", "duplex")
HEADERS = 52  # bytes of IP and TCP with timestamps, in each packet
PORT = 5000


def worker() -> None:
    """On a host: rank 0 connects to rank 1, both send or receive as the mode says."""
    rank, mode = int(os.environ["RANK"]), os.environ["LINK_MODE"]
    warm, seconds = float(os.environ["LINK_WARM"]), float(os.environ["LINK_SECONDS"])
    pairs = 2 if mode == "both" else 1
    socks = listen(pairs) if rank else [connect() for _ in range(pairs)]
    if rank == 0:
        print(json.dumps({"rtt": round_trip(socks[0])}), flush=True)
    else:
        echo(socks[0])
    end = time.monotonic() + warm + seconds + 0.5
    sends = {"one way": [rank == 0], "both": [rank == 0, rank == 1], "duplex": [True]}[mode]
    receives = {"one way": [rank == 1], "both": [rank == 1, rank == 0], "duplex": [True]}[mode]
    threads = []
    for sock, sending, receiving in zip(socks, sends, receives, strict=True):
        if sending:
            threads.append(threading.Thread(target=send, args=(sock, end), daemon=True))
        if receiving:
            threads.append(threading.Thread(target=receive, args=(sock, warm, seconds)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=max(0.0, end + 1 - time.monotonic()))
    os._exit(0)  # senders may be blocked with a full window


def listen(count: int) -> list[socket.socket]:
    with socket.create_server(("", PORT)) as server:
        return [tuned(server.accept()[0]) for _ in range(count)]


def connect() -> socket.socket:
    while True:
        try:
            return tuned(socket.create_connection(("host1", PORT)))
        except ConnectionRefusedError:
            time.sleep(0.05)


def tuned(sock: socket.socket) -> socket.socket:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def round_trip(sock: socket.socket) -> float:
    """Median seconds of a byte there and back over TCP."""
    trips = []
    for _ in range(21):
        start = time.monotonic()
        sock.sendall(b"x")
        sock.recv(1)
        trips.append(time.monotonic() - start)
    sock.sendall(b"!")
    return statistics.median(trips)


def echo(sock: socket.socket) -> None:
    while (data := sock.recv(1)) != b"!":
        sock.sendall(data)


def send(sock: socket.socket, end: float) -> None:
    data = bytes(1 << 18)
    with suppress(OSError):  # the receiver has measured enough and closed
        while time.monotonic() < end:
            sock.sendall(data)


def receive(sock: socket.socket, warm: float, seconds: float) -> None:
    """Print bit/s of payload between two arrivals, `seconds` apart, after `warm`."""
    buffer = bytearray(1 << 20)
    begin = time.monotonic()
    start, total = begin, 0
    while True:
        count = sock.recv_into(buffer)
        now = time.monotonic()
        if now < begin + warm:
            start = now
        else:
            total += count
            if now - start >= seconds:
                print(json.dumps({"payload": total * 8 / (now - start)}), flush=True)
                return


def relay_seconds(pid: int) -> float:
    """Processor time the relay has used."""
    with open(f"/proc/{pid}/stat") as file:
        words = file.read().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def measure(rate: str, delay: str, mode: str, warm: float, seconds: float) -> dict[str, object]:
    link = Link.of(rate, delay=delay)
    found: dict[str, list[float]] = {"payload": [], "rtt": []}
    share: list[float] = []

    def sink(line: Line) -> None:
        if line.error:
            print(line, file=sys.stderr)
            return
        for name, value in json.loads(line.text).items():
            found[name].append(value)

    with Lab(2, link) as lab:
        settings = {"LINK_MODE": mode, "LINK_WARM": str(warm), "LINK_SECONDS": str(seconds)}
        job = lab.start([sys.executable, __file__, "--worker"], env=settings, sink=sink)
        marks: list[tuple[float, float]] = []

        def tick() -> None:
            marks.append((time.monotonic(), relay_seconds(lab.pid)))

        outcome = job.wait(tick)
        if outcome.code:
            raise SystemExit(str(outcome))
        busy = [mark for mark in marks if mark[0] >= marks[0][0] + 0.5]  # after Python's start
        share.append((busy[-1][1] - busy[0][1]) / (busy[-1][0] - busy[0][0]))
    headers = link.mtu / (link.mtu - HEADERS)
    got = min(found["payload"]) * headers
    return {
        "rate": rate,
        "delay": delay,
        "mode": mode,
        "asked_mbit": link.up / 1e6,
        "measured_mbit": round(got / 1e6, 3),
        "ratio": round(got / link.up, 4),
        "rtt_asked_ms": 2e3 * link.delay,
        "rtt_ms": round(1e3 * found["rtt"][0], 2),
        "relay_cpu": round(share[0], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker()
    warm, seconds = (0.5, 1.0) if args.quick else (2.0, 4.0)
    print(
        f"{'asked':>12} {'delay':>6} {'':8} {'measured':>12} {'ratio':>6} {'rtt ms':>7} {'cpu':>5}"
    )
    cases = []
    for rate in RATES:
        for delay in DELAYS:
            for mode in MODES:
                case = measure(rate, delay, mode, warm, seconds)
                cases.append(case)
                got = format_rate(float(str(case["measured_mbit"])) * 1e6)
                print(
                    f"{rate:>12} {delay:>6} {mode:8} {got:>12} {case['ratio']:>6} "
                    f"{case['rtt_ms']:>7} {case['relay_cpu']:>5}",
                    flush=True,
                )
    worst = max(abs(float(str(case["ratio"])) - 1) for case in cases)
    print(
        json.dumps(
            {"worst_error": round(worst, 4), "within_10_percent": worst < 0.1, "cases": cases}
        )
    )


if __name__ == "__main__":
    main()

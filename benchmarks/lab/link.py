"""Do the lab's links keep to what is asked of them, for TCP, one way and both ways at once?

    python -m benchmarks.lab.link             every case, about two minutes
    python -m benchmarks.lab.link --quick     shorter measurements, without `both`

Needs Linux with namespaces and /dev/net/tun; no GPU, no root. Two hosts; bulk TCP over one
connection a direction (`both`) or one connection in use both ways (`duplex`, as gloo does). Rates
are payload plus the headers of full packets, over the time after the start of the connection; the
worst of the two directions is shown. The relay's share is of one core. The last line is one JSON
object: {"worst_error", "within_10_percent", "cases": [{"rate", "delay", "mode", "ratio", ...}]}.
"""

import os
import socket
import statistics
import threading
import time
from contextlib import suppress
from typing import Any

from benchmarks.harness.arguments import Size, Table, end, parser
from benchmarks.harness.hosts import on_hosts
from benchmarks.harness.telling import tell
from thinwire.lab import Lab, Link
from thinwire.lab.units import format_rate

RATES = ("10mbit", "100mbit", "1gbit")
DELAYS = ("0", "20ms")
MODES = ("one way", "both", "duplex")
HEADERS = 52  # bytes of IP and TCP with timestamps, in each packet
PORT = 5000


def worker(mode: str, warm: float, seconds: float) -> None:
    """On a host: rank 0 connects to rank 1, both send or receive as the mode says."""
    rank = int(os.environ["RANK"])
    pairs = 2 if mode == "both" else 1
    socks = listen(pairs) if rank else [connect() for _ in range(pairs)]
    if rank == 0:
        tell({"rtt": round_trip(socks[0])})
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
            each = threading.Thread(target=receive, args=(sock, warm, seconds), daemon=True)
            threads.append(each)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=max(0.0, end + 1 - time.monotonic()))


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
    """Tell bit/s of payload between two arrivals, `seconds` apart, after `warm`."""
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
                tell({"payload": total * 8 / (now - start)})
                return


def relay_seconds(pid: int) -> float:
    """Processor time the relay has used."""
    with open(f"/proc/{pid}/stat") as file:
        words = file.read().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def measure(rate: str, delay: str, mode: str, warm: float, seconds: float) -> dict[str, Any]:
    link = Link.of(rate, delay=delay)
    found: dict[str, list[float]] = {"payload": [], "rtt": []}
    marks: list[tuple[float, float]] = []

    def told(rank: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            found[name].append(value)

    def tick(lab: Lab) -> None:
        marks.append((time.monotonic(), relay_seconds(lab.pid)))

    on_hosts(worker, mode, warm, seconds, hosts=2, link=link, told=told, tick=tick)
    busy = [mark for mark in marks if mark[0] >= marks[0][0] + 0.5]  # after Python's start
    share = (busy[-1][1] - busy[0][1]) / (busy[-1][0] - busy[0][0])
    got = min(found["payload"]) * link.mtu / (link.mtu - HEADERS)
    return {
        "rate": rate,
        "delay": delay,
        "mode": mode,
        "asked_mbit": link.up / 1e6,
        "measured_mbit": round(got / 1e6, 3),
        "ratio": round(got / link.up, 4),
        "rtt_asked_ms": 2e3 * link.delay,
        "rtt_ms": round(1e3 * found["rtt"][0], 2),
        "relay_cpu": round(share, 3),
    }


def main() -> None:
    size: Size = parser(__doc__).parse_args().size
    warm, seconds = size.of(full=(2.0, 4.0), quick=(0.5, 1.0), tiny=(0.3, 0.3))
    rates, delays = (RATES, DELAYS) if size is not Size.TINY else (RATES[:1], DELAYS[:1])
    modes = MODES if size is Size.FULL else ("one way", "duplex")
    table = Table("asked", "delay", "", "measured", "ratio", "rtt ms", "cpu", first=10, width=14)
    cases = []
    for rate in rates:
        for delay in delays:
            for mode in modes:
                case = measure(rate, delay, mode, warm, seconds)
                cases.append(case)
                got = format_rate(case["measured_mbit"] * 1e6)
                shown = (f"{case[name]}" for name in ("ratio", "rtt_ms", "relay_cpu"))
                table.row(rate, delay, mode, got, *shown)
    worst = max(abs(case["ratio"] - 1) for case in cases)
    end({"worst_error": round(worst, 4), "within_10_percent": worst < 0.1, "cases": cases}, size)


if __name__ == "__main__":
    main()

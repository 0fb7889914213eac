"""Probe: what the self-check runs on every host. It obeys JSON lines on its standard input.

    ping    round trips of small UDP packets to another host
    blast   UDP packets at a little more than the rate of the link
    meter   the rate at which the kernel counts bytes on this host's interface meanwhile

UDP and the kernel's counters, so that neither TCP's control nor a full socket buffer is measured.
"""

import json
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence

from thinwire.lab.host import read_counters

ECHO_PORT = 7007  # above 1024, which takes root
SINK_PORT = 7009
PING_BYTES = 92  # on the wire, of a ping
_HEADERS = 28  # IP and UDP
_POLL = 1e-4  # s between looks at the counters


def main() -> None:
    line = socket.socket(fileno=0)  # a socket both ways, set by the self-check
    echo = _bound(ECHO_PORT)
    sink = _bound(SINK_PORT)
    threading.Thread(target=_echo, args=(echo,), daemon=True).start()
    threading.Thread(target=_swallow, args=(sink,), daemon=True).start()
    operations = {"ping": ping, "blast": blast, "meter": meter}
    lock = threading.Lock()
    with line.makefile("r") as commands:
        _reply(line, lock, None, "ready")
        for text in commands:
            command = json.loads(text)
            number, operation = command.pop("id"), operations[command.pop("do")]
            arguments = (line, lock, number, operation, command)
            threading.Thread(target=_run, args=arguments, daemon=True).start()


def _run(
    line: socket.socket,
    lock: threading.Lock,
    number: int,
    operation: Callable[..., object],
    arguments: dict[str, object],
) -> None:
    _reply(line, lock, number, operation(**arguments))


def _reply(line: socket.socket, lock: threading.Lock, number: int | None, result: object) -> None:
    with lock:
        line.sendall(json.dumps({"id": number, "result": result}).encode() + b"\n")


def _bound(port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("", port))
    return sock


def _echo(sock: socket.socket) -> None:
    while True:
        data, peer = sock.recvfrom(2048)
        sock.sendto(data, peer)


def _swallow(sock: socket.socket) -> None:
    buffer = bytearray(1 << 16)
    while True:
        sock.recv_into(buffer)


def ping(to: str, count: int, timeout: float) -> list[float]:
    """Seconds of each round trip that came back."""
    trips = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for sequence in range(count):
            data = sequence.to_bytes(PING_BYTES - _HEADERS, "big")
            start = time.monotonic()
            sock.sendto(data, (to, ECHO_PORT))
            while select.select([sock], [], [], max(0.0, start + timeout - time.monotonic()))[0]:
                if sock.recv(2048) == data:  # not the late answer to an earlier one
                    trips.append(time.monotonic() - start)
                    break
    return trips


def blast(to: Sequence[str], size: int, rate: float, seconds: float) -> int:
    """Send packets of `size` bytes on the wire to each in turn, at `rate` bit/s in total."""
    data = bytes(size - _HEADERS)
    sent = 0
    start = time.monotonic()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        while (elapsed := time.monotonic() - start) < seconds:
            while sent * size * 8 < elapsed * rate:
                sock.sendto(data, (to[sent % len(to)], SINK_PORT))
                sent += 1
            time.sleep(min(1e-3, size * 8 / rate))
    return sent


def meter(packets: int, size: int, seconds: float, timeout: float) -> float:
    """Bit/s received, from one arrival to another at least `seconds` and `packets` later."""
    deadline = time.monotonic() + timeout
    # The first few packets show that the blast has begun and the pipes are full.
    start = _received() + 5 * size
    _, first = _arrival(deadline, start)
    begin, first = _arrival(deadline, first + 1)
    time.sleep(seconds)
    end, last = _arrival(deadline, max(first + packets * size, _received() + 1))
    if end >= deadline:
        return 0.0
    return (last - first) * 8 / (end - begin)


def _arrival(deadline: float, least: int) -> tuple[float, int]:
    """When the count of received bytes came to `least`, and the count."""
    while (received := _received()) < least and time.monotonic() < deadline:
        time.sleep(_POLL)
    return time.monotonic(), received


def _received() -> int:
    with open("/proc/thread-self/net/dev", "rb") as file:
        return read_counters(file.read(), 0).rx_bytes

"""The self-check: does every link keep to the rate and delay asked of it, on this machine, now?

Round trips first, before any load. Then every host sends to the next in a ring, which shows
min(own up, the next one's down); a direction that the ring left below its rate is measured against
all other hosts together.
"""

import json
import os
import socket
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from thinwire.errors import LabError
from thinwire.lab.link import Link, Path
from thinwire.lab.probe import PING_BYTES
from thinwire.lab.units import format_duration, format_rate

if TYPE_CHECKING:
    from thinwire.lab.network import Lab

TOLERANCE = 0.10
SMALLEST_ERROR = 2e-3  # s; a round trip of nothing still costs this machine's wake-ups
PARALLEL = 500e6  # bit/s in total that may be measured at once
_EXCESS = 1.25  # how much more than the rate is sent
_SECONDS = 0.4
_PACKETS = 20


@dataclass(frozen=True)
class LinkCheck:
    """One host's link: asked and measured, in bit/s and seconds.

    `rtt` is the round trip to the next host. `up` and `down` are what the other hosts together can
    take or give when that is less than the link's own rate.
    """

    host: int
    up_asked: float
    up: float
    down_asked: float
    down: float
    rtt_asked: float
    rtt: float
    rtt_tolerance: float

    def problems(self) -> list[str]:
        found = []
        for name, asked, got in (
            ("up", self.up_asked, self.up),
            ("down", self.down_asked, self.down),
        ):
            if abs(got - asked) > TOLERANCE * asked:
                found.append(f"{name} asked {format_rate(asked)}, measured {format_rate(got)}")
        if not abs(self.rtt - self.rtt_asked) <= self.rtt_tolerance:
            found.append(
                f"round trip asked {format_duration(self.rtt_asked)}, "
                f"measured {format_duration(self.rtt)}"
            )
        return [f"host{self.host} {problem}" for problem in found]


def check_links(lab: "Lab", links: Sequence[Link], attempts: int) -> list[LinkCheck]:
    if len(links) < 2:
        return []
    problems: list[str] = []
    with _Probes(lab) as probes:
        for _ in range(attempts):
            checks = _Measurement(probes, links).run()
            problems = [problem for check in checks for problem in check.problems()]
            if not problems:
                return checks
    raise LabError(
        f"the lab does not keep to its links, measured {attempts} times: {'; '.join(problems)}. "
        "Ask for lower rates or fewer hosts, or free this machine's processors"
    )


class _Probes:
    """A probe process on every host and the line to it."""

    def __init__(self, lab: "Lab") -> None:
        self._lab = lab
        self._numbers: list[int] = []
        self._lines: list[socket.socket] = []
        self._files: list[Any] = []

    def __enter__(self) -> "_Probes":
        try:
            for host in range(self._lab.hosts):
                self._spawn(host)
            for host in range(self._lab.hosts):
                self.answer(host)  # ready
        except BaseException:
            self.__exit__()
            raise
        return self

    def _spawn(self, host: int) -> None:
        from thinwire.lab.network import entry

        ours, theirs = socket.socketpair()
        self._lines.append(ours)
        self._files.append(ours.makefile("r"))
        number = self._lab.next_number()
        with theirs:
            fds = [theirs.fileno(), 2, 2]
            command = entry("thinwire.lab.probe")
            self._lab.spawn(number, host, command, dict(os.environ), "/", fds)
        self._numbers.append(number)

    def __exit__(self, *_: object) -> None:
        self._lab.call("signal", workers=self._numbers, signum=9)
        self._lab.call("flush")
        for file, line in zip(self._files, self._lines, strict=True):
            file.close()
            line.close()

    def flush(self) -> None:
        self._lab.call("flush")

    def ask(self, host: int, name: str, do: str, **arguments: object) -> None:
        command = {"id": name, "do": do, **arguments}
        self._lines[host].sendall(json.dumps(command).encode() + b"\n")

    def answer(self, host: int) -> tuple[str, Any]:
        text = self._files[host].readline()
        if not text:
            raise LabError(f"the self-check's probe on host{host} ended; its error is above")
        reply = json.loads(text)
        return reply["id"], reply["result"]

    def address(self, host: int) -> str:
        return self._lab.address(host)


class _Measurement:
    def __init__(self, probes: _Probes, links: Sequence[Link]) -> None:
        self._probes = probes
        self._links = links
        self._hosts = range(len(links))

    def run(self) -> list[LinkCheck]:
        links = self._links
        trips = self._round_trips()
        ring = [(host, self._next(host)) for host in self._hosts]
        rates = self._in_a_ring(ring)
        checks = []
        for host in self._hosts:
            before = (host - 1) % len(links)
            up_asked, up = links[host].up, rates[host]
            if up_asked > links[self._next(host)].down:
                up_asked, up = self._fan(host, outwards=True)
            down_asked, down = links[host].down, rates[before]
            if down_asked > links[before].up:
                down_asked, down = self._fan(host, outwards=False)
            asked, tolerance = self._trip_asked(host)
            checks.append(
                LinkCheck(host, up_asked, up, down_asked, down, asked, trips[host], tolerance)
            )
        return checks

    def _next(self, host: int) -> int:
        return (host + 1) % len(self._links)

    def _trip_asked(self, host: int) -> tuple[float, float]:
        a, b = self._links[host], self._links[self._next(host)]
        wire = PING_BYTES * 8 * (1 / min(a.up, b.down) + 1 / min(b.up, a.down))
        asked = a.delay + b.delay + wire
        return asked, max(TOLERANCE * asked, SMALLEST_ERROR) + 2 * Path.between(a, b).jitter

    def _round_trips(self) -> list[float]:
        """Median seconds from each host to the next; infinite when nothing came back."""
        for host in self._hosts:
            asked, tolerance = self._trip_asked(host)
            count = int(min(max(_SECONDS / (asked + 1e-3), 5), 15))
            to = self._probes.address(self._next(host))
            timeout = 2 * (asked + tolerance) + 0.2
            self._probes.ask(host, "ping", "ping", to=to, count=count, timeout=timeout)
        answers = [self._probes.answer(host)[1] for host in self._hosts]
        return [statistics.median(trips) if trips else float("inf") for trips in answers]

    def _in_a_ring(self, ring: Sequence[tuple[int, int]]) -> list[float]:
        """Bit/s from each host to the next."""
        links = self._links
        total = sum(min(links[a].up, links[b].down) for a, b in ring)
        if total <= PARALLEL:
            return self._flows([([a], [b]) for a, b in ring])
        return [rate for a, b in ring for rate in self._flows([([a], [b])])]

    def _fan(self, host: int, outwards: bool) -> tuple[float, float]:
        """Asked and measured between one host and all others."""
        others = [other for other in self._hosts if other != host]
        if outwards:
            reach = sum(self._links[other].down for other in others)
            return min(self._links[host].up, reach), self._flows([([host], others)])[0]
        reach = sum(self._links[other].up for other in others)
        return min(self._links[host].down, reach), self._flows([(others, [host])])[0]

    def _flows(self, flows: Sequence[tuple[list[int], list[int]]]) -> list[float]:
        """Bit/s that each set of receivers gets from its set of senders, all flows at once."""
        self._probes.flush()
        pending = [self._flow(senders, receivers) for senders, receivers in flows]
        got: dict[int, float] = {}
        for host, count in _tally(pending):
            for name, result in (self._probes.answer(host) for _ in range(count)):
                if name == "meter":
                    got[host] = result
        self._probes.flush()
        links, rates = self._links, []
        for senders, receivers in flows:
            # Loss is not the rate's fault: what was lost on the way is put back.
            kept = 1 - Path.between(links[senders[0]], links[receivers[0]]).loss
            rates.append(sum(got[host] for host in receivers) / kept)
        return rates

    def _flow(self, senders: list[int], receivers: list[int]) -> list[int]:
        """Start one; returns the hosts that will answer."""
        links = self._links
        size = min(links[host].mtu for host in senders)
        up = sum(links[host].up for host in senders)
        down = sum(links[host].down for host in receivers)
        rate = min(up, down)
        least = rate / max(len(senders), len(receivers))  # of one sender or receiver
        seconds = max(_SECONDS, _PACKETS * size * 8 / least)
        timeout = 3 * seconds + 1 + max(link.delay for link in links)
        for host in receivers:
            packets = int(_PACKETS // 2)
            self._probes.ask(
                host, "meter", "meter", packets=packets, size=size, seconds=seconds, timeout=timeout
            )
        to = [self._probes.address(host) for host in receivers]
        for host in senders:
            share = _EXCESS * rate * links[host].up / up
            length = 1.25 * seconds + 0.1 + 10 * size * 8 / least
            self._probes.ask(host, "blast", "blast", to=to, size=size, rate=share, seconds=length)
        return [*senders, *receivers]


def _tally(pending: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """(host, number of answers it owes)."""
    hosts = [host for group in pending for host in group]
    return [(host, hosts.count(host)) for host in sorted(set(hosts))]

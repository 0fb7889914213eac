"""Relay: decides when each packet arrives. Pure: it is told the time and touches no file.

A packet of s bits from host a to host b:

    leaves a's queue    t0                    when a's up pipe is free and it is its flow's turn
    first bit at b      t1 = t0 + delay       never before an earlier packet of the same pair
    last bit at b       t1 + s / a.up
    leaves b's queue    t2 >= t1              when b's down pipe is free, likewise
    arrives             max(t1 + s / a.up, t2 + s / b.down)

The down pipe begins with the first bit, not the last (cut-through), so a path of two equal rates
costs the time of one. All times are virtual: a pipe with a backlog starts its next packet when the
last one left it, not when the relay happened to wake, so a late wake-up costs delay but no rate.
"""

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.lab.link import Link, Path
from thinwire.lab.pipe import Packet, Pipe

PREFIX = bytes((10, 77))  # the emulated network is 10.77.0.0/16
TCP = 6
SERVE_UP, SERVE_DOWN, ARRIVE, DELIVER = range(4)


def address(host: int) -> str:
    return f"10.77.{(host + 1) >> 8}.{(host + 1) & 255}"


def flow_of(data: bytes) -> bytes:
    """Protocol, addresses and ports; fragments have no ports and share the pair's flow.

    A TCP packet without data is a flow of its own. On a real host a connection's backlog waits in
    its socket (TCP small queues), so acknowledgements leave at once; here it waits in the relay,
    and an acknowledgement behind it would be late by the whole queue.
    """
    fragment = (data[6] & 0x3F) or data[7]
    if fragment or data[0] != 0x45:  # 0x45: IPv4 with no options, so the ports are at byte 20
        return data[9:10] + data[12:20]
    flow = data[9:10] + data[12:24]
    if len(data) <= 80 and data[9] == TCP and len(data) == 20 + (data[32] >> 4) * 4:
        return flow + b"a"
    return flow


@dataclass
class Tally:
    """What the relay did with the packets that left one host."""

    packets: int = 0
    bytes: int = 0
    lost: int = 0  # by the link's loss
    dropped: int = 0  # by a full queue
    cut: int = 0  # by a partition


class Relay:
    def __init__(self, links: Sequence[Link], seed: int = 0) -> None:
        self._links = list(links)
        self._up = [Pipe(link.up) for link in links]
        self._down = [Pipe(link.down) for link in links]
        self._cut = [False] * len(links)
        self._latest: dict[tuple[int, int], float] = {}
        self._events: list[tuple[float, int, int, Pipe | Packet]] = []
        self._count = 0  # orders events of the same time
        self._random = random.Random(seed)
        self._paths = self._all_paths()
        self.tallies = [Tally() for _ in links]

    def _all_paths(self) -> list[list[Path]]:
        return [[Path.between(a, b) for b in self._links] for a in self._links]

    def set_link(self, host: int, link: Link) -> None:
        """From the next packet on; the one on the wire finishes at the old rate."""
        self._links[host] = link
        self._up[host].rate = link.up
        self._down[host].rate = link.down
        self._paths = self._all_paths()

    def partition(self, host: int, cut: bool) -> None:
        """Drop everything to and from the host, what is already on its way too."""
        self._cut[host] = cut

    def flush(self) -> None:
        """Forget every packet in a queue or in the air."""
        self._events.clear()
        for pipe in (*self._up, *self._down):
            pipe.clear()

    def next_time(self) -> float | None:
        return self._events[0][0] if self._events else None

    def push(self, now: float, source: int, data: bytes) -> None:
        """A packet left a host. Every event up to `now` must have been taken with advance()."""
        if len(data) < 24 or data[0] >> 4 != 4 or data[16:18] != PREFIX:
            return  # IPv6 chatter and the like
        target = (data[18] << 8 | data[19]) - 1
        if not 0 <= target < len(self._links):
            return
        tally = self.tallies[source]
        tally.packets += 1
        tally.bytes += len(data)
        packet = Packet(data, flow_of(data), source, target)
        if not self._severed(packet):
            self._enter(self._up[source], SERVE_UP, packet, now)

    def advance(self, now: float) -> list[tuple[int, bytes]]:
        """Everything that arrives up to `now`, in order: (host, packet)."""
        arrived: list[tuple[int, bytes]] = []
        events = self._events
        while events and events[0][0] <= now:
            time, _, kind, item = heapq.heappop(events)
            if isinstance(item, Pipe):
                self._serve(item, kind, time)
            elif self._severed(item):
                continue
            elif kind == ARRIVE:
                self._enter(self._down[item.target], SERVE_DOWN, item, time)
            else:
                arrived.append((item.target, item.data))
        return arrived

    def _severed(self, packet: Packet) -> bool:
        if self._cut[packet.source] or self._cut[packet.target]:
            self.tallies[packet.source].cut += 1
            return True
        return False

    def _schedule(self, time: float, kind: int, item: Pipe | Packet) -> None:
        self._count += 1
        heapq.heappush(self._events, (time, self._count, kind, item))

    def _enter(self, pipe: Pipe, serve: int, packet: Packet, time: float) -> None:
        if not pipe.add(packet):
            self.tallies[packet.source].dropped += 1
        elif not pipe.armed:
            pipe.armed = True
            self._schedule(max(pipe.free, time), serve, pipe)

    def _serve(self, pipe: Pipe, kind: int, time: float) -> None:
        packet = pipe.pop()
        seconds = len(packet.data) * 8 / pipe.rate
        pipe.free = time + seconds
        pipe.armed = bool(pipe)
        if pipe.armed:
            self._schedule(pipe.free, kind, pipe)
        if kind == SERVE_UP:
            self._travel(packet, time, seconds)
        else:
            # A slow sender's packet occupies a fast down pipe only for its share of it.
            self._schedule(max(packet.last, pipe.free), DELIVER, packet)

    def _travel(self, packet: Packet, time: float, seconds: float) -> None:
        path = self._paths[packet.source][packet.target]
        if path.loss and self._random.random() < path.loss:
            self.tallies[packet.source].lost += 1
            return
        first = time + path.delay
        if path.jitter:
            first += self._random.uniform(-path.jitter, path.jitter)
        pair = packet.source, packet.target
        first = max(first, self._latest.get(pair, 0.0))
        self._latest[pair] = first
        packet.last = first + seconds
        self._schedule(first, ARRIVE, packet)

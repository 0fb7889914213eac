"""Wire: one process group, one ordered stream of transfers, and an account of them.

[Note: order] Every transfer of a wire is issued from the wire's one issuing lane, in the order of
the calls. As long as all ranks make the same calls in the same order - by step counts, never by
looking at what has arrived - their collectives match. A multi-phase transfer may block the issuing
lane between its phases; the calls behind it wait their turn there, not in the caller.

[Note: landing] A second lane waits for what was issued, finishes it (divides, decodes) and notes
the time, so that this work too passes behind compute. Point-to-point transfers land in a lane for
each peer and direction: a message that is late must not hold up the news of another.

[Note: streams] With CUDA the lanes work on a side stream of the wire. It starts after the caller's
stream has produced the payload (an event recorded at the call) and the lander synchronises it
before it reports. The flight holds every buffer until then, so the allocator can not reuse them.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.distributed.device_mesh import DeviceMesh

from thinwire.errors import PeerLost
from thinwire.wire import collectives, world
from thinwire.wire.account import Account
from thinwire.wire.codecs import Codec, Dense, ErrorFeedback
from thinwire.wire.codecs.base import require_flat
from thinwire.wire.collectives import Started
from thinwire.wire.compressed_mean import compressed_mean
from thinwire.wire.flight import Flight, all_finite
from thinwire.wire.lane import Lane

AnyCodec = Codec | ErrorFeedback
Group = ProcessGroup | DeviceMesh | None
Land = Callable[[], None]
# An issuing job gets the buffer where the group can carry it and returns what it has started,
# with what is left to do once that has arrived.
Issue = Callable[[Tensor], tuple[Started, Land]]

_REDUCTIONS = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "sum": dist.ReduceOp.SUM}
_ASSUMED_RATE = 12_500.0  # bytes/s (0.1 Mbit/s) until a flight has been timed
_PATIENCE = 8.0  # a transfer may take this many times what the measured rate predicts


class Wire:
    """Transfers among the ranks of one group.

    Args:
        group: a ProcessGroup, one dimension of a DeviceMesh, or None for all ranks. The wire makes
            a group of its own with the same members: nobody else's collectives can come between.
        name: for thread names and error messages.
        account: where to count; a new one by default, shared if several wires serve one method.
        timeout: seconds without a sign of life after which a peer counts as lost; the world's by
            default. Large payloads get more, by the rate measured so far.
    """

    def __init__(
        self,
        group: Group = None,
        *,
        name: str = "wire",
        account: Account | None = None,
        timeout: float | None = None,
    ) -> None:
        self.world = world.current()
        self.account = account or Account()
        self.name = name
        self.ranks = _ranks_of(group, self.world.size)
        self.size = len(self.ranks)
        self.rank = self.ranks.index(self.world.rank)
        self.timeout = timeout or self.world.timeout
        self.group: ProcessGroup | None = None
        if self.size > 1:
            self.group = dist.new_group(
                self.ranks, timeout=world.NEVER, use_local_synchronization=True
            )
        self._issuer = Lane(f"{name}-issue")
        self._landers: dict[str, Lane] = {}
        self._stream: torch.cuda.Stream | None = None
        self._rate = _ASSUMED_RATE
        self._timed = False
        self._broken: PeerLost | None = None

    # -- transfers --------------------------------------------------------------------------------

    def mean(self, flat: Tensor, codec: AnyCodec | None = None) -> Flight:
        """The mean of `flat` over the ranks, into `flat`, the same bits everywhere."""
        codec = _checked(codec)
        require_flat(flat)
        if self.group is None or flat.numel() == 0:
            return Flight(flat, self.account)
        if isinstance(codec, Dense) and codec.summable:
            return self._launch(flat, lambda buffer: self._dense_mean(buffer))
        return self._launch(flat, lambda buffer: self._two_phase_mean(buffer, codec))

    def exchange(
        self,
        flat: Tensor,
        neighbours: Sequence[int],
        weights: Sequence[float],
        *,
        codec: Codec | None = None,
    ) -> Flight:
        """own * flat + sum_j weights[j] * (flat of neighbours[j]), into `flat`.

        `own` is 1 - sum(weights). Neighbours are ranks of the group; each of them must name this
        rank among its own. Terms are added in rank order, so a symmetric graph is reproducible.
        """
        codec = codec or Dense()
        require_flat(flat)
        if len(neighbours) != len(weights):
            raise ValueError(f"exchange got {len(neighbours)} neighbours, {len(weights)} weights")
        bad = [peer for peer in neighbours if not 0 <= peer < self.size or peer == self.rank]
        if bad or len(set(neighbours)) != len(neighbours):
            raise ValueError(
                f"exchange takes distinct ranks of 0..{self.size - 1} other than {self.rank}, "
                f"got {list(neighbours)}"
            )
        if not neighbours:
            return Flight(flat, self.account)
        pairs = sorted(zip(neighbours, weights, strict=True))
        return self._launch(flat, lambda buffer: self._exchange(buffer, pairs, codec))

    def send(self, flat: Tensor, to: int, *, codec: Codec | None = None) -> Flight:
        """Sends to one rank of the group, which must call `recv`. Lands when the buffer is free."""
        require_flat(flat)
        self._require_peer(to)
        use = codec or Dense(flat.dtype)
        return self._launch(flat, lambda buffer: self._send(buffer, to, use), lane=f"to {to}")

    def recv(self, flat: Tensor, source: int, *, codec: Codec | None = None) -> Flight:
        """Receives what rank `source` sends, into `flat`; the same length and codec there."""
        require_flat(flat)
        self._require_peer(source)
        use = codec or Dense(flat.dtype)
        return self._launch(
            flat, lambda buffer: self._recv(buffer, source, use), lane=f"from {source}"
        )

    def agree(
        self, values: Sequence[float], how: Literal["max", "min", "sum"] = "max"
    ) -> list[float]:
        """Reduces a few numbers over the ranks and returns them at once; for flags and counts."""
        return self.poll(values, how).wait().tolist()

    def poll(self, values: Sequence[float], how: Literal["max", "min", "sum"] = "max") -> Flight:
        """`agree` without the wait: a flight of float64 numbers."""
        flat = torch.tensor(list(values), dtype=torch.float64)
        if self.group is None or not values:
            return Flight(flat, self.account)
        return self._launch(flat, lambda buffer: self._reduce(buffer, _REDUCTIONS[how]))

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """Everyone's bytes, in rank order, at once; for digests and settings (no pickle)."""
        if self.group is None:
            return [payload]
        width = int(self.agree([len(payload)])[0])
        own = torch.zeros(8 + width, dtype=torch.uint8)
        framed = len(payload).to_bytes(8, "little") + payload
        own[: len(framed)] = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        rows = torch.empty(self.size, own.numel(), dtype=torch.uint8)
        self._launch(rows, lambda buffer: self._gather(buffer, own)).wait()
        return [
            bytes(row[8 : 8 + int.from_bytes(bytes(row[:8].tolist()), "little")].tolist())
            for row in rows
        ]

    def watch(
        self, works: list[Work], buffer: Tensor, then: Callable[[Tensor], Tensor]
    ) -> "torch.futures.Future[Tensor]":
        """Looks after a collective that somebody else (DDP) issued on this wire's group.

        The future gets `then(buffer)`, or the error that names a lost peer.
        """
        future: torch.futures.Future[Tensor] = torch.futures.Future()

        def settle() -> None:
            try:
                self._finish((works, buffer.nbytes), buffer.nbytes)
                future.set_result(then(buffer))
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]

        self._lander("collective").submit(settle)
        return future

    @property
    def lost(self) -> PeerLost | None:
        """The error that ended this wire; None while it works."""
        return self._broken

    def barrier(self) -> None:
        """Returns when every rank has come here."""
        self.agree([0.0])

    def close(self) -> None:
        """Ends the lanes and leaves the group; all flights must have landed."""
        for lane in (self._issuer, *self._landers.values()):
            lane.close()
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self.group = None

    # -- issuing jobs: run in the issuing lane ----------------------------------------------------

    def _dense_mean(self, buffer: Tensor) -> tuple[Started, Land]:
        assert self.group is not None
        started = collectives.all_reduce(buffer, self.group, dist.ReduceOp.SUM)
        return started, lambda: _into(buffer.div_(self.size))

    def _two_phase_mean(self, buffer: Tensor, codec: AnyCodec) -> tuple[Started, Land]:
        assert self.group is not None
        started, decode = compressed_mean(buffer, codec, self.group, self._finish_phase)

        def land() -> None:
            decode()
            if isinstance(codec, ErrorFeedback):
                codec.settle(all_finite(buffer))

        return started, land

    def _exchange(
        self, buffer: Tensor, pairs: list[tuple[int, float]], codec: Codec
    ) -> tuple[Started, Land]:
        assert self.group is not None
        part = codec.part(buffer.numel(), 1)
        sent = codec.encode(buffer, 1, part)
        received = [torch.empty_like(sent) for _ in pairs]
        peers = [peer for peer, _ in pairs]
        started = collectives.exchange(sent, received, peers, self.group)

        def land() -> None:
            own = 1.0 - sum(weight for _, weight in pairs)
            terms = [(self.rank, own, sent)] + [
                (peer, weight, payload)
                for (peer, weight), payload in zip(pairs, received, strict=True)
            ]
            values = torch.empty_like(buffer)
            total = torch.zeros_like(buffer)
            for peer, weight, payload in sorted(terms, key=lambda term: term[0]):
                exact = peer == self.rank  # one's own values need no codec
                term = buffer if exact else codec.decode(payload, part, values)
                total.add_(term, alpha=weight)
            buffer.copy_(total)

        return started, land

    def _send(self, buffer: Tensor, to: int, codec: Codec) -> tuple[Started, Land]:
        assert self.group is not None
        payload = codec.encode(buffer, 1, codec.part(buffer.numel(), 1))
        return collectives.send(payload, to, self.group), lambda: _into(payload)

    def _recv(self, buffer: Tensor, source: int, codec: Codec) -> tuple[Started, Land]:
        assert self.group is not None
        part = codec.part(buffer.numel(), 1)
        payload = torch.empty(1, codec.payload_bytes(part), dtype=torch.uint8, device=buffer.device)
        started = collectives.receive(payload, source, self.group)
        return started, lambda: _into(codec.decode(payload, part, buffer))

    def _reduce(self, buffer: Tensor, op: dist.ReduceOp.RedOpType) -> tuple[Started, Land]:
        assert self.group is not None
        return collectives.all_reduce(buffer, self.group, op), lambda: None

    def _gather(self, rows: Tensor, own: Tensor) -> tuple[Started, Land]:
        assert self.group is not None
        sent = own.to(rows.device)
        return collectives.all_gather(rows, sent, self.group), lambda: _into(sent)

    # -- the two lanes ----------------------------------------------------------------------------

    def _launch(self, flat: Tensor, issue: Issue, *, lane: str = "collective") -> Flight:
        flight = Flight(flat, self.account)
        self.account.launched()
        ready = self._payload_ready(flat)
        issued = self._issuer.submit(lambda: self._issue(flat, ready, issue))
        flight._lands_with(
            self._lander(lane).submit(lambda: self._land(flat, issued, flight.launched_at))
        )
        return flight

    def _lander(self, key: str) -> Lane:
        if key not in self._landers:
            self._landers[key] = Lane(f"{self.name}-land-{key}")
        return self._landers[key]

    def _issue(
        self, flat: Tensor, ready: torch.cuda.Event | None, issue: Issue
    ) -> tuple[Started, Land, Tensor]:
        if self._broken is not None:
            raise self._broken
        assert self.group is not None
        with self._on_stream(flat, ready):
            buffer = flat.to(collectives.transport_device(flat, self.group))
            try:
                started, land = issue(buffer)
            except RuntimeError as error:
                raise self._failure(error) from error
        self.account.sent(started[1])
        return started, land, buffer

    def _land(
        self,
        flat: Tensor,
        issued: "Future[tuple[Started, Land, Tensor]]",
        launched_at: float,
    ) -> float:
        started, land, buffer = issued.result()
        with self._on_stream(flat, None):
            self._finish(started, flat.nbytes)
            land()
            if buffer is not flat and buffer.data_ptr() != flat.data_ptr():
                flat.copy_(buffer)
            if flat.is_cuda:
                torch.cuda.current_stream(flat.device).synchronize()
        arrived = time.perf_counter()
        self._time(started[1], arrived - launched_at)
        return arrived

    def _finish_phase(self, started: Started) -> None:
        """An inner phase: counted here, since the flight's launch counts the last one only."""
        self._finish(started, started[1])
        self.account.sent(started[1])

    def _finish(self, started: Started, nbytes: int) -> None:
        """Waits, looking after the peers whenever a timeout passes without an arrival."""
        deadline = time.monotonic() + self.timeout + _PATIENCE * nbytes / self._rate
        for work in started[0]:
            while True:
                try:
                    work.wait(timedelta(seconds=self.timeout))
                    break
                except RuntimeError as error:
                    if not self._may_be_slow(error) or time.monotonic() > deadline:
                        raise self._failure(error) from error

    def _may_be_slow(self, error: RuntimeError) -> bool:
        """Whether this is only the end of one wait, with every peer alive."""
        if "timed out" not in str(error).lower() or self.world.heartbeat is None:
            return False
        return not self.world.heartbeat.suspects(self.ranks)

    def _failure(self, error: RuntimeError) -> PeerLost:
        if self._broken is None:
            cause = str(error).strip().split("\n")[-1][:200]
            self._broken = self.world.lost(self.ranks, f"{self.name}: {cause}")
        return self._broken

    def _time(self, sent: int, seconds: float) -> None:
        """Keeps the slowest rate seen for payloads large enough to tell a rate."""
        if sent >= 65536 and seconds > 0:
            rate = sent / seconds
            self._rate = min(self._rate, rate) if self._timed else rate
            self._timed = True

    def _payload_ready(self, flat: Tensor) -> torch.cuda.Event | None:
        if not flat.is_cuda:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(flat.device))
        return event

    def _on_stream(
        self, flat: Tensor, ready: torch.cuda.Event | None
    ) -> AbstractContextManager[object]:
        if not flat.is_cuda:
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(flat.device)
        if ready is not None:
            self._stream.wait_event(ready)
        return torch.cuda.stream(self._stream)

    def _require_peer(self, peer: int) -> None:
        if not 0 <= peer < self.size or peer == self.rank:
            raise ValueError(
                f"wire {self.name!r} has ranks 0..{self.size - 1} and this is {self.rank}: "
                f"cannot exchange with rank {peer}"
            )


def _checked(codec: AnyCodec | None) -> AnyCodec:
    if codec is None:
        return Dense()
    if not isinstance(codec, Codec | ErrorFeedback):
        raise ValueError(f"codec takes a thinwire codec such as Int8(), got {codec!r}")
    return codec


def _ranks_of(group: Group, world_size: int) -> list[int]:
    if group is None:
        return list(range(world_size))
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group takes one dimension of a DeviceMesh, got a mesh of {group.ndim}; "
                f"name one, as in mesh[{(group.mesh_dim_names or ('replica',))[0]!r}]"
            )
        group = group.get_group()
    return list(dist.get_process_group_ranks(group))


def group_size(group: Group) -> int:
    """Ranks in a group as `Wire` takes it, known before a wire is made."""
    return len(_ranks_of(group, world.current().size))


def _into(_result: Tensor) -> None:
    """The result is already where it belongs; keeps the closure's buffers alive until then."""

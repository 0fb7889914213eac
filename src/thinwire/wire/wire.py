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

[Note: exit] A process must be able to leave although its group is broken or a flight is in the air,
but the destructor of a gloo group, which close() and shutdown() bring about, waits for its
transfers, and for a peer that is frozen it would wait for ever. Such a group is never destroyed.
"""

import atexit
import ctypes
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from thinwire.errors import PeerLost
from thinwire.wire import collectives, world
from thinwire.wire.account import Account
from thinwire.wire.codecs import Codec, Dense, ErrorFeedback
from thinwire.wire.codecs.base import require_flat
from thinwire.wire.collectives import Part, Started, TransferError
from thinwire.wire.compressed_mean import compressed_mean, own_part
from thinwire.wire.flight import Flight, all_finite
from thinwire.wire.groups import new_group
from thinwire.wire.heartbeat import Heartbeat
from thinwire.wire.lane import Lane

AnyCodec = Codec | ErrorFeedback
Group = ProcessGroup | DeviceMesh | None
Land = Callable[[], None]
# An issuing job gets the buffer where the group can carry it and returns what it has started,
# with what is left to do once that has arrived.
Issue = Callable[[Tensor], tuple[Started, Land]]
Late = Callable[[], dict[int, str]]  # who has not done its part, found out when time is up

_REDUCTIONS = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "sum": dist.ReduceOp.SUM}
_ASSUMED_RATE = 12_500.0  # bytes/s (0.1 Mbit/s) until a flight has been timed
_PATIENCE = 8.0  # a transfer may take this many times what the measured rate predicts
_NETWORK_WORDS = ("gloo", "NCCL", "Connection", "Socket", "PeerLost")
_EXIT_PATIENCE = 10.0  # seconds an exit waits for flights that nobody has landed


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
        if timeout is not None and not 0 < timeout < float("inf"):
            raise ValueError(f"Wire(timeout=...) takes seconds > 0, got {timeout!r}")
        self.world = world.current()
        self.account = account or Account()
        self.name = name
        self.ranks = _ranks_of(group, self.world.size)
        if self.world.rank not in self.ranks:
            raise ValueError(
                f"this is rank {self.world.rank}, no member of the group of ranks {self.ranks}; "
                "make a wire only where its group includes the rank"
            )
        self.size = len(self.ranks)
        self.rank = self.ranks.index(self.world.rank)
        self.timeout = timeout or self.world.timeout
        self.group: ProcessGroup | None = None
        if self.size > 1:
            self.group = new_group(self.ranks)
        self._key = f"{name}:{self.group.group_name[:8]}" if self.group is not None else name
        self._issuer = Lane(f"{name}-issue")
        self._landers: dict[str, Lane] = {}
        self._stream: torch.cuda.Stream | None = None
        self._rate = _ASSUMED_RATE
        self._timed = False
        self._issuing = 0  # number of the transfer that the issuing lane is busy with
        self._closed = False
        self._broken: Exception | None = None
        self._breaking = threading.Lock()
        _wires.add(self)

    # -- transfers --------------------------------------------------------------------------------

    def mean(self, flat: Tensor, codec: AnyCodec | None = None) -> Flight:
        """The mean of `flat` over the ranks, into `flat`, the same bits everywhere."""
        self._require_open()
        require_flat(flat)
        codec = _checked(codec, flat)
        if self.group is None or flat.numel() == 0:
            return Flight(flat, self.account)
        if isinstance(codec, Dense) and codec.summable:
            return self._launch(flat, lambda buffer: self._dense_mean(buffer, codec.dtype))
        if isinstance(codec, ErrorFeedback):
            # Refused here, where all ranks are at the same call, and not in a lane, where it would
            # depend on what has arrived.
            codec.take_off(flat.numel(), own_part(codec.codec, flat.numel(), self.size, self.rank))
        flight = self._launch(flat, lambda buffer: self._two_phase_mean(buffer, codec))
        if isinstance(codec, ErrorFeedback):
            flight._when_settled(codec.touch_down)
        return flight

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
        self._require_open()
        require_flat(flat)
        use = _stateless(codec, flat)
        if len(neighbours) != len(weights):
            raise ValueError(f"exchange got {len(neighbours)} neighbours, {len(weights)} weights")
        bad = [peer for peer in neighbours if not 0 <= peer < self.size or peer == self.rank]
        if bad or len(set(neighbours)) != len(neighbours):
            raise ValueError(
                f"exchange takes distinct ranks of 0..{self.size - 1} other than {self.rank}, "
                f"got {list(neighbours)}"
            )
        if not neighbours or flat.numel() == 0:
            return Flight(flat, self.account)
        pairs = sorted(zip(neighbours, weights, strict=True))
        return self._launch(flat, lambda buffer: self._exchange(buffer, pairs, use))

    def send(self, flat: Tensor, to: int, *, codec: Codec | None = None) -> Flight:
        """Sends to one rank of the group, which must call `recv`. Lands when the buffer is free."""
        self._require_open()
        require_flat(flat)
        self._require_peer(to)
        use = _stateless(codec, flat)
        if flat.numel() == 0:
            return Flight(flat, self.account)
        return self._launch(flat, lambda buffer: self._send(buffer, to, use), peer=to, lane="to")

    def recv(self, flat: Tensor, source: int, *, codec: Codec | None = None) -> Flight:
        """Receives what rank `source` sends, into `flat`; the same length and codec there."""
        self._require_open()
        require_flat(flat)
        self._require_peer(source)
        use = _stateless(codec, flat)
        if flat.numel() == 0:
            return Flight(flat, self.account)
        return self._launch(
            flat, lambda buffer: self._recv(buffer, source, use), peer=source, lane="from"
        )

    def agree(
        self, values: Sequence[float], how: Literal["max", "min", "sum"] = "max"
    ) -> list[float]:
        """Reduces a few numbers over the ranks and returns them at once; for flags and counts."""
        return self.poll(values, how).wait().tolist()

    def poll(self, values: Sequence[float], how: Literal["max", "min", "sum"] = "max") -> Flight:
        """`agree` without the wait: a flight of float64 numbers."""
        self._require_open()
        if how not in _REDUCTIONS:
            raise ValueError(f"agree takes one of {', '.join(_REDUCTIONS)}, got {how!r}")
        flat = torch.tensor(list(values), dtype=torch.float64)
        if self.group is None or not values:
            return Flight(flat, self.account)
        return self._launch(flat, lambda buffer: self._reduce(buffer, _REDUCTIONS[how]))

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """Everyone's bytes, in rank order, at once; for digests and settings (no pickle)."""
        self._require_open()
        if self.group is None:
            return [payload]
        width = int(self.agree([len(payload)])[0])
        own = torch.zeros(8 + width, dtype=torch.uint8)
        framed = len(payload).to_bytes(8, "little") + payload
        own[: len(framed)] = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        rows = torch.empty(self.size, own.numel(), dtype=torch.uint8)
        self._launch(rows, lambda buffer: self._gather(buffer, own)).wait()
        texts = [row.numpy().tobytes() for row in rows]
        return [text[8 : 8 + int.from_bytes(text[:8], "little")] for text in texts]

    def watch(
        self, parts: list[Part], buffer: Tensor, then: Callable[[Tensor], Tensor]
    ) -> "torch.futures.Future[Tensor]":
        """Looks after a collective that somebody else (DDP) issued on this wire's group.

        The future gets `then(buffer)`, or the error that names a lost peer.
        """
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        number = self._number()

        def settle() -> None:
            try:
                self._finish((parts, buffer.nbytes), buffer.nbytes, lambda: self._late(number))
                future.set_result(then(buffer))
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]

        self._lander("collective").submit(settle)
        return future

    @property
    def lost(self) -> PeerLost | None:
        """The error that ended this wire; None while it works."""
        return self._broken if isinstance(self._broken, PeerLost) else None

    def explain(self, error: BaseException) -> PeerLost | None:
        """The lost peer behind an error of somebody else's transfer (DDP's) on this wire's group.

        None if the error is not the network's, or nobody is lost.
        """
        if self.lost is not None or self.group is None:
            return self.lost
        if not any(word in str(error) for word in _NETWORK_WORDS):
            return None
        assert self.world.heartbeat is not None
        suspects = self.world.heartbeat.suspects(self.ranks)
        return self._failure(str(error), suspects) if suspects else None

    def barrier(self) -> None:
        """Returns when every rank has come here."""
        self.agree([0.0])

    def close(self) -> None:
        """Ends the lanes and leaves the group; all flights must have landed."""
        self._closed = True
        for lane in self._lanes():
            lane.close()
        if self.group is not None:
            if self.world.heartbeat is not None:
                self.world.heartbeat.forget(self._key)
            if dist.is_initialized():
                dist.destroy_process_group(self.group)
        self.group = None

    # -- issuing jobs: run in the issuing lane ----------------------------------------------------

    def _dense_mean(self, buffer: Tensor, dtype: torch.dtype) -> tuple[Started, Land]:
        assert self.group is not None
        sums = buffer.to(dtype)  # itself, when it travels as it is
        started = collectives.all_reduce(sums, self.group, dist.ReduceOp.SUM)

        def land() -> None:
            sums.div_(self.size)
            if sums is not buffer:
                buffer.copy_(sums)

        return started, land

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

    def _launch(
        self, flat: Tensor, issue: Issue, *, peer: int | None = None, lane: str = "collective"
    ) -> Flight:
        """`peer` is the other end of a message; without one all ranks of the group take part."""
        flight = Flight(flat, self.account)
        self.account.launched()
        ready = self._payload_ready(flat)
        key = lane if peer is None else f"{lane} {peer}"
        number = self._number() if peer is None else 0
        late = (lambda: self._late(number)) if peer is None else (lambda: self._late_peer(peer))
        issued = self._issuer.submit(lambda: self._issue(flat, ready, issue, number))
        flight._lands_with(
            self._lander(key).submit(lambda: self._land(flat, issued, flight.launched_at, late))
        )
        return flight

    def _lander(self, key: str) -> Lane:
        if key not in self._landers:
            self._landers[key] = Lane(f"{self.name}-land-{key}")
        return self._landers[key]

    def _lanes(self) -> list[Lane]:
        return [self._issuer, *self._landers.values()]

    def _issue(
        self, flat: Tensor, ready: torch.cuda.Event | None, issue: Issue, number: int
    ) -> tuple[Started, Land, Tensor]:
        self._require_whole()
        self._issuing = number
        assert self.group is not None
        carrier = collectives.transport_device(flat, self.group, self.world.device)
        try:
            with self._on_stream(flat, carrier, ready):
                buffer = flat.to(carrier)
                started, land = issue(buffer)
        except TransferError as error:
            raise self._failure(str(error)) from error
        except Exception as error:
            # The other ranks go on without this transfer: nothing after it would match.
            self._break(error)
            raise
        self.account.sent(started[1])
        return started, land, buffer

    def _land(
        self,
        flat: Tensor,
        issued: "Future[tuple[Started, Land, Tensor]]",
        launched_at: float,
        late: Late,
    ) -> float:
        started, land, buffer = issued.result()
        with self._on_stream(flat, buffer.device, None) as stream:
            self._finish(started, flat.nbytes, late)
            land()
            if buffer is not flat and buffer.data_ptr() != flat.data_ptr():
                flat.copy_(buffer)
            if stream is not None:
                torch.cuda.current_stream().synchronize()
        arrived = time.perf_counter()
        self._time(started[1], arrived - launched_at)
        return arrived

    def _finish_phase(self, started: Started) -> None:
        """An inner phase: counted here, since the flight's launch counts the last one only."""
        number = self._issuing
        self._finish(started, started[1], lambda: self._late(number))
        self.account.sent(started[1])

    def _finish(self, started: Started, nbytes: int, late: Late) -> None:
        """Waits for the parts, looking after the peers once that takes long."""
        began = time.monotonic()
        limit = self.timeout + _PATIENCE * nbytes / self._rate
        heart = self.world.heartbeat
        assert heart is not None
        for part in started[0]:
            try:
                if not part.arrives(within=max(0.0, self.timeout - heart.grace)):
                    self._outlast(part, heart, began, limit, late)
            except RuntimeError as error:
                raise self._failure(str(error)) from error

    def _outlast(
        self, part: Part, heart: Heartbeat, began: float, limit: float, late: Late
    ) -> None:
        """A slow link is waited for up to the limit, a lost peer no longer than it is silent."""
        with heart.watch(self.ranks) as watch:
            while not part.arrives(within=heart.interval):
                waited = time.monotonic() - began
                if lost := watch.lost():
                    raise self._failure(f"no arrival for {waited:.1f} s", lost)
                if waited > limit:
                    raise self._failure(f"no arrival for {waited:.1f} s", late())

    def _number(self) -> int:
        """Counts a transfer that all ranks begin, so that the others can tell who has not."""
        heart = self.world.heartbeat
        return heart.begun(self._key) if heart is not None else 0

    def _late(self, number: int) -> dict[int, str]:
        """Who answers, but has not come to this transfer."""
        assert self.world.heartbeat is not None
        beats = self.world.heartbeat.beats()
        behind = {}
        for rank in self.ranks:
            beat = beats.get(rank)
            if beat is not None and beat.issued.get(self._key, 0) < number:
                behind[rank] = (
                    f"on {beat.host}, answers, but after {beat.note!r} it has not come to "
                    f"transfer {number} of {self.name!r}"
                )
        return behind

    def _late_peer(self, peer: int) -> dict[int, str]:
        """The other end of a message answers, but does not take or send it."""
        assert self.world.heartbeat is not None
        rank = self.ranks[peer]
        beat = self.world.heartbeat.beats().get(rank)
        doing = f"on {beat.host}, answers after {beat.note!r}, but" if beat is not None else "it"
        return {rank: f"{doing} did not do its part of a message"}

    def _failure(self, cause: str, suspects: Mapping[int, str] | None = None) -> PeerLost:
        """The error of this wire from now on: the first is the one that names who went first."""
        with self._breaking:
            if self._broken is None:
                cause = cause.strip().split("\n")[-1][:200]
                self._break(self.world.lost(self.ranks, f"{self.name}: {cause}", suspects=suspects))
        return PeerLost(str(self._broken))

    def _break(self, error: Exception) -> None:
        self._broken = error
        _keep(self.group)

    def _require_whole(self) -> None:
        if isinstance(self._broken, PeerLost):
            raise PeerLost(str(self._broken))
        if self._broken is not None:
            raise RuntimeError(
                f"wire {self.name!r} is out of step with its peers since an earlier transfer "
                f"failed here: {self._broken}"
            ) from self._broken

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"wire {self.name!r} is closed")

    def _drain(self, patience: float) -> None:
        """At exit: what is in the air may be a peer's result, and is given some time to land."""
        end = time.monotonic() + patience
        for lane in self._lanes():
            lane.close()
        if not all(lane.join(max(0.0, end - time.monotonic())) for lane in self._lanes()):
            _keep(self.group)

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
        self, flat: Tensor, carrier: torch.device, ready: torch.cuda.Event | None
    ) -> AbstractContextManager[object]:
        """Gives None where no device takes part. The payload or what carries it may be on one."""
        device = flat.device if flat.is_cuda else carrier
        if device.type != "cuda":
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        if ready is not None:
            self._stream.wait_event(ready)
        return _Streaming(self._stream)

    def _require_peer(self, peer: int) -> None:
        if not 0 <= peer < self.size or peer == self.rank:
            raise ValueError(
                f"wire {self.name!r} has ranks 0..{self.size - 1} and this is {self.rank}: "
                f"cannot exchange with rank {peer}"
            )


class _Streaming:
    """torch.cuda.stream, but its `with` gives the stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream, self._context = stream, torch.cuda.stream(stream)

    def __enter__(self) -> torch.cuda.Stream:
        self._context.__enter__()
        return self._stream

    def __exit__(self, *raised: Any) -> None:
        self._context.__exit__(*raised)


def _checked(codec: AnyCodec | None, flat: Tensor) -> AnyCodec:
    if codec is None:
        return Dense(flat.dtype)
    if not isinstance(codec, Codec | ErrorFeedback):
        raise ValueError(f"codec takes a thinwire codec such as Int8(), got {codec!r}")
    return codec


def _stateless(codec: Codec | None, flat: Tensor) -> Codec:
    use = _checked(codec, flat)
    if isinstance(use, ErrorFeedback):
        raise ValueError(
            f"only mean takes error feedback, whose memory follows one stream of payloads; "
            f"give this transfer {use.codec!r}"
        )
    return use


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
    return sorted(dist.get_process_group_ranks(group))


def group_size(group: Group) -> int:
    """Ranks in a group as `Wire` takes it, known before a wire is made."""
    return len(_ranks_of(group, world.current().size))


def _into(_result: Tensor) -> None:
    """The result is already where it belongs; keeps the closure's buffers alive until then."""


_wires: "weakref.WeakSet[Wire]" = weakref.WeakSet()


def _keep(group: ProcessGroup | None) -> None:
    """See [Note: exit]: one reference that no clean-up of the interpreter takes back."""
    if group is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _at_exit() -> None:
    failed = hasattr(sys, "last_value")  # an exception ends this process: its peers must not wait
    for wire in list(_wires):
        wire._drain(0.0 if failed else _EXIT_PATIENCE)


atexit.register(_at_exit)

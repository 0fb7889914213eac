"""CommEngine: the comm threads of one process group, which issue, turn and land; lost peers.

[Note: order] Every transfer of a wire is issued from the wire's one issuing thread, in the order of
the calls. As long as all ranks make the same calls in the same order - by step counts, never by
looking at what has arrived - their collectives match.

[Note: turning] What follows a first phase is started from a second thread, in the same order and,
in host memory, under a tag of its own: then first phases of later transfers are on their way
meanwhile and a row of transfers pays the delay of the network twice, not twice for each. A device's
collectives have one order and no tags: there the issuing thread waits between the phases, and the
calls behind it wait their turn there, not in the caller.

[Note: landing] Another thread waits for the last phase, finishes it (divides, decodes) and notes
the time, so that this work too passes behind compute. Point-to-point transfers land in a thread for
each peer and direction: a message that is late must not hold up the news of another.

[Note: streams] With CUDA the threads work on a side stream of the wire. It starts after the
caller's stream has produced the payload (an event recorded at the call) and the lander synchronises
it before it reports. The flight holds every buffer until then, so the allocator can not reuse them.

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
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from thinwire.errors import BadPayload, PeerLost
from thinwire.wire import collectives
from thinwire.wire.account import Account
from thinwire.wire.collectives import Part, Started, TransferError
from thinwire.wire.comm_thread import CommThread
from thinwire.wire.flight import Flight
from thinwire.wire.groups import new_group
from thinwire.wire.heartbeat import Heartbeat
from thinwire.wire.phase import Phase
from thinwire.wire.transfers import Issue
from thinwire.wire.world import World

Late = Callable[[], dict[int, str]]  # who has not done its part, found out when time is up

_ASSUMED_RATE = 12_500.0  # bytes/s (0.1 Mbit/s) until a flight has been timed
_PATIENCE = 8.0  # a transfer may take this many times what the measured rate predicts
_EXIT_PATIENCE = 10.0  # seconds an exit waits for flights that nobody has landed
_NETWORK_WORDS = ("gloo", "NCCL", "Connection", "Socket", "PeerLost")


class CommEngine:
    """Moves the payloads of one wire among `ranks` of the world, two or more."""

    def __init__(
        self, ranks: list[int], name: str, account: Account, world: World, timeout: float
    ) -> None:
        assert world.heartbeat is not None
        self.ranks, self.name, self.account, self.world = ranks, name, account, world
        self.timeout = timeout
        self._heart: Heartbeat = world.heartbeat
        self.group: ProcessGroup = new_group(ranks)
        self._key = f"{name}:{self.group.group_name[:8]}"
        self._issuer = CommThread(f"{name}-issue")
        self._turner = CommThread(f"{name}-turn")
        self._landers: dict[str, CommThread] = {}
        self._stream: torch.cuda.Stream | None = None
        self._rate = _ASSUMED_RATE
        self._timed = False
        self._broken: Exception | None = None
        self._breaking = threading.Lock()
        _carriers.add(self)

    def launch(
        self,
        flat: Tensor,
        issue: Issue,
        *,
        sent: int,
        peer: int | None = None,
        lane: str = "collective",
        turns: bool = False,
        prepare: Callable[[], None] | None = None,
    ) -> Flight:
        """`sent` are the bytes that all its phases send. `peer` is the other end of a message;
        without one all ranks of the group take part. `turns`: it may have several phases. `prepare`
        is called in the issuing thread, before anything is made of `flat`."""
        flight = Flight(flat, self.account)
        self.account.launched(sent)
        ready = self._payload_ready(flat)
        key = lane if peer is None else f"{lane} {peer}"
        number = self._number() if peer is None else 0
        late = (lambda: self._late(number)) if peer is None else (lambda: self._late_peer(peer))
        issued = self._issuer.submit(lambda: self._issue(flat, ready, issue, late, prepare))
        turned = issued
        if turns:
            turned = self._turner.submit(lambda: self._turn(flat, *issued.result(), late, number))
        land = partial(self._land, flat, turned, flight.launched_at, late, number)
        flight._lands_with(self._lander(key).submit(land))
        return flight

    def _lander(self, key: str) -> CommThread:
        if key not in self._landers:
            self._landers[key] = CommThread(f"{self.name}-land-{key}")
        return self._landers[key]

    def _lanes(self) -> list[CommThread]:
        return [self._issuer, self._turner, *self._landers.values()]

    def _issue(
        self,
        flat: Tensor,
        ready: torch.cuda.Event | None,
        issue: Issue,
        late: Late,
        prepare: Callable[[], None] | None,
    ) -> tuple[Phase, Tensor]:
        self._require_whole()
        carrier = collectives.transport_device(flat, self.group, self.world.device)
        with self._in_step(), self._on_stream(flat, carrier, ready):
            if prepare is not None:
                prepare()
            buffer = flat.to(carrier)
            phase = issue(buffer)
            if buffer.is_cuda:  # see [Note: turning]
                phase = self._last(phase, late)
        return phase, buffer

    def _turn(
        self, flat: Tensor, phase: Phase, buffer: Tensor, late: Late, number: int
    ) -> tuple[Phase, Tensor]:
        if phase.turn is None:
            return phase, buffer
        self._require_whole()
        with self._in_step(number), self._on_stream(flat, buffer.device, None):
            return self._last(phase, late), buffer

    def _last(self, phase: Phase, late: Late) -> Phase:
        """Waits for one phase after the other, up to the launch of the last one."""
        while phase.turn is not None:
            self._finish(phase.started, phase.started[1], late)
            phase = phase.turn()
        return phase

    @contextmanager
    def _in_step(self, number: int = 0) -> Iterator[None]:
        """Around what the other ranks do as well: an error here puts the wire out of step."""
        try:
            yield
        except TransferError as error:
            raise self._failure(str(error)) from error
        except BadPayload as error:
            self._break(named := self._blamed(error, number))
            raise named from error
        except Exception as error:
            # The other ranks go on without this transfer: nothing after it would match.
            if self._broken is None:
                self._break(error)
            raise

    def _land(
        self,
        flat: Tensor,
        turned: "Future[tuple[Phase, Tensor]]",
        launched_at: float,
        late: Late,
        number: int,
    ) -> float:
        phase, buffer = turned.result()
        with self._on_stream(flat, buffer.device, None) as stream:
            self._finish(phase.started, flat.nbytes, late)
            with self._in_step(number):
                phase.land()
            if buffer is not flat and buffer.data_ptr() != flat.data_ptr():
                flat.copy_(buffer)
            if stream is not None:
                torch.cuda.current_stream().synchronize()
        arrived = time.perf_counter()
        self._time(phase.started[1], arrived - launched_at)
        return arrived

    def _finish(self, started: Started, nbytes: int, late: Late) -> None:
        """Waits for the parts, looking after the peers once that takes long."""
        began = time.monotonic()
        limit = self.timeout + _PATIENCE * nbytes / self._rate
        heart = self._heart
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
        return self._heart.begun(self._key)

    def _late(self, number: int) -> dict[int, str]:
        """Who answers, but has not come to this transfer."""
        beats = self._heart.beats()
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
        rank = self.ranks[peer]
        beat = self._heart.beats().get(rank)
        doing = f"on {beat.host}, answers after {beat.note!r}, but" if beat is not None else "it"
        return {rank: f"{doing} did not do its part of a message"}

    def _failure(self, cause: str, suspects: Mapping[int, str] | None = None) -> PeerLost:
        """The error of this wire from now on: the first is the one that names who went first."""
        with self._breaking:
            if self._broken is None:
                cause = cause.strip().split("\n")[-1][:200]
                self._break(self.world.lost(self.ranks, f"{self.name}: {cause}", suspects=suspects))
        return PeerLost(str(self._broken))

    def _blamed(self, error: BadPayload, number: int) -> BadPayload:
        sender = f"rank {self.ranks[error.sender]}" if error.sender is not None else "a rank"
        transfer = f"transfer {number}" if number else "a message"  # which is not counted
        return BadPayload(
            f"rank {self.world.rank} cannot decode what {sender} sent in {transfer} of "
            f"{self.name!r}: {error}; run the same version with the same settings everywhere"
        )

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
        if self.lost is not None:
            return self.lost
        if not any(word in str(error) for word in _NETWORK_WORDS):
            return None
        suspects = self._heart.suspects(self.ranks)
        return self._failure(str(error), suspects) if suspects else None

    def close(self) -> None:
        """Ends the threads and leaves the group; all flights must have landed."""
        _carriers.discard(self)
        for lane in self._lanes():
            lane.close()
        for lane in self._lanes():  # their last jobs hold the group: it must not end in a thread
            lane.join(0.0 if self._broken else _EXIT_PATIENCE)
        self._heart.forget(self._key)
        if dist.is_initialized():
            dist.destroy_process_group(self.group)

    def settle(self) -> None:
        """Waits until all that this rank sends has left, and what it is sent by all has landed.

        A message that a peer has yet to send is not waited for.
        """
        landers = (v for k, v in self._landers.items() if not k.startswith("from"))
        lanes = [self._issuer, self._turner, *landers]
        for lane in lanes:
            lane.submit(lambda: None).result()

    def drain(self, patience: float) -> None:
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


class _Streaming:
    """torch.cuda.stream, but its `with` gives the stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream, self._context = stream, torch.cuda.stream(stream)

    def __enter__(self) -> torch.cuda.Stream:
        self._context.__enter__()
        return self._stream

    def __exit__(self, *raised: Any) -> None:
        self._context.__exit__(*raised)


_carriers: "weakref.WeakSet[CommEngine]" = weakref.WeakSet()


def settle() -> None:
    """Waits until nothing that this process has sent is still in its own hands, on any wire."""
    for carrier in list(_carriers):
        carrier.settle()


def _keep(group: ProcessGroup | None) -> None:
    """See [Note: exit]: one reference that no clean-up of the interpreter takes back."""
    if group is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _at_exit() -> None:
    failed = hasattr(sys, "last_value")  # an exception ends this process: its peers must not wait
    for carrier in list(_carriers):
        carrier.drain(0.0 if failed else _EXIT_PATIENCE)


atexit.register(_at_exit)

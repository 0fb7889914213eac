"""World: this process among all ranks. `init()` joins it from torchrun's environment."""

import atexit
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from thinwire.checks import refusal, require_count, require_kind, require_seconds
from thinwire.errors import PeerLost, UsageError
from thinwire.wire import rendezvous
from thinwire.wire.heartbeat import Heartbeat

DEFAULT_TIMEOUT = 60.0
_JOIN_TIMEOUT = timedelta(seconds=300)


@dataclass
class World:
    """Where this process stands. One without peers is a world of size 1 with no process group."""

    rank: int
    size: int
    device: torch.device
    timeout: float
    """Seconds without a sign of life after which a peer counts as lost."""
    heartbeat: Heartbeat | None
    group: dist.ProcessGroup | None = None
    """The default group this world was made from."""

    def __post_init__(self) -> None:
        self.size = require_count("World", "size", self.size)
        self.rank = require_count("World", "rank", self.rank, least=0, most=self.size - 1)
        self.timeout = require_seconds("World", "timeout", self.timeout)
        require_kind("World", "device", self.device, torch.device, "a torch.device")
        for key, kind in (("heartbeat", Heartbeat), ("group", dist.ProcessGroup)):
            if getattr(self, key) is not None:
                require_kind("World", key, getattr(self, key), kind, f"a {kind.__name__} or None")

    def lost(
        self, ranks: list[int], cause: str, *, suspects: Mapping[int, str] | None = None
    ) -> PeerLost:
        """The error for a transfer among `ranks` that failed; names whoever is gone.

        `suspects` are the ranks, each with a reason, that the caller has found out itself.
        """
        if suspects is None:
            suspects = self.heartbeat.suspects(ranks) if self.heartbeat else {}
        if self.heartbeat is not None and self.heartbeat.given_up:
            return PeerLost(
                f"rank {self.rank} was silent or late for so long that the others gave it up and "
                f"left ({cause}); look for what held it up, or raise init(timeout=...)"
            )
        if suspects:
            if self.heartbeat is not None:
                self.heartbeat.found_lost(suspects)
            names = "; ".join(f"rank {peer} ({why})" for peer, why in sorted(suspects.items()))
            return PeerLost(f"rank {self.rank} lost {names}: {cause}")
        others = [r for r in ranks if r != self.rank]
        return PeerLost(
            f"rank {self.rank}: a transfer with ranks {others} failed though all of them "
            f"still answer ({cause}); look for an error on one of them"
        )


_world: World | None = None
_trying = False
_joined = 0  # worlds this process has joined, the same number on every rank


def init(
    settings: Mapping[str, Any] | None = None,
    *,
    backend: str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
) -> World:
    """Joins the other ranks as torchrun's environment says; alone if there is no such environment.

    Args:
        settings: whatever must be equal on all ranks (JSON-able); a difference is refused with an
            error that names the setting, both values and the ranks.
        backend: as in torch.distributed.init_process_group; gloo on CPUs, nccl beside it with CUDA.
        timeout: seconds without a sign of life after which a peer counts as lost.
    """
    global _world
    try:
        timeout = require_seconds("init", "timeout", timeout)
        _check_init(settings, backend)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if dist.is_initialized() or rendezvous.launched():
        rendezvous.allow_more_files()
    if not dist.is_initialized() and rendezvous.launched():
        _join(backend)
    _leave()
    _world = _of_process(timeout)
    if settings is not None:
        from thinwire.wire.agreement import require_same
        from thinwire.wire.wire import Wire

        wire = Wire(name="settings")
        try:
            require_same(wire, settings)
        finally:
            wire.close()
    return _world


def _check_init(settings: Any, backend: Any) -> None:
    if settings is not None:
        require_kind("init", "settings", settings, Mapping, "a mapping of names to values, or None")
    if backend is None:
        return
    known = dist.Backend.backend_list
    wants = f"one of {', '.join(known)}, one for each device as in cpu:gloo,cuda:nccl, or None"
    require_kind("init", "backend", backend, str, wants)
    if not all(pair.rpartition(":")[2].lower() in known for pair in backend.split(",")):
        raise refusal("init", "backend", wants, backend)


def current() -> World:
    """The world `init` joined, or the one a user's own init_process_group made.

    A world of one is made only where nobody has asked for more.
    """
    global _world
    if _world is None or _world.group is not _default_group():
        _leave()
        if not dist.is_initialized() and not _trying:
            rendezvous.require_alone()
        _world = _of_process(DEFAULT_TIMEOUT)
    return _world


@contextmanager
def trial() -> Iterator[None]:
    """In here a method may be built before the others are joined: on a toy, to try settings."""
    global _trying
    _trying = True
    try:
        yield
    finally:
        _trying = False
        if not dist.is_initialized():
            _leave()  # a world of one is not for what comes after


def shutdown() -> None:
    """Leaves the world: ends the heartbeat and the process group."""
    _leave()
    if dist.is_initialized():
        dist.destroy_process_group()


def _leave() -> None:
    """Ends the heartbeat; also at exit, for a thread inside a store call would take the interpreter
    down with "terminate called" when that is finalised under it."""
    global _world
    if _world is not None and _world.heartbeat is not None:
        _world.heartbeat.stop()
    _world = None


atexit.register(_leave)


def _default_group() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_initialized() else None


def _join(backend: str | None) -> None:
    here = rendezvous.place()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        _meet(here, backend or ("cpu:gloo,cuda:nccl" if cuda else "gloo"))
    except dist.DistNetworkError as error:
        raise _join_error(here, error) from error
    except dist.DistStoreError as error:
        raise PeerLost(
            f"not all {here.size} ranks joined within "
            f"{_JOIN_TIMEOUT.total_seconds():.0f} s: {error}"
        ) from error


def _meet(here: rendezvous.Place, backend: str) -> None:
    """Joins under keys of this world alone: torch would use those of an earlier one again, and find
    the addresses it left, where a store outlives its worlds (torchrun's does)."""
    global _joined
    _joined += 1
    store = rendezvous.store(here, _JOIN_TIMEOUT)
    rendezvous.warn_if_public(here, stacklevel=5)  # the line that called init()
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"thinwire world {_joined}", store),
        rank=here.rank,
        world_size=here.size,
        timeout=_JOIN_TIMEOUT,
    )


def _join_error(here: rendezvous.Place, error: Exception) -> Exception:
    where = f"{here.host}:{here.port}"
    if "EADDRINUSE" in str(error) or "in use" in str(error):
        return UsageError(f"no free port: {where} is in use; set MASTER_PORT to a free one")
    return PeerLost(f"cannot meet the other ranks at {where}: {error}")


def _of_process(timeout: float) -> World:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    if not dist.is_initialized():
        return World(0, 1, device, timeout, None)
    rank, size = dist.get_rank(), dist.get_world_size()
    heartbeat = None
    if size > 1:
        heartbeat = Heartbeat(
            dist.distributed_c10d._get_default_store(),
            rank,
            size,
            host=socket.gethostname(),
            interval=min(5.0, timeout / 10),
            grace=min(2.0, timeout / 2),  # a busy machine may hold a thread up for a second
        )
    return World(rank, size, device, timeout, heartbeat, _default_group())

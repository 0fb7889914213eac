"""The calls into torch.distributed, each with the bytes it makes a rank send.

Nothing outside `wire/` issues a collective. Every function starts one, returns its parts and,
beside them, what this rank sends to others under the algorithm that runs: ring all-reduce, pairwise
all-to-all, pairwise or ring all-gather.

In host memory the last two are messages between every two ranks, receives posted before sends. gloo
announces a receive on the connection that carries the data, and its own collectives send first: on
a rank that comes late the announcement waits behind the data, and the two directions of a link take
turns instead of running at once. Over a slow link that doubles the time of a transfer.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import wraps
from typing import ParamSpec

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from thinwire.wire.groups import NEVER

# torch 2.13 renamed this one and warns about the old name.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_POLL = 0.001  # seconds between two looks at a device; nccl's own blocking wait sleeps as long


class TransferError(RuntimeError):
    """The backend could not start a transfer."""


class Part(ABC):
    """A part of a transfer, with a wait that can run out and be taken up again.

    [Note: release] torch gives up the interpreter's lock to destroy a Work, and takes it back in a
    place where a thread must not end: a process that leaves at that moment aborts. A part lets go
    of its Work before it says that it has arrived, while somebody still waits for it.
    """

    @abstractmethod
    def arrives(self, within: float) -> bool:
        """Whether it is complete within so many seconds; raises what the backend raises."""


class HostPart(Part):
    """One collective of gloo's."""

    def __init__(self, work: Work) -> None:
        self._work: Work | None = work

    def arrives(self, within: float) -> bool:
        if self._work is None:
            return True
        try:
            self._work.wait(timedelta(seconds=within))
        except RuntimeError:
            if self._work.is_completed():  # it failed, rather than this wait
                raise
            return False
        self._work = None
        return True


class Messages(Part):
    """gloo closes the connection when a wait for a message runs out, so that one has no end and a
    thread of its own, for all the messages of a transfer."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._done: Future[None] = Future()
        threading.Thread(
            target=self._wait, args=(list(works),), name="messages", daemon=True
        ).start()

    def arrives(self, within: float) -> bool:
        if not wait([self._done], timeout=within).done:
            return False
        self._done.result()
        return True

    def _wait(self, works: list[Work]) -> None:
        try:
            while works:
                works.pop(0).wait(NEVER)  # see [Note: release]
        except BaseException as error:  # raised again by `arrives`
            self._done.set_exception(error)
        else:
            self._done.set_result(None)


class DevicePart(Part):
    """nccl takes a wait that ran out for the failure of the transfer, so nothing waits there until
    it is complete; the wait then orders this thread's stream after it."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def arrives(self, within: float) -> bool:
        end = time.monotonic() + within
        while not self.work.is_completed():
            if time.monotonic() > end:
                return False
            time.sleep(_POLL)
        self.work.wait()
        return True


Started = tuple[list[Part], int]


def _collective(work: Work | None, buffer: Tensor) -> Part:
    assert work is not None
    return DevicePart(work) if buffer.is_cuda else HostPart(work)


def _messages(
    sent: Sequence[tuple[Tensor, int]],
    received: Sequence[tuple[Tensor, int]],
    group: ProcessGroup,
    tag: int = 0,
) -> list[Part]:
    """Buffers to and from ranks of the group, receives first: see the head of this file."""
    operations = [
        dist.P2POp(operation, buffer, dist.get_global_rank(group, peer), group=group, tag=tag)
        for operation, messages in ((dist.irecv, received), (dist.isend, sent))
        for buffer, peer in messages
    ]
    if not operations:
        return []
    return _waited(dist.batch_isend_irecv(operations), operations[0].tensor)


def _waited(works: Sequence[Work | None], buffer: Tensor) -> list[Part]:
    if buffer.is_cuda:
        return [DevicePart(work) for work in works if work is not None]
    return [Messages([work for work in works if work is not None])]


def _others(group: ProcessGroup) -> list[int]:
    """Everybody else, each rank beginning with its neighbour, so that not all of them send to the
    same one at once."""
    size, rank = group.size(), group.rank()
    return [(rank + step) % size for step in range(1, size)]


P = ParamSpec("P")


def _starts(function: Callable[P, Started]) -> Callable[P, Started]:
    """Tells the network's errors from all others."""

    @wraps(function)
    def start(*args: P.args, **kwargs: P.kwargs) -> Started:
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            raise TransferError(str(error)) from error

    return start


def all_reduce_bytes(nbytes: int, size: int) -> int:
    """A ring passes (size - 1) / size of the buffer twice: once summed, once spread."""
    return 2 * (size - 1) * nbytes // size


@_starts
def all_reduce(buffer: Tensor, group: ProcessGroup, op: dist.ReduceOp.RedOpType) -> Started:
    """In place."""
    work = dist.all_reduce(buffer, op=op, group=group, async_op=True)
    return [_collective(work, buffer)], all_reduce_bytes(buffer.nbytes, group.size())


@_starts
def all_to_all(received: Tensor, sent: Tensor, group: ProcessGroup) -> Started:
    """Row j of `sent` goes to rank j; row i of `received` comes from rank i."""
    nbytes = (group.size() - 1) * sent[0].nbytes
    if sent.is_cuda:
        work = dist.all_to_all_single(received, sent, group=group, async_op=True)
        return [_collective(work, sent)], nbytes
    received[group.rank()].copy_(sent[group.rank()])
    others = _others(group)
    there, here = ([(rows[peer], peer) for peer in others] for rows in (sent, received))
    return _messages(there, here, group), nbytes


@_starts
def all_gather(received: Tensor, sent: Tensor, group: ProcessGroup, *, tag: int = 0) -> Started:
    """`sent` of rank i becomes row i of `received` on every rank.

    Messages of one tag match in the order they are issued in, whatever is issued under another.
    """
    nbytes = (group.size() - 1) * sent.nbytes
    if sent.is_cuda:
        work = _all_gather_single(received.view(-1), sent.view(-1), group=group, async_op=True)
        return [_collective(work, sent)], nbytes
    rows = received.view(group.size(), -1)
    rows[group.rank()].copy_(sent.view(-1))
    others = _others(group)
    there = [(sent.view(-1), peer) for peer in others]
    return _messages(there, [(rows[peer], peer) for peer in others], group, tag), nbytes


@_starts
def exchange(
    sent: Tensor, received: Sequence[Tensor], peers: Sequence[int], group: ProcessGroup
) -> Started:
    """Sends the same buffer to every peer and receives one buffer from each. Group ranks."""
    there = [(sent, peer) for peer in peers]
    here = list(zip(received, peers, strict=True))
    return _messages(there, here, group), len(peers) * sent.nbytes


@_starts
def send(buffer: Tensor, to: int, group: ProcessGroup) -> Started:
    work = dist.isend(buffer, dst=dist.get_global_rank(group, to), group=group)
    return _waited([work], buffer), buffer.nbytes


@_starts
def receive(buffer: Tensor, source: int, group: ProcessGroup) -> Started:
    work = dist.irecv(buffer, src=dist.get_global_rank(group, source), group=group)
    return _waited([work], buffer), 0


def transport_device(tensor: Tensor, group: ProcessGroup, device: torch.device) -> torch.device:
    """Where a tensor has to be for this group to carry it: gloo carries host memory only.

    `device` is this rank's: a thread of a wire does not know the one its maker has set.
    """
    backends = dict(
        entry.split(":") for entry in str(dist.get_backend_config(group)).split(",") if ":" in entry
    )
    here = tensor.device.type
    if backends.get(here) not in (None, "gloo") or (here == "cpu" and "cpu" in backends):
        return tensor.device
    if backends.get("cpu") == "gloo":
        return torch.device("cpu")
    return device

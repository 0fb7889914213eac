"""The calls into torch.distributed, each with the bytes it makes a rank send.

Nothing outside `wire/` issues a collective. Every function starts one, returns its parts and,
beside them, what this rank sends to others under the algorithm the backend runs: ring all-reduce,
pairwise all-to-all, ring all-gather (gloo's, and nccl's for payloads that matter).
"""

import threading
import time
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


class Part:
    """One Work of a transfer, with a wait that can run out and be taken up again."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def arrives(self, within: float) -> bool:
        """Whether it is complete within so many seconds; raises what the backend raises."""
        try:
            self.work.wait(timedelta(seconds=within))
        except RuntimeError:
            if self.work.is_completed():  # it failed, rather than this wait
                raise
            return False
        return True


class Message(Part):
    """gloo closes the connection when a wait for a message runs out, so that one has no end and a
    thread of its own."""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self._done: Future[None] = Future()
        threading.Thread(target=self._wait, name="message", daemon=True).start()

    def arrives(self, within: float) -> bool:
        if not wait([self._done], timeout=within).done:
            return False
        self._done.result()
        return True

    def _wait(self) -> None:
        try:
            self.work.wait(NEVER)
        except BaseException as error:  # raised again by `arrives`
            self._done.set_exception(error)
        else:
            self._done.set_result(None)


class DevicePart(Part):
    """nccl takes a wait that ran out for the failure of the transfer, so nothing waits there until
    it is complete; the wait then orders this thread's stream after it."""

    def arrives(self, within: float) -> bool:
        end = time.monotonic() + within
        while not self.work.is_completed():
            if time.monotonic() > end:
                return False
            time.sleep(_POLL)
        self.work.wait()
        return True


Started = tuple[list[Part], int]


def _part(work: Work | None, buffer: Tensor, *, message: bool = False) -> Part:
    assert work is not None
    if buffer.is_cuda:
        return DevicePart(work)
    return Message(work) if message else Part(work)


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
    return [_part(work, buffer)], all_reduce_bytes(buffer.nbytes, group.size())


@_starts
def all_to_all(received: Tensor, sent: Tensor, group: ProcessGroup) -> Started:
    """Row j of `sent` goes to rank j; row i of `received` comes from rank i."""
    work = dist.all_to_all_single(received, sent, group=group, async_op=True)
    return [_part(work, sent)], (group.size() - 1) * sent[0].nbytes


@_starts
def all_gather(received: Tensor, sent: Tensor, group: ProcessGroup) -> Started:
    """`sent` of rank i becomes row i of `received` on every rank."""
    work = _all_gather_single(received.view(-1), sent.view(-1), group=group, async_op=True)
    return [_part(work, sent)], (group.size() - 1) * sent.nbytes


@_starts
def exchange(
    sent: Tensor, received: Sequence[Tensor], peers: Sequence[int], group: ProcessGroup
) -> Started:
    """Sends the same buffer to every peer and receives one buffer from each. Group ranks."""
    operations = []
    for peer, buffer in zip(peers, received, strict=True):
        there = dist.get_global_rank(group, peer)
        operations.append(dist.P2POp(dist.isend, sent, there, group=group))
        operations.append(dist.P2POp(dist.irecv, buffer, there, group=group))
    works = dist.batch_isend_irecv(operations) if operations else []
    return [_part(work, sent, message=True) for work in works], len(peers) * sent.nbytes


@_starts
def send(buffer: Tensor, to: int, group: ProcessGroup) -> Started:
    work = dist.isend(buffer, dst=dist.get_global_rank(group, to), group=group)
    return [_part(work, buffer, message=True)], buffer.nbytes


@_starts
def receive(buffer: Tensor, source: int, group: ProcessGroup) -> Started:
    work = dist.irecv(buffer, src=dist.get_global_rank(group, source), group=group)
    return [_part(work, buffer, message=True)], 0


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

"""The calls into torch.distributed, each with the bytes it makes a rank send.

Nothing outside `wire/` issues a collective. Every function starts one, returns its Work and, beside
it, what this rank sends to others under the algorithm the backend runs: ring all-reduce, pairwise
all-to-all, ring all-gather (gloo's, and nccl's for payloads that matter).
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

# torch 2.13 renamed this one and warns about the old name.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Started = tuple[list[Work], int]


def all_reduce_bytes(nbytes: int, size: int) -> int:
    """A ring passes (size - 1) / size of the buffer twice: once summed, once spread."""
    return 2 * (size - 1) * nbytes // size


def all_reduce(buffer: Tensor, group: ProcessGroup, op: dist.ReduceOp.RedOpType) -> Started:
    """In place."""
    work = dist.all_reduce(buffer, op=op, group=group, async_op=True)
    return [work], all_reduce_bytes(buffer.nbytes, group.size())


def all_to_all(received: Tensor, sent: Tensor, group: ProcessGroup) -> Started:
    """Row j of `sent` goes to rank j; row i of `received` comes from rank i."""
    work = dist.all_to_all_single(received, sent, group=group, async_op=True)
    return [work], (group.size() - 1) * sent[0].nbytes


def all_gather(received: Tensor, sent: Tensor, group: ProcessGroup) -> Started:
    """`sent` of rank i becomes row i of `received` on every rank."""
    work = _all_gather_single(received.view(-1), sent.view(-1), group=group, async_op=True)
    return [work], (group.size() - 1) * sent.nbytes


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
    return works, len(peers) * sent.nbytes


def send(buffer: Tensor, to: int, group: ProcessGroup) -> Started:
    work = dist.isend(buffer, dst=dist.get_global_rank(group, to), group=group)
    assert work is not None
    return [work], buffer.nbytes


def receive(buffer: Tensor, source: int, group: ProcessGroup) -> Started:
    work = dist.irecv(buffer, src=dist.get_global_rank(group, source), group=group)
    assert work is not None
    return [work], 0


def transport_device(tensor: Tensor, group: ProcessGroup) -> torch.device:
    """Where a tensor has to be for this group to carry it: gloo carries host memory only."""
    backends = dict(
        entry.split(":") for entry in str(dist.get_backend_config(group)).split(",") if ":" in entry
    )
    here = tensor.device.type
    if backends.get(here) not in (None, "gloo") or (here == "cpu" and "cpu" in backends):
        return tensor.device
    if backends.get("cpu") == "gloo":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())

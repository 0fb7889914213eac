"""Transfers: what a wire does with a payload, step by step.

Each function starts a transfer of `buffer`, which is where the group can carry it, and returns its
first phase, which knows what is left to do once it has arrived. The result ends up in `buffer`.
They run in the comm engine's issuing thread, `turn` in its turning and `land` in a landing thread.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from thinwire.wire import collectives
from thinwire.wire.codecs import Codec, Feedback
from thinwire.wire.compressed_mean import (
    Owner,
    compressed_mean,
    decoded,
    decoded_mean,
    own_slice,
    sent_by,
)
from thinwire.wire.flight import all_finite
from thinwire.wire.phase import Phase

Issue = Callable[[Tensor], Phase]


def dense_mean(buffer: Tensor, dtype: torch.dtype, group: ProcessGroup) -> Phase:
    sums = buffer.to(dtype)  # itself, when it travels as it is
    started = collectives.all_reduce(sums, group, dist.ReduceOp.SUM)

    def land() -> None:
        sums.div_(group.size())
        if sums is not buffer:
            buffer.copy_(sums)

    return Phase(started, land)


def coded_mean(
    buffer: Tensor, codec: Codec | Feedback, group: ProcessGroup, owner: Owner | None = None
) -> Phase:
    phase = compressed_mean(buffer, codec, group, owner)
    if not isinstance(codec, Feedback) or codec.tentative:
        return phase
    memory = codec
    return phase.followed_by(lambda: memory.landed(all_finite(buffer)))


def exchange(
    buffer: Tensor, pairs: list[tuple[int, float]], codec: Codec, group: ProcessGroup
) -> Phase:
    """`pairs` are (peer, weight) in rank order, which is the order of the sum."""
    part = codec.part(buffer.numel(), 1)
    sent = codec.encode(buffer, 1, part)
    received = [torch.empty_like(sent) for _ in pairs]
    started = collectives.exchange(sent, received, [peer for peer, _ in pairs], group)

    def land() -> None:
        # By differences to one's own values, which need no codec: where all ranks agree, the result
        # is what they agree on, to the bit. Weights that sum to 1 but for rounding would drift.
        values, total = torch.empty_like(buffer), torch.zeros_like(buffer)
        for (peer, weight), payload in zip(pairs, received, strict=True):
            with sent_by(peer):
                codec.decode(payload, part, values)
            total.add_(values.sub_(buffer), alpha=weight)
        buffer.add_(total)

    return Phase(started, land)


def send(buffer: Tensor, to: int, codec: Codec, group: ProcessGroup) -> Phase:
    payload = codec.encode(buffer, 1, codec.part(buffer.numel(), 1))
    return Phase(collectives.send(payload, to, group), lambda: _arrived(payload))


def recv(buffer: Tensor, source: int, codec: Codec, group: ProcessGroup) -> Phase:
    part = codec.part(buffer.numel(), 1)
    payload = torch.empty(1, codec.payload_bytes(part), dtype=torch.uint8, device=buffer.device)

    def land() -> None:
        with sent_by(source):
            codec.decode(payload, part, buffer)

    return Phase(collectives.receive(payload, source, group), land)


def reduce(buffer: Tensor, op: dist.ReduceOp.RedOpType, group: ProcessGroup) -> Phase:
    return Phase(collectives.all_reduce(buffer, group, op))


def union(flags: Tensor, group: ProcessGroup) -> Phase:
    sent = flags.clone()
    rows = torch.empty(group.size(), flags.numel(), dtype=flags.dtype, device=flags.device)

    def land(_in_use: Tensor = sent) -> None:
        torch.amax(rows, dim=0, out=flags)

    return Phase(collectives.all_gather(rows, sent, group), land)


def all_to_all(rows: Tensor, group: ProcessGroup) -> Phase:
    received = torch.empty_like(rows)
    sent = rows.clone()
    started = collectives.all_to_all(received, sent, group)
    return Phase(started, lambda: _arrived(rows.copy_(received)))


def gather_rows(rows: Tensor, own: Tensor, group: ProcessGroup) -> Phase:
    sent = own.to(rows.device)
    return Phase(collectives.all_gather(rows, sent, group), lambda: _arrived(sent))


def gather_lengths(buffer: Tensor, lengths: list[int], group: ProcessGroup) -> Phase:
    """As many bytes from each rank as it has said, one after the other; one's own are in place."""
    rank, parts = group.rank(), buffer.split(lengths)
    peers = [peer for peer in range(group.size()) if peer != rank]
    received = [parts[peer] for peer in peers]
    return Phase(collectives.exchange(parts[rank], received, peers, group))


def scatter_mean(buffer: Tensor, codec: Codec, part: int, group: ProcessGroup) -> Phase:
    """The first phase of a mean alone; only the rank's own part of the buffer gets a result."""
    sent = codec.encode(buffer, group.size(), part)
    received = torch.empty_like(sent)
    own = buffer[own_slice(buffer.numel(), part, group.rank())]

    def land(_in_use: Tensor = sent) -> None:
        decoded_mean(codec, received, part, own)

    return Phase(collectives.all_to_all(received, sent, group), land)


def gather(buffer: Tensor, codec: Codec, part: int, group: ProcessGroup) -> Phase:
    """The second phase of a mean alone: everybody's own part."""
    own = buffer[own_slice(buffer.numel(), part, group.rank())]
    sent = codec.encode(own, 1, part)
    received = torch.empty(group.size(), sent.shape[1], dtype=torch.uint8, device=buffer.device)

    def land(_in_use: Tensor = sent) -> None:
        decoded(codec, received, part, buffer)

    return Phase(collectives.all_gather(received, sent, group), land)


def _arrived(_payload: Tensor) -> None:
    """Nothing is left to do; the closure has kept what the network was reading."""

"""The mean of payloads that cannot be added on the wire.

In two phases:

    every rank:   encode its N values as n parts, send part j to rank j               all_to_all
    rank j:       decode the n payloads of part j, average them in float32, encode
    every rank:   collect the n encoded averages and decode them                      all_gather

A rank sends 2 (n - 1) payloads of N / n values: the traffic of a ring all-reduce, at the codec's
width. Error feedback acts on both encodings. Rank j is the *owner* of part j. It may make something
else of the average before it shares it out: an optimizer whose state is spread over the ranks makes
a step of a gradient there.

Or by gathering, for codecs that ask for it:

    every rank:   encode its N values, send them to all, decode and average          all_gather

A rank sends n - 1 payloads of N values, and nothing is lost by encoding the mean. Either way all
ranks decode the same bytes and add in rank order, so they hold the same bits.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from thinwire.errors import BadPayload
from thinwire.wire import collectives
from thinwire.wire.codecs import Codec, Feedback
from thinwire.wire.codecs.base import Split
from thinwire.wire.phase import Phase
from thinwire.wire.scratch import Scratch

_SECOND = 1  # the tag of second phases: they need no place in the order of the first ones
Owner = Callable[[Tensor], Tensor]
"""The average of one's own part -> what is shared out in its place; it may overwrite the first."""


def compressed_mean(
    flat: Tensor,
    codec: Codec | Feedback,
    group: ProcessGroup,
    owner: Owner | None = None,
) -> Phase:
    """Launches the first phase; the result is in `flat` when the last one has been finished."""
    use = codec if isinstance(codec, Feedback) else _Plain(codec)
    if codec.gathers(group.size()) and owner is None:
        return gathered_mean(flat, use, group)
    return two_phase_mean(flat, use, group, owner)


def mean_bytes(numel: int, codec: Codec | Feedback, size: int, *, owned: bool) -> int:
    """What a rank sends in all phases of the mean of `numel` values; `owned` if it has an owner."""
    if codec.gathers(size) and not owned:
        return (size - 1) * codec.row_bytes(codec.split(numel, 1))
    return 2 * (size - 1) * codec.row_bytes(codec.split(numel, size))


class _Plain:
    """A codec without memory, called as one with memory is."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.split = codec.split

    def encode_worker(self, x: Tensor, split: Split) -> Tensor:
        return self._codec.encode(x, split.rows, split.part)

    def encode_owner(self, x: Tensor, split: Split, row: int) -> Tensor:
        return self._codec.encode(x, 1, split.part)

    def decode(self, payload: Tensor, split: Split, row: int, out: Tensor) -> Tensor:
        return self._codec.decode(payload, split.part, out)


def two_phase_mean(
    flat: Tensor,
    codec: Feedback | _Plain,
    group: ProcessGroup,
    owner: Owner | None,
) -> Phase:
    rank = group.rank()
    split = codec.split(flat.numel(), group.size())

    sent = codec.encode_worker(flat, split)  # (n, bytes)
    received = torch.empty_like(sent)

    def turn() -> Phase:
        own = own_slice(flat.numel(), split.part, rank)
        mean = _add_up(codec, received, split, rank, _scratch.take(flat[own], "mean"))
        if owner is not None:
            mean = owner(mean)
        encoded = codec.encode_owner(mean, split, rank)

        def land(_in_use: tuple[Tensor, ...] = (sent, encoded)) -> None:  # the network reads these
            _decode_all(codec, received, split, flat)

        return Phase(collectives.all_gather(received, encoded, group, tag=_SECOND), land=land)

    return Phase(collectives.all_to_all(received, sent, group), turn=turn)


def gathered_mean(flat: Tensor, codec: Feedback | _Plain, group: ProcessGroup) -> Phase:
    split = codec.split(flat.numel(), 1)
    sent = codec.encode_worker(flat, split)  # (1, bytes)
    received = sent.new_empty(group.size(), sent.shape[1])

    def land(_in_use: Tensor = sent) -> None:
        _add_up(codec, received, split, 0, flat)

    return Phase(collectives.all_gather(received, sent, group), land=land)


def own_slice(numel: int, part: int, rank: int) -> slice:
    """Which of `numel` values rank `rank` owns, in parts of `part`; the last are short or empty."""
    start = min(numel, rank * part)
    return slice(start, min(numel, start + part))


@contextmanager
def sent_by(rank: int) -> Iterator[None]:
    """Around the decoding of what a rank of the group has sent: it is named if that is refused."""
    try:
        yield
    except BadPayload as error:
        error.sender = rank
        raise


def _decode_all(codec: "Feedback | _Plain", payloads: Tensor, split: Split, out: Tensor) -> Tensor:
    """Row i is what rank i has sent, and all of them go into `out`."""
    try:
        return codec.decode(payloads, split, 0, out)
    except BadPayload:
        for rank in range(payloads.shape[0]):
            with sent_by(rank):
                own = out.new_empty(split.own(rank))
                codec.decode(payloads[rank : rank + 1], split, rank, own)
        raise


def decoded(codec: Codec, payloads: Tensor, part: int, out: Tensor) -> Tensor:
    """Every rank's own part, into `out`."""
    return _decode_all(_Plain(codec), payloads, Split(out.numel(), payloads.shape[0], part), out)


def decoded_mean(codec: Codec, payloads: Tensor, part: int, out: Tensor) -> Tensor:
    """The mean of one part's payloads, into `out`."""
    split = Split(out.numel(), 1, part)
    return _add_up(_Plain(codec), payloads, split, 0, out)


def _add_up(
    codec: Feedback | _Plain, payloads: Tensor, split: Split, row: int, out: Tensor
) -> Tensor:
    """Rank by rank: one part of temporary memory, and one order of summation."""
    values = _scratch.take(out, "values")
    for rank in range(payloads.shape[0]):
        with sent_by(rank):
            codec.decode(payloads[rank : rank + 1], split, row, values if rank else out)
        if rank:
            out.add_(values)
    return out.div_(payloads.shape[0])


_scratch = Scratch()

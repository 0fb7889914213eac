"""The mean of payloads that cannot be added on the wire, in two phases.

    every rank:   encode its N values as n parts, send part j to rank j               all_to_all
    rank j:       decode the n payloads of part j, average them in float32, encode
    every rank:   collect the n encoded averages and decode them                      all_gather

All ranks decode the same bytes, so they hold the same bits. A rank sends 2 (n - 1) payloads of
N / n values: the traffic of a ring all-reduce, at the codec's width. Error feedback acts on both
encodings.

Rank j is the *owner* of part j. It may make something else of the average before it shares it out:
an optimizer whose state is spread over the ranks makes a step of a gradient there.
"""

import threading
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from thinwire.wire import collectives
from thinwire.wire.codecs import Codec, ErrorFeedback
from thinwire.wire.collectives import Started

Settle = Callable[[Started], None]
Owner = Callable[[Tensor], Tensor]
"""The average of one's own part -> what is shared out in its place; it may overwrite the first."""


def compressed_mean(
    flat: Tensor,
    codec: Codec | ErrorFeedback,
    group: ProcessGroup,
    finish: Settle,
    owner: Owner | None = None,
) -> tuple[Started, Callable[[], None]]:
    """Runs up to the launch of the second phase; `finish` blocks until a phase has arrived.

    Returns the second phase and what decodes it into `flat` once it has arrived.
    """
    size, rank = group.size(), group.rank()
    plain = codec.codec if isinstance(codec, ErrorFeedback) else codec
    part = plain.part(flat.numel(), size)

    sent = _encode(codec, flat, size, part, side="worker")  # (n, bytes)
    received = torch.empty_like(sent)
    finish(collectives.all_to_all(received, sent, group))

    own = own_slice(flat.numel(), part, rank)
    mean = decoded_mean(plain, received, part, _scratch.take(flat[own], "mean"))
    if owner is not None:
        mean = owner(mean)
    encoded = _encode(codec, mean, 1, part, side="owner")  # (1, bytes)
    started = collectives.all_gather(received, encoded, group)

    def land(_in_use: tuple[Tensor, ...] = (sent, encoded)) -> None:  # the network reads these
        plain.decode(received, part, flat)

    return started, land


def own_slice(numel: int, part: int, rank: int) -> slice:
    """Which of `numel` values rank `rank` owns, in parts of `part`; the last are short or empty."""
    start = min(numel, rank * part)
    return slice(start, min(numel, start + part))


def decoded_mean(codec: Codec, payloads: Tensor, part: int, out: Tensor) -> Tensor:
    """Worker by worker, in rank order: one part of temporary memory, and one order of summation."""
    values = _scratch.take(out, "values")
    codec.decode(payloads[:1], part, out)
    for row in range(1, payloads.shape[0]):
        out.add_(codec.decode(payloads[row : row + 1], part, values))
    return out.div_(payloads.shape[0])


class _Scratch(threading.local):
    """Buffers that all means of one thread use in turn. New ones would be new pages from the kernel
    for every bucket of every step, which costs several times what is done with them."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, torch.device, torch.dtype], Tensor] = {}

    def take(self, like: Tensor, use: str) -> Tensor:
        key = use, like.device, like.dtype
        if key not in self._held or self._held[key].numel() < like.numel():
            self._held[key] = torch.empty_like(like)
        return self._held[key][: like.numel()]


_scratch = _Scratch()


def _encode(codec: Codec | ErrorFeedback, x: Tensor, rows: int, part: int, *, side: str) -> Tensor:
    if not isinstance(codec, ErrorFeedback):
        return codec.encode(x, rows, part)
    memory = codec.worker if side == "worker" else codec.owner
    return memory.encode(codec.codec, x, rows, part, codec.decay)

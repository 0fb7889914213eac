"""Micro-batches: a batch cut into equal parts."""

from collections.abc import Iterable, Iterator

from torch import Tensor

from thinwire.checks import refusal, require_count


def micro_batches(
    batches: Iterable[tuple[Tensor, Tensor]], count: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Every batch (x, y) as `count` equal micro-batches, cut along the first dimension."""
    if isinstance(batches, Tensor) or not isinstance(batches, Iterable):
        raise refusal("micro_batches", "batches", "batches (x, y), one after another", batches)
    return _cut(batches, require_count("micro_batches", "count", count))


def _cut(batches: Iterable[tuple[Tensor, Tensor]], count: int) -> Iterator[tuple[Tensor, Tensor]]:
    for batch in batches:
        two = isinstance(batch, tuple | list) and len(batch) == 2
        if not two or not all(isinstance(tensor, Tensor) for tensor in batch):
            raise refusal("micro_batches", "batches", "batches (x, y) of two tensors", batch)
        x, y = batch
        for name, tensor in (("x", x), ("y", y)):
            if tensor.dim() == 0 or len(tensor) == 0 or len(tensor) % count:
                raise ValueError(
                    f"micro_batches(batches=...): a batch whose {name} has shape "
                    f"{tuple(tensor.shape)} does not divide into {count} micro-batches of equal "
                    "size"
                )
        yield from zip(x.chunk(count), y.chunk(count), strict=True)

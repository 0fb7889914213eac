"""Micro-batches: a batch cut into equal parts."""

from collections.abc import Iterable, Iterator

from torch import Tensor


def micro_batches(
    batches: Iterable[tuple[Tensor, Tensor]], count: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Every batch (x, y) as `count` equal micro-batches, cut along the first dimension."""
    if count < 1:
        raise ValueError(f"micro_batches takes count >= 1, got {count!r}")
    return _cut(batches, count)


def _cut(batches: Iterable[tuple[Tensor, Tensor]], count: int) -> Iterator[tuple[Tensor, Tensor]]:
    for x, y in batches:
        for name, tensor in (("x", x), ("y", y)):
            if tensor.dim() == 0 or len(tensor) == 0 or len(tensor) % count:
                raise ValueError(
                    f"a batch whose {name} has shape {tuple(tensor.shape)} does not divide into "
                    f"{count} micro-batches of equal size"
                )
        yield from zip(x.chunk(count), y.chunk(count), strict=True)

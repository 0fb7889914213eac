"""Int8 and Int4: block-wise symmetric quantisation, rounding to nearest.

A block of `block` values shares one float32 scale s = max|x| / L with L = 127 or 7, and each value
travels as round(x / s), an integer in [-L, L]. The error of a value is at most s / 2; a block
whose scale is below the smallest normal float32 (1e-38) travels as zeros. A row's payload is its
scales, then its integers:

    [ s_0 .. s_{k-1} : 4k bytes | q_0 .. q_{part-1} : part bytes, or part/2 with two to a byte ]

A block that holds a NaN or an infinity gets a scale that is one too, which makes every value of
the block come out as not finite.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.wire.codecs.base import Codec, as_rows

# Values handled at a time on a CPU: the temporaries of a tile (2 MB) stay in the cache, and are
# large enough for the time of starting an operation not to count.
_TILE = 1 << 19
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class _BlockQuantizer(Codec):
    block: int = 256
    """Values that share a scale. Smaller blocks follow outliers more closely and cost 4 bytes each.
    Lower it when the loss stalls with a quantised payload and not with a dense one."""

    levels: ClassVar[int]
    per_byte: ClassVar[int]

    def __post_init__(self) -> None:
        if self.block < 8 or self.block % 8:
            name = type(self).__name__
            raise ValueError(f"{name}(block=...) takes a multiple of 8, got {self.block}")

    def alignment(self, numel: int, rows: int) -> int:
        # Whole blocks, except for tensors so small that a row is less than one.
        return self.block if numel >= rows * self.block else 8

    def blocks(self, part: int) -> int:
        return -(-part // self.block)

    def payload_bytes(self, part: int) -> int:
        return 4 * self.blocks(part) + part // self.per_byte

    def encode(self, x: Tensor, rows: int, part: int) -> Tensor:
        payload = torch.empty(rows, self.payload_bytes(part), dtype=torch.uint8, device=x.device)
        scales, integers = self._split(payload, part)
        source = as_rows(x, rows, part)
        width = min(self.block, part)
        scratch = x.new_empty(0)
        for row, tile in _tiles(rows, part, self.block, x.device):
            values = source[row, tile].unflatten(1, (-1, width))  # (rows, blocks, width)
            if scratch.shape != values.shape:
                scratch = torch.empty_like(values)
            # max|x| in two vectorised passes; vector_norm over a dimension is not vectorised
            scale = torch.abs(values, out=scratch).amax(dim=2) / self.levels
            inverse = torch.where(scale >= _SMALLEST_SCALE, scale.reciprocal(), 0.0)
            torch.mul(values, inverse.unsqueeze(2), out=scratch).round_()
            scales[row, self._scale_slice(tile)] = scale
            into = integers[row, self._integer_slice(tile)]
            self._pack(scratch, into.unflatten(1, (-1, width // self.per_byte)))
        return payload

    def decode(self, payload: Tensor, part: int, out: Tensor) -> Tensor:
        rows, width = payload.shape[0], min(self.block, part)
        scales, integers = self._split(payload, part)
        exact = out.numel() == rows * part
        target = (out if exact else out.new_empty(rows * part)).view(rows, part)
        for row, tile in _tiles(rows, part, self.block, out.device):
            values = target[row, tile].unflatten(1, (-1, width))
            packed = integers[row, self._integer_slice(tile)]
            self._unpack(packed.unflatten(1, (-1, width // self.per_byte)), values)
            values.mul_(scales[row, self._scale_slice(tile)].unsqueeze(2))
        if not exact:
            out.copy_(target.view(-1)[: out.numel()])
        return out

    def _split(self, payload: Tensor, part: int) -> tuple[Tensor, Tensor]:
        cut = 4 * self.blocks(part)
        return payload[:, :cut].view(torch.float32), payload[:, cut:]

    def _scale_slice(self, tile: slice) -> slice:
        return slice(tile.start // self.block, self.blocks(tile.stop))

    def _integer_slice(self, tile: slice) -> slice:
        return slice(tile.start // self.per_byte, tile.stop // self.per_byte)

    @abstractmethod
    def _pack(self, rounded: Tensor, into: Tensor) -> None:
        """(rows, blocks, width) integers held as floats -> (..., width / per_byte) uint8."""

    @abstractmethod
    def _unpack(self, packed: Tensor, into: Tensor) -> None:
        """The inverse of `_pack`."""


@dataclass(frozen=True)
class Int8(_BlockQuantizer):
    """8 bits a value and 4 bytes a block: 3.9x less than float32."""

    levels: ClassVar[int] = 127
    per_byte: ClassVar[int] = 1

    def _pack(self, rounded: Tensor, into: Tensor) -> None:
        into.view(torch.int8).copy_(rounded)

    def _unpack(self, packed: Tensor, into: Tensor) -> None:
        into.copy_(packed.view(torch.int8))


@dataclass(frozen=True)
class Int4(_BlockQuantizer):
    """4 bits a value and 4 bytes a block: 7.5x less than float32. Use it with `ErrorFeedback`."""

    block: int = 128

    levels: ClassVar[int] = 7
    per_byte: ClassVar[int] = 2

    def _pack(self, rounded: Tensor, into: Tensor) -> None:
        # The first half of a block in the low nibbles, the second in the high ones, each + 8: one
        # byte is (q_lo + 8) + 16 (q_hi + 8). Without the 8s it fits a signed byte; they are added
        # there, where a pass costs a quarter, and wrap into an unsigned one.
        low, high = rounded.tensor_split(2, dim=2)
        into.view(torch.int8).copy_(torch.add(low, high, alpha=16, out=low))
        into.add_(136)

    def _unpack(self, packed: Tensor, into: Tensor) -> None:
        # The 8s are taken off while the nibbles are bytes.
        nibbles = torch.empty_like(into, dtype=torch.uint8)
        low, high = nibbles.tensor_split(2, dim=2)
        torch.bitwise_and(packed, 15, out=low)
        torch.bitwise_right_shift(packed, 4, out=high)
        into.copy_(nibbles.sub_(8).view(torch.int8))


def _tiles(rows: int, part: int, block: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """(rows, columns) slices of whole blocks; all at once where a tile would buy nothing."""
    if device.type != "cpu" or rows * part <= _TILE or part <= block:
        yield slice(0, rows), slice(0, part)
        return
    step = max(1, _TILE // block) * block
    for row in range(rows):
        for start in range(0, part, step):
            yield slice(row, row + 1), slice(start, min(start + step, part))

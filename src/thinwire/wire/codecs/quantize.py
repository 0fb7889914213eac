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

from thinwire.checks import require_multiple
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
        block = require_multiple(type(self).__name__, "block", self.block, 8)
        object.__setattr__(self, "block", block)

    def alignment(self, numel: int, rows: int) -> int:
        # Whole blocks, except for tensors so small that a row is less than one.
        return self.block if numel >= rows * self.block else 8

    def blocks(self, part: int) -> int:
        return -(-part // self.block)

    def payload_bytes(self, part: int) -> int:
        return 4 * self.blocks(part) + part // self.per_byte

    def encode(self, x: Tensor, rows: int, part: int) -> Tensor:
        payload = torch.empty(rows, self.payload_bytes(part), dtype=torch.uint8, device=x.device)
        scratch = x.new_empty(0)
        for values, scale, integers in self._tiles(as_rows(x, rows, part), payload):
            if scratch.shape != values.shape:
                scratch = torch.empty_like(values)
            # max|x| in two vectorised passes; vector_norm over a dimension is not vectorised
            step = torch.abs(values, out=scratch).amax(-1, keepdim=True).div_(self.levels)
            scale.copy_(step)
            inverse = torch.where(step >= _SMALLEST_SCALE, step.reciprocal(), 0.0)
            torch.mul(values, inverse, out=scratch).round_()
            self._pack(scratch, integers)
        return payload

    def decode(self, payload: Tensor, part: int, out: Tensor) -> Tensor:
        rows = payload.shape[0]
        exact = out.numel() == rows * part
        target = out if exact else out.new_empty(rows * part)
        for values, scale, integers in self._tiles(target.view(rows, part), payload):
            self._unpack(integers, values)
            values.mul_(scale)
        if not exact:
            out.copy_(target[: out.numel()])
        return out

    def _tiles(self, rows: Tensor, payload: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Whole blocks and where they travel: (..., blocks, width) values, (..., blocks, 1) scales,
        (..., blocks, width / per_byte) integers. Views all of them, cut by one call for each row.
        """
        part = rows.shape[1]
        width, cut = min(self.block, part), 4 * self.blocks(part)
        values = rows.unflatten(1, (-1, width))
        scales = payload[:, :cut].view(torch.float32).unsqueeze(2)
        integers = payload[:, cut:].unflatten(1, (-1, width // self.per_byte))
        if rows.device.type != "cpu" or rows.numel() <= _TILE:
            yield values, scales, integers
            return
        for row in zip(values, scales, integers, strict=True):
            yield from zip(*(whole.split(_TILE // width) for whole in row), strict=True)

    @abstractmethod
    def _pack(self, rounded: Tensor, into: Tensor) -> None:
        """(..., width) integers held as floats -> (..., width / per_byte) uint8."""

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
        low, high = rounded.chunk(2, -1)
        into.view(torch.int8).copy_(torch.add(low, high, alpha=16, out=low))
        into.add_(136)

    def _unpack(self, packed: Tensor, into: Tensor) -> None:
        # The 8s are taken off while the nibbles are bytes.
        nibbles = torch.empty_like(into, dtype=torch.uint8)
        low, high = nibbles.chunk(2, -1)
        torch.bitwise_and(packed, 15, out=low)
        torch.bitwise_right_shift(packed, 4, out=high)
        into.copy_(nibbles.sub_(8).view(torch.int8))

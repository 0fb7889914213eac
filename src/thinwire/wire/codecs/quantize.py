"""Int8 and Int4: block-wise symmetric quantisation, rounding to nearest.

A block of `block` values shares one float32 scale s = max|x| / L with L = 127 or 7, and each value
travels as round(x / s), an integer in [-L, L]. The error of a value is at most s / 2; a block whose
scale is below the smallest normal float32 (1e-38) comes out smaller than it was. A row's payload is
its scales, then its integers:

    [ s_0 .. s_{k-1} : 4k bytes | q_0 .. q_{part-1} : part bytes, or part/2 with two to a byte ]

With two to a byte the first half of the row is in the low four bits and the second in the high
ones, each in two's complement: both halves are read and written as they lie in memory.

A block that holds a NaN or an infinity gets a scale that is one too, which makes every value of
the block come out as not finite. A block that shares its bytes may come out wrong, but finite.

[Note: tiles] On a CPU memory is slower than arithmetic, so a tile of values goes through all
operations while it is in the cache, and nothing is allocated. What there is one of for a block or
a byte is done by numpy, whose operations start faster than torch's.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from thinwire.wire.codecs.base import Codec, as_rows

_TILE = 1 << 17  # values: large enough for the time of starting an operation not to count
_LARGEST = 1 / torch.finfo(torch.float32).tiny  # of the inverses of scales: finite

Tile = tuple[int, int, int, int]  # row, first block and end in each lane, lane


@dataclass(frozen=True)
class _BlockQuantizer(Codec):
    block: int = 256
    """Values that share a scale. Smaller blocks follow outliers more closely and cost 4 bytes each.
    Lower it when the loss stalls with a quantised payload and not with a dense one."""

    levels: ClassVar[int]
    lanes: ClassVar[int]
    """Values in a byte: so many equal parts of a row lie over each other."""

    def __post_init__(self) -> None:
        if self.block < 8 or self.block % 8:
            name = type(self).__name__
            raise ValueError(f"{name}(block=...) takes a multiple of 8, got {self.block}")

    def alignment(self, numel: int, rows: int) -> int:
        # Whole blocks in every lane, except for tensors so small that a row is less than a block.
        return self.lanes * self.block if numel >= rows * self.block else 8

    def blocks(self, part: int) -> int:
        return -(-part // self.block)

    def payload_bytes(self, part: int) -> int:
        return 4 * self.blocks(part) + part // self.lanes

    def encode(self, x: Tensor, rows: int, part: int) -> Tensor:
        payload = torch.empty(rows, self.payload_bytes(part), dtype=torch.uint8, device=x.device)
        if x.device.type == "cpu" and part >= self.lanes * self.block:
            self._encode_on_cpu(x.detach().float(), payload, part)
        else:
            self._encode(x, payload, part)
        return payload

    def decode(self, payload: Tensor, part: int, out: Tensor) -> Tensor:
        if out.dtype != torch.float32:
            return out.copy_(self.decode(payload, part, torch.empty_like(out, dtype=torch.float32)))
        if out.device.type == "cpu" and part >= self.lanes * self.block:
            self._decode_on_cpu(payload, part, out.detach())
        else:
            self._decode(payload, part, out)
        return out

    def _split(self, payload: Tensor, part: int) -> tuple[Tensor, Tensor]:
        """(rows, blocks) scales and (rows, bytes) integers."""
        cut = 4 * self.blocks(part)
        return payload[:, :cut].view(torch.float32), payload[:, cut:]

    # -- with tensor operations alone, for any device ---------------------------------------------

    def _encode(self, x: Tensor, payload: Tensor, part: int) -> None:
        scales, integers = self._split(payload, part)
        values = as_rows(x, payload.shape[0], part).unflatten(1, (scales.shape[1], -1))
        scales.copy_(values.abs().amax(dim=2) / self.levels)
        inverse = scales.reciprocal().clamp_(max=_LARGEST)
        rounded = (values * inverse.unsqueeze(2)).round_().flatten(1)
        integers.copy_(self._packed(rounded.chunk(self.lanes, dim=1)))

    def _decode(self, payload: Tensor, part: int, out: Tensor) -> None:
        scales, integers = self._split(payload, part)
        codes, unit = self._unpacked(integers)
        blocks = codes.float().unflatten(1, (scales.shape[1], -1))
        values = blocks.mul_((scales * unit).unsqueeze(2))
        out.copy_(values.view(-1)[: out.numel()])

    @abstractmethod
    def _packed(self, lanes: tuple[Tensor, ...]) -> Tensor:
        """Integers held as floats, (rows, part / lanes) each -> bytes."""

    @abstractmethod
    def _unpacked(self, integers: Tensor) -> tuple[Tensor, float]:
        """(rows, part) int8, and what one of them counts."""

    # -- the same in a CPU's cache, see [Note: tiles] ---------------------------------------------

    def _encode_on_cpu(self, x: Tensor, payload: Tensor, part: int) -> None:
        scales, integers = self._split(payload, part)
        count = min(_TILE, part) // self.block
        scratch = torch.empty(self.lanes, count, self.block)
        inverse = torch.empty(count, 1)
        for row, first, end, lane in self._tiles(payload.shape[0], part, count):
            start, at = self._place(part, row, lane, first)
            values = _cut(x, start, (end - first) * self.block).view(-1, self.block)
            rounded, factor = scratch[lane, : end - first], inverse[: end - first]
            self._quantise(values, scales[row, at : at + end - first], factor, rounded)
            if lane == self.lanes - 1:
                held = integers[row, first * self.block : end * self.block]
                self._pack_on_cpu(scratch[:, : end - first].flatten(1), held)

    def _quantise(self, values: Tensor, scale: Tensor, inverse: Tensor, rounded: Tensor) -> None:
        """(k, block) values -> k scales, and integers held as floats."""
        torch.abs(values, out=rounded)
        torch.amax(rounded, 1, out=scale)
        s, i = scale.numpy(), inverse[:, 0].numpy()
        with np.errstate(all="ignore"):  # blocks of zeros
            np.divide(s, self.levels, out=s)
            np.minimum(np.reciprocal(s, out=i), _LARGEST, out=i)
        torch.mul(values, inverse, out=rounded).round_()

    def _decode_on_cpu(self, payload: Tensor, part: int, out: Tensor) -> None:
        scales, integers = self._split(payload, part)
        scales = scales * self._unit
        count = min(_TILE, part) // self.block
        codes = torch.empty(count * self.block, dtype=torch.int8)
        for row, first, end, lane in self._tiles(payload.shape[0], part, count):
            start, at = self._place(part, row, lane, first)
            if start >= out.numel():
                continue
            held = integers[row, first * self.block : end * self.block]
            code = self._unpack_on_cpu(held, lane, codes)
            values = out[start : start + code.numel()]
            whole = values if values.numel() == code.numel() else torch.empty(code.shape)
            blocks = whole.copy_(code).view(-1, self.block)
            blocks.mul_(scales[row, at : at + end - first].unsqueeze(1))
            if whole is not values:
                values.copy_(whole[: values.numel()])

    def _tiles(self, rows: int, part: int, count: int) -> Iterator[Tile]:
        """All lanes of a tile, then the next tile."""
        blocks = part // (self.lanes * self.block)
        for row in range(rows):
            for first in range(0, blocks, count):
                for lane in range(self.lanes):
                    yield row, first, min(first + count, blocks), lane

    def _place(self, part: int, row: int, lane: int, block: int) -> tuple[int, int]:
        """Where a block of a lane begins: in the whole tensor, and among the scales of its row."""
        lane_blocks = part // (self.lanes * self.block)
        at = lane * lane_blocks + block
        return row * part + at * self.block, at

    _unit: ClassVar[float]

    @abstractmethod
    def _pack_on_cpu(self, rounded: Tensor, into: Tensor) -> None:
        """(lanes, n) integers held as floats, which may be overwritten -> n bytes."""

    @abstractmethod
    def _unpack_on_cpu(self, packed: Tensor, lane: int, codes: Tensor) -> Tensor:
        """n bytes -> the n int8 of a lane, in the first of `codes` if they need a place."""


@dataclass(frozen=True)
class Int8(_BlockQuantizer):
    """8 bits a value and 4 bytes a block: 3.9x less than float32."""

    levels: ClassVar[int] = 127
    lanes: ClassVar[int] = 1
    _unit: ClassVar[float] = 1.0

    def _packed(self, lanes: tuple[Tensor, ...]) -> Tensor:
        return lanes[0].to(torch.int8).view(torch.uint8)

    def _unpacked(self, integers: Tensor) -> tuple[Tensor, float]:
        return integers.view(torch.int8), self._unit

    def _pack_on_cpu(self, rounded: Tensor, into: Tensor) -> None:
        into.view(torch.int8).copy_(rounded[0])

    def _unpack_on_cpu(self, packed: Tensor, lane: int, codes: Tensor) -> Tensor:
        return packed.view(torch.int8)


@dataclass(frozen=True)
class Int4(_BlockQuantizer):
    """4 bits a value and 4 bytes a block: 7.5x less than float32. Use it with `ErrorFeedback`.

    16 q_high + q_low fits a signed byte, but a negative q_low borrows from the high bits: adding 8
    gives that back, and turning bit 3 makes two's complement of the q_low + 8 that is left. On the
    way back a nibble stays in the high bits of its byte, where it counts 16 times what it should.
    """

    block: int = 128

    levels: ClassVar[int] = 7
    lanes: ClassVar[int] = 2
    _unit: ClassVar[float] = 1 / 16

    def _packed(self, lanes: tuple[Tensor, ...]) -> Tensor:
        low, high = lanes
        both = torch.add(low, high, alpha=16).to(torch.int8).view(torch.uint8)
        return both.add_(8).bitwise_xor_(8)

    def _unpacked(self, integers: Tensor) -> tuple[Tensor, float]:
        lanes = [torch.bitwise_left_shift(integers, 4), torch.bitwise_and(integers, 0xF0)]
        return torch.cat(lanes, dim=1).view(torch.int8), self._unit

    def _pack_on_cpu(self, rounded: Tensor, into: Tensor) -> None:
        low, high = rounded
        into.view(torch.int8).copy_(torch.add(low, high, alpha=16, out=low))
        packed = into.numpy()
        np.bitwise_xor(np.add(packed, 8, out=packed), 8, out=packed)

    def _unpack_on_cpu(self, packed: Tensor, lane: int, codes: Tensor) -> Tensor:
        nibbles = codes[: packed.numel()]
        place = nibbles.numpy().view(np.uint8)
        if lane == 0:
            np.left_shift(packed.numpy(), 4, out=place)
        else:
            np.bitwise_and(packed.numpy(), 0xF0, out=place)
        return nibbles


def _cut(x: Tensor, start: int, numel: int) -> Tensor:
    """So many values from a start on, with zeros beyond the end."""
    found = x[start : start + numel]
    if found.numel() == numel:
        return found
    padded = x.new_zeros(numel)
    padded[: found.numel()] = found
    return padded

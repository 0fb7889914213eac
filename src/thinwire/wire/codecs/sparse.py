"""Sparse rows: a few of a row's values and where they are, in a fixed number of bytes.

A row of `part` values is cut into segments, each of which may send up to `keep` of its values. The
payload is as long as all of them together need, whatever is really sent: all ranks know its length
without asking each other.

    [ range : 4 bytes a segment | places | values : bits each | dense spans : bfloat16 ]

Places are packed in whichever way is shortest, K being the number of values kept:

    K + part/256            bytes: the place in a block of 256, and how many there are in each block
    2 K + part/32768        the same with blocks of 65536 and two bytes; below a density of 0.4 %
    part/8                  a bitmap; above 12 %
    0                       when all of the row is sent

4-byte indices are longer than one of these at every density.

Values of 1 to 8 bits are a sign and one of L = 2^(bits-1) magnitudes between the least and the
largest of the segment, lo + (hi - lo) ((j + 1/2) / L)²: closer together where most values are. One
bit stands for the root of the mean square: with error feedback a scale must not shrink what is sent
(one_bit.py). Decoding only multiplies and adds, so it gives the same bits on
any machine. 16 bits are bfloat16, 32 bits float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from thinwire.checks import plain_number, refusal
from thinwire.errors import BadPayload

BITS = (1, 2, 4, 8, 16, 32)
SMALL = 256  # values; a tensor below that is sent whole
_DENSE_BYTES = 2


@dataclass(frozen=True)
class Segment:
    """Values start..stop of a row, of which at most `keep` are sent."""

    start: int
    stop: int
    keep: int


class Places:
    """Up to `most` positions in a row of `part` values as bytes."""

    def __init__(self, part: int, most: int) -> None:
        self._part, self._most = part, most
        sizes = {8: -(-part // 256) + most, 16: 2 * (-(-part // 65536) + most), 0: -(-part // 8)}
        self._width = min(sizes, key=lambda width: sizes[width])  # bits of a place; 0: a bitmap
        self._all = most == part
        self.nbytes = 0 if self._all else sizes[self._width]

    @property
    def block_limit(self) -> int:
        """Most positions in a block: its count must fit the width."""
        return (1 << self._width) - 1 if self._width else self._part

    def admit(self, places: Tensor) -> Tensor:
        """Leaves out what a full block cannot count."""
        if self._all or not self._width or self._most <= self.block_limit:
            return places
        blocks = places >> self._width
        first = torch.searchsorted(blocks, blocks)
        rank_in_block = torch.arange(places.numel(), device=places.device) - first
        return places[rank_in_block < self.block_limit]

    def pack(self, places: Tensor, into: Tensor) -> None:
        """Ascending int64 positions; all of them, or the first ones, if all are sent."""
        if self._all:
            return
        if not self._width:
            bits = torch.zeros(8 * self.nbytes, dtype=torch.uint8, device=places.device)
            bits[places] = 1
            _pack_bits(bits, 1, into)
            return
        count = self._blocks()
        counts = torch.bincount(places >> self._width, minlength=count)
        words = torch.cat([counts, places & self.block_limit]).to(self._type())
        into[: words.nbytes] = words.view(torch.uint8)

    def unpack(self, packed: Tensor, within: int | None = None) -> Tensor:
        """Ascending, at most as many as fit the payload, all below `within` (the part); or
        BadPayload."""
        if self._all:
            places = torch.arange(self._part, device=packed.device)
        elif not self._width:
            places = _unpack_bits(packed, 1)[: self._part].nonzero().view(-1)
            self._require_room(places.numel())
        else:
            places = self._from_blocks(packed)
        limit = self._part if within is None else within
        if places.numel() and (last := int(places[-1])) >= limit:
            raise BadPayload(f"place {last} in a row of {limit} values")
        return places

    def _from_blocks(self, packed: Tensor) -> Tensor:
        words = packed.clone().view(self._type()).long() & self.block_limit
        counts, inside = words[: self._blocks()], words[self._blocks() :]
        total = int(counts.sum())
        self._require_room(total)
        blocks = torch.arange(counts.numel(), device=packed.device)
        places = (blocks.repeat_interleave(counts) << self._width) + inside[:total]
        # The same place twice would be a value or another, as the device likes.
        if bool((places[1:] <= places[:-1]).any()):
            raise BadPayload("places that do not ascend")
        return places

    def _require_room(self, count: int) -> None:
        if count > self._most:
            raise BadPayload(f"{count} values where {self._most} fit")

    def _blocks(self) -> int:
        return -(-self._part // (1 << self._width))

    def _type(self) -> torch.dtype:
        return torch.uint8 if self._width == 8 else torch.int16


class Levels:
    """Values in a few bits, with one range (lo, hi) for those of a segment."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self._levels = 1 << (bits - 1)

    def nbytes(self, count: int) -> int:
        return -(-count * self.bits // 8)

    def encode(self, values: Tensor, owner: Tensor, segments: int) -> tuple[Tensor, Tensor]:
        """(K,) float32 of segment `owner` (K,) -> codes (K,), ranges (segments, 2) bfloat16."""
        ranges = values.new_zeros(segments, 2)
        if self.bits > 8:
            raw = values.to(torch.bfloat16 if self.bits == 16 else torch.float32)
            return raw, ranges.bfloat16()
        size = values.abs()
        if self.bits == 1:
            counts = torch.bincount(owner, minlength=segments).clamp_(min=1)
            squares = ranges[:, 0].index_add(0, owner, size.square())
            ranges += (squares / counts).sqrt_().unsqueeze(1)
        else:
            ranges[:, 0].scatter_reduce_(0, owner, size, "amin", include_self=False)
            ranges[:, 1].scatter_reduce_(0, owner, size, "amax", include_self=False)
        ranges = ranges.bfloat16()
        low, high = ranges.float()[owner].unbind(1)
        share = (size - low).clamp_(min=0) / (high - low).clamp_(min=torch.finfo().tiny)
        codes = (share.sqrt_() * self._levels).nan_to_num_().clamp_(max=self._levels - 1)
        return codes.to(torch.uint8) | ((values < 0).to(torch.uint8) << (self.bits - 1)), ranges

    def decode(self, codes: Tensor, owner: Tensor, ranges: Tensor) -> Tensor:
        """(K,) float32."""
        if self.bits > 8:
            return codes.float()
        spread = torch.arange(0.5, self._levels, device=codes.device).div_(self._levels)
        low, high = ranges.float().unbind(1)
        magnitudes = (high - low).unsqueeze(1) * spread.square_() + low.unsqueeze(1)  # (S, L)
        table = torch.cat([magnitudes, -magnitudes], dim=1)  # the sign is the highest bit
        found: Tensor = table[owner, codes.long()]
        return found

    def pack(self, codes: Tensor, into: Tensor) -> None:
        if self.bits > 8:
            into[: codes.nbytes] = codes.view(torch.uint8)
        else:
            _pack_bits(codes, self.bits, into)

    def unpack(self, packed: Tensor, count: int) -> Tensor:
        if self.bits > 8:
            kind = torch.bfloat16 if self.bits == 16 else torch.float32
            return packed.clone().view(kind)[:count]
        return _unpack_bits(packed, self.bits)[:count]


class SparseRow:
    """The form of one row: which segments there are, and which spans are sent whole."""

    def __init__(
        self, part: int, segments: Sequence[Segment], dense: Sequence[tuple[int, int]], bits: int
    ) -> None:
        self.segments = list(segments)
        self.numel = sum(segment.stop - segment.start for segment in segments)
        self.keep = sum(segment.keep for segment in segments)
        self._places = Places(part, self.keep)
        self._levels = Levels(bits)
        self._starts = torch.tensor([segment.start for segment in segments], dtype=torch.int64)
        spans = [torch.arange(start, stop) for start, stop in dense]
        self._dense = torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64)
        cuts = [4 * len(self.segments), self._places.nbytes, self._levels.nbytes(self.keep)]
        if not self.keep:
            cuts = [0, 0, 0]
        self._cuts = [*cuts, _DENSE_BYTES * self._dense.numel()]
        self.nbytes = sum(self._cuts)

    def admit(self, places: Tensor) -> Tensor:
        """Leaves out what the form cannot hold: the 256th place in one block of 256."""
        return self._places.admit(places)

    def pack(
        self,
        z: Tensor,
        places: Tensor,
        into: Tensor,
        *,
        broken: Tensor | None = None,
        take_out: bool = False,
    ) -> None:
        """Writes z at `places` (ascending, admitted) into `into`.

        `broken` says of which segments nothing can be sent, for they are not finite. With
        `take_out` z keeps only what was lost.
        """
        self._to(z.device)
        ranges, where, values, dense = into[: self.nbytes].split(self._cuts)
        if self.keep:
            owner = self._owner(places)
            codes, scales = self._levels.encode(z[places], owner, len(self.segments))
            if broken is not None:
                scales[broken] = torch.nan
            if take_out:
                z[places] -= self._levels.decode(codes, owner, scales)
            ranges.copy_(scales.view(-1).view(torch.uint8))
            self._places.pack(places, where)
            self._levels.pack(codes, values)
        if self._dense.numel():
            rounded = z[self._dense].bfloat16()
            if take_out:
                z[self._dense] -= rounded.float()
            dense.copy_(rounded.view(torch.uint8))

    def unpack(self, payload: Tensor, out: Tensor) -> Tensor:
        """Writes what a payload stands for into `out`, zero where it says nothing, and returns the
        places it speaks of, dense spans left out. BadPayload where it cannot be one of this form.
        """
        self._to(out.device)
        ranges, where, values, dense = payload[: self.nbytes].split(self._cuts)
        out.zero_()
        places = self._dense[:0]
        if self.keep:
            scales = ranges.clone().view(torch.bfloat16).view(-1, 2)
            places = self._places.unpack(where, out.numel())
            owner = self._owner(places)
            codes = self._levels.unpack(values, places.numel())
            out[places] = self._levels.decode(codes, owner, scales).to(out.dtype)
            broken = ~scales.isfinite().all(dim=1)
            out[self._starts[broken]] = torch.nan
        if self._dense.numel():
            out[self._dense] = dense.clone().view(torch.bfloat16).to(out.dtype)
        return places

    def _owner(self, places: Tensor) -> Tensor:
        """The segment each place is in."""
        return torch.bucketize(places, self._starts, right=True).sub_(1).clamp_(min=0)

    def _to(self, device: torch.device) -> None:
        if self._starts.device != device:
            self._starts, self._dense = self._starts.to(device), self._dense.to(device)


@lru_cache(maxsize=256)
def sparse_row(numel: int, density: float, bits: int) -> SparseRow:
    """One segment of `numel` values; all of it if it is small."""
    keep = numel if numel < SMALL else max(1, round(density * numel))
    return SparseRow(numel, [Segment(0, numel, keep)] if numel else [], [], bits)


def require_bits(name: str, value: object) -> int:
    number = plain_number(value)
    if not isinstance(number, int) or number not in BITS:
        raise refusal(name, "value_bits", f"one of {', '.join(map(str, BITS))}", value)
    return number


def _pack_bits(codes: Tensor, bits: int, into: Tensor) -> None:
    """uint8 codes below 2^bits, 8/bits to a byte, the first in the lowest bits."""
    per = 8 // bits
    if bits == 8:
        into[: codes.numel()] = codes
        return
    padded = codes.new_zeros(into.numel() * per)
    padded[: codes.numel()] = codes
    shifts = bits * torch.arange(per, dtype=torch.uint8, device=codes.device)
    torch.sum(padded.view(-1, per) << shifts, dim=1, dtype=torch.uint8, out=into)


def _unpack_bits(packed: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return packed
    shifts = bits * torch.arange(8 // bits, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(1) >> shifts) & ((1 << bits) - 1)).view(-1)

"""Codec: the form in which values travel.

A codec turns a flat float32 tensor into rows of bytes and back. Rows exist because the two-phase
mean sends row j to rank j: `encode(x, rows, part)` cuts x into `rows` rows of `part` values each
(the last ones short or empty when x is shorter) and returns a (rows, payload_bytes(part)) uint8
tensor; `decode` is its inverse up to the codec's loss. Both are pure functions: the same input
gives the same bits on every rank.

A value that is not finite must come out of `decode` as one that is not finite, in its own row at
least: that is how all replicas agree to skip a step without another message.

Bytes that no encoder has made - from a peer of another version, or damaged on the way - are decoded
to some values or refused with BadPayload, whatever they are. The wire adds who sent them.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Split:
    """`numel` values as `rows` rows of `part` each, the last ones short or empty."""

    numel: int
    rows: int
    part: int

    def own(self, row: int) -> int:
        """Values in row `row`, padding left out."""
        return max(0, min(self.numel - row * self.part, self.part))


class Codec(ABC):
    """Stateless; equal settings make equal codecs. `ErrorFeedback` adds memory to any of them."""

    @abstractmethod
    def payload_bytes(self, part: int) -> int:
        """Bytes of one encoded row of `part` values."""

    @abstractmethod
    def encode(self, x: Tensor, rows: int, part: int) -> Tensor:
        """(N,) float32 -> (rows, payload_bytes(part)) uint8, with N <= rows * part."""

    @abstractmethod
    def decode(self, payload: Tensor, part: int, out: Tensor) -> Tensor:
        """(rows, payload_bytes(part)) uint8 -> the first out.numel() values, into `out`."""

    def lose(self, payload: Tensor, part: int, x: Tensor, scratch: Tensor) -> Tensor:
        """x, which was encoded, less what its payload stands for: what was lost, in its place."""
        return x.sub_(self.decode(payload, part, scratch))

    def alignment(self, numel: int, rows: int) -> int:
        """Parts are rounded up to a multiple of this many values."""
        return 1

    def part(self, numel: int, rows: int) -> int:
        """Values per row when `numel` values are spread over `rows` rows."""
        align = self.alignment(numel, rows)
        return -(-numel // (rows * align)) * align

    def split(self, numel: int, rows: int) -> Split:
        return Split(numel, rows, self.part(numel, rows))

    def row_bytes(self, split: Split) -> int:
        return self.payload_bytes(split.part)

    def gathers(self, size: int) -> bool:
        """Whether a mean over `size` ranks sends every payload to everybody, instead of taking two
        phases. For payloads that lose more in the second phase than it saves."""
        return False

    @property
    def bits(self) -> float:
        """Payload bits per value of a large tensor; what the planner multiplies by."""
        probe = 1 << 20
        return 8 * self.payload_bytes(self.part(probe, 1)) / probe


def as_rows(x: Tensor, rows: int, width: int) -> Tensor:
    """x as (rows, width), zero-padded at the end; a view when nothing needs padding."""
    if x.numel() == rows * width:
        return x.view(rows, width)
    padded = x.new_zeros(rows * width)
    padded[: x.numel()] = x
    return padded.view(rows, width)


def require_flat(x: Tensor) -> None:
    if x.dim() != 1 or not x.is_contiguous() or x.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            "a wire carries flat, contiguous float32 tensors (float64 in Dense(torch.float64)), "
            f"got shape {tuple(x.shape)}, dtype {x.dtype}, contiguous={x.is_contiguous()}; "
            "flatten the values and convert them first"
        )

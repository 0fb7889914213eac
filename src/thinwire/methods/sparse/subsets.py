"""Subsets: which coordinates of which tensors take part in a round, drawn alike on all ranks.

A cycle has C rounds, and each coordinate has its turn in exactly one of them. The values of every
tensor are read as rows of C, the last one short. Row r draws a shift s_r, and the cycle an order of
the C places, a permutation o; in round k of the cycle row r gives the value at place

    o[(s_r + k) mod C]

As k runs over 0..C-1 a row gives each of its values once. Any coordinate is as likely to have its
turn in one round as in another, independently of those in other rows, and a round takes one value
of every row: each tensor gives its exact share, to within one value, in every round.

Everything is drawn on the host from the shared seed and the number of the cycle: all ranks know all
subsets, and nothing about them is sent. What is kept is one small integer for each row, N / C bytes
up to C = 256, twice that above; the places themselves are computed when a round leaves and again
when it lands, which is cheaper than to keep them.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_PARTS = 2**15


def parts_of(fraction: float) -> int:
    """C = ceil(1 / fraction), not misled by the rounding of 1 / fraction."""
    return math.ceil(1 / fraction - 1e-9)


class Subset:
    """The coordinates of one round: for each tensor the places of its values, flattened."""

    def __init__(self, places: Sequence[Tensor]) -> None:
        self._places = places
        self._sizes = [place.numel() for place in places]
        self.numel = sum(self._sizes)

    def read(self, tensors: Sequence[Tensor], out: Tensor) -> Tensor:
        """The tensors' values at these coordinates, one after another, into `out`."""
        for tensor, place, view in self._with_views(tensors, out):
            view.copy_(
                tensor.view(-1).index_select(0, place)
                if tensor.is_contiguous()
                else tensor.take(place)
            )
        return out

    def write(self, values: Tensor, tensors: Sequence[Tensor]) -> None:
        """Puts values, in the order of `read`, into the tensors, in their own dtype."""
        for tensor, place, view in self._with_views(tensors, values):
            if tensor.is_contiguous():
                tensor.view(-1).index_copy_(0, place, view.to(tensor.dtype))
            else:
                tensor.put_(place, view.to(tensor.dtype))

    def _with_views(
        self, tensors: Sequence[Tensor], values: Tensor
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        triples = zip(tensors, self._places, values.split(self._sizes), strict=True)
        return [triple for triple in triples if triple[1].numel()]


@dataclass(frozen=True)
class _Draw:
    """What a cycle has drawn."""

    shifts: Tensor  # (rows,), on the device of the tensors
    last: list[int]  # the shifts of the last row of each tensor
    order: list[int]


class Subsets:
    """The subsets of all rounds, for tensors of these sizes."""

    def __init__(
        self, sizes: Sequence[int], parts: int, seed: int, device: torch.device | str = "cpu"
    ) -> None:
        self.parts, self.seed = parts, seed
        self.sizes, self._device = list(sizes), torch.device(device)
        self._rows = [-(-size // parts) for size in sizes]
        self._dtype = torch.uint8 if parts <= 256 else torch.int16
        self._drawn: dict[int, _Draw] = {}

    def subset(self, number: int) -> Subset:
        """The coordinates of round `number`, counted from 0."""
        cycle, turn = divmod(number, self.parts)
        draw = self._draw(cycle)
        rotated = draw.order[turn:] + draw.order[:turn]
        table = torch.tensor(rotated, device=self._device)
        offsets = table.index_select(0, draw.shifts.to(torch.int32))  # (rows,) int64
        places = []
        for size, view, last in zip(self.sizes, offsets.split(self._rows), draw.last, strict=True):
            rows = view.numel()
            if rows and (rows - 1) * self.parts + rotated[last] >= size:
                rows -= 1  # the short row has no value at this place
            first = torch.arange(0, rows * self.parts, self.parts, device=self._device)
            places.append(first.add_(view[:rows]))
        return Subset(places)

    def forget(self, before: int) -> None:
        """Drops what was drawn for cycles that ended before round `before`."""
        for cycle in [c for c in self._drawn if (c + 1) * self.parts <= before]:
            del self._drawn[cycle]

    def nbytes(self) -> int:
        """Bytes held for the cycles in use."""
        return sum(draw.shifts.nbytes for draw in self._drawn.values())

    def fingerprint(self) -> str:
        """Tells whether two ranks would draw the same, by what they draw first."""
        draw = self._draw(0)
        content = draw.shifts.cpu().numpy().tobytes() + repr((draw.order, self.sizes)).encode()
        return hashlib.sha256(content).hexdigest()[:16]

    def _draw(self, cycle: int) -> _Draw:
        if cycle not in self._drawn:
            self._drawn[cycle] = self._new_draw(cycle)
        return self._drawn[cycle]

    def _new_draw(self, cycle: int) -> _Draw:
        key = hashlib.sha256(f"{self.seed} {cycle}".encode()).digest()[:8]
        generator = torch.Generator().manual_seed(int.from_bytes(key, "little"))
        order = torch.randperm(self.parts, generator=generator).tolist()
        shifts = torch.randint(
            self.parts, (sum(self._rows),), generator=generator, dtype=self._dtype
        )
        ends = torch.tensor(self._rows).cumsum(0).sub_(1).clamp_(min=0)
        last = shifts[ends].tolist() if shifts.numel() else [0] * len(self._rows)
        return _Draw(shifts.to(self._device), last, order)

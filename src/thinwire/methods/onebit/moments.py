"""MomentBucket: a bucket with Adam's moments of its values, and the errors of one-bit payloads.

[Note: runs] Settings belong to parameter groups, the number of its steps to each tensor, and a
tensor that no rank has a gradient for is left alone. Most of the time all tensors of a bucket have
the same settings and all are used: then one operation serves the whole buffer. `runs` cuts it where
that ends, into the stretches of neighbouring tensors for which an operation is the same.
"""

import itertools
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from thinwire.methods.overlap.bucket import Bucket
from thinwire.wire.codecs import ErrorFeedback, OneBit
from thinwire.wire.compressed_mean import own_slice

# What a tensor of a single value has of every value.
PER_VALUE = ("exp_avg", "exp_avg_sq", "fresh_sq", "anchor", "update", "ahead")
COUNTS = ("step", "refreshes")

K = TypeVar("K")


class MomentBucket(Bucket):
    """
    moments  (own,)  m, v and whatever else a method keeps of every value, by name
    scalars  (L,)    what it keeps of every tensor
    counts   [L]     of every tensor: the steps it has taken, and other whole numbers

    `own` is which of the N values this rank keeps moments of: all of them, or one of `size` parts
    of `part` values, the same parts in which a one-bit mean is taken.
    """

    def __init__(
        self,
        indices: Sequence[int],
        parameters: Sequence[Tensor],
        groups: Sequence[dict[str, Any]],
        *,
        compress: bool = True,
        size: int = 1,
        rank: int = 0,
    ) -> None:
        super().__init__(indices, parameters)
        self.groups = [groups[i] for i in indices]
        self.compress = compress
        self.part = OneBit().part(self.flat.numel, size)
        self.own = own_slice(self.flat.numel, self.part, rank)
        self.moments: dict[str, Tensor] = {}
        self.scalars: dict[str, Tensor] = {}
        self.counts: dict[str, list[int]] = {"step": [0] * len(self.indices)}
        self.betas: list[tuple[float, float]] = []
        """Of every tensor, as they were when the bucket was launched: a scheduler may change them
        while it is in the air."""
        self.take_betas()
        self.new_moment("exp_avg")
        self.new_moment("exp_avg_sq")
        self.tentative: dict[str, Tensor] = {}
        """Moments made while the bucket was in the air, for those held by the same name."""
        self.reset_feedback()
        self._roots: tuple[list[float], Tensor] | None = None

    @property
    def m(self) -> Tensor:
        return self.moments["exp_avg"]

    @property
    def v(self) -> Tensor:
        return self.moments["exp_avg_sq"]

    @property
    def ahead(self) -> Tensor:
        """What the weights move by next, in units of m; see delayed_step.py."""
        held = self.moments.get("ahead")
        return self.new_moment("ahead") if held is None else held

    @property
    def mine(self) -> Tensor:
        """The part of the buffer that this rank keeps moments of."""
        return self.buffer[self.own]

    def reset_feedback(self) -> None:
        """Forgets what the codec has lost so far."""
        self.memory = self.feedback = ErrorFeedback(OneBit())
        self.feedback.tentative = True  # a step is skipped for any bucket's sake

    def commit(self, taken: bool, used: Container[int]) -> None:
        super().commit(taken, used)
        for name, moment in self.tentative.items():
            if taken:  # `optimizer.state` shows this memory
                for part, _ in self.runs(lambda at: None):
                    self.moments[name][part] = moment[part]
        self.tentative = {}

    @property
    def used(self) -> list[int]:
        """Positions of the tensors that any rank has a gradient for at this step."""
        return [at for at in range(len(self.indices)) if at not in self.resting]

    def take_betas(self) -> None:
        self.betas = [tuple(group["betas"]) for group in self.groups]

    def count(self, name: str) -> None:
        """One more for every tensor that is used."""
        counts = self.counts.setdefault(name, [0] * len(self.indices))
        for at in range(len(counts)):
            counts[at] += at not in self.resting

    def new_moment(self, name: str) -> Tensor:
        self.moments[name] = torch.zeros_like(self.mine)
        return self.moments[name]

    def roots(self) -> Tensor:
        """sqrt(v) + eps of a variance that is frozen: made once, for as long as eps stays."""
        wanted = [group["eps"] for group in self.groups]
        if self._roots is None or self._roots[0] != wanted:
            roots = self.v.sqrt()
            for piece, eps in zip(self.pieces(roots), wanted, strict=True):
                piece.add_(eps)
            self._roots = wanted, roots
        return self._roots[1]

    def new_scalar(self, name: str, value: float) -> Tensor:
        count = len(self.parameters)
        self.scalars[name] = torch.full((count,), value, device=self.buffer.device)
        return self.scalars[name]

    def scalar(self, name: str, start: float) -> Tensor:
        """What is kept of every tensor by this name, `start` if that is nothing yet."""
        held = self.scalars.get(name)
        return self.new_scalar(name, start) if held is None else held

    def set_scalar(self, name: str, values: Tensor) -> Tensor:
        """New values for the tensors in use; returns all of them."""
        held = self.scalars[name]
        if not self.resting:
            return held.copy_(values)
        for at in set(range(len(self.indices))) - self.resting:
            held[at] = values[at]
        return held

    def runs(self, key: Callable[[int], K], *, resting: bool = False) -> list[tuple[slice, K]]:
        """(values, key) of stretches of this rank's own values in which key(position of a tensor)
        is the same; without the tensors at rest, unless they are asked for. See [Note: runs]."""
        found: list[tuple[slice, K]] = []
        for at, (start, stop) in enumerate(self._cuts()):
            if start == stop or (at in self.resting and not resting):
                continue
            value = key(at)
            if found and found[-1][0].stop == start and found[-1][1] == value:
                found[-1] = slice(found[-1][0].start, stop), value
            else:
                found.append((slice(start, stop), value))
        return found

    def pieces(self, own: Tensor) -> list[Tensor]:
        """A buffer of this rank's own values, cut by tensor: flat, empty where it has none."""
        return [own[a:b] for a, b in self._cuts()]

    def _cuts(self) -> list[tuple[int, int]]:
        ends = list(itertools.accumulate(self.flat.sizes))
        count = self.own.stop - self.own.start
        cuts = [min(max(end - self.own.start, 0), count) for end in ends]
        return list(itertools.pairwise([0, *cuts]))

    def entries(self, index: int) -> dict[str, Tensor]:
        """What there is to save for one parameter."""
        at = self.indices.index(index)
        counts = {name: torch.tensor(float(n[at])) for name, n in self.counts.items()}
        return self.shown(index) | counts

    def shown(self, index: int) -> dict[str, Tensor]:
        """What is kept here for one parameter, by name; it shares the bucket's memory."""
        at = self.indices.index(index)
        held = {name: self.pieces(own)[at] for name, own in self.moments.items()}
        if self.own == slice(0, self.flat.numel):
            held = {name: piece.view(self.flat.shapes[at]) for name, piece in held.items()}
        return held | {name: values[at] for name, values in self.scalars.items()}

    def adopt(self, index: int, saved: Mapping[str, Tensor]) -> None:
        """Takes over what was kept for a whole parameter elsewhere, as far as it is kept here."""
        self._roots = None
        at = self.indices.index(index)
        begins = sum(self.flat.sizes[:at])
        for name, value in saved.items():
            if name in COUNTS:
                self.counts.setdefault(name, [0] * len(self.indices))[at] = int(value)
            elif name in PER_VALUE or value.dim() > 0:
                held = self.moments.get(name)
                piece = self.pieces(self.new_moment(name) if held is None else held)[at]
                start = max(0, self.own.start - begins)
                piece.copy_(value.reshape(-1)[start : start + piece.numel()])
            else:
                self.scalar(name, 0.0)[at] = value

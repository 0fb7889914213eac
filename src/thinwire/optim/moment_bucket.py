"""MomentBucket: a bucket with Adam's moments of its values, and the errors of one-bit payloads."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.optim.buckets import Bucket
from thinwire.wire.codecs import ErrorFeedback, OneBit
from thinwire.wire.compressed_mean import own_slice

# What a tensor of a single value has of every value.
PER_VALUE = ("exp_avg", "exp_avg_sq", "fresh_sq", "anchor", "update", "ahead")


class MomentBucket(Bucket):
    """
    moments  (own,)  m, v and whatever else a method keeps of every value, by name
    scalars  (L,)    what it keeps of every tensor

    `own` is which of the N values this rank keeps moments of: all of them, or one of `size` parts
    of `part` values, the same parts in which a one-bit mean is taken.
    """

    def __init__(
        self,
        indices: Sequence[int],
        parameters: Sequence[Tensor],
        groups: Sequence[dict[str, Any]],
        *,
        size: int = 1,
        rank: int = 0,
    ) -> None:
        super().__init__(indices, parameters)
        self.groups = [groups[i] for i in indices]
        self.compress: bool = self.groups[0]["compress"]
        self.betas: tuple[float, float] = self.groups[0]["betas"]
        self.part = OneBit().part(self.flat.numel, size)
        self.own = own_slice(self.flat.numel, self.part, rank)
        self.moments: dict[str, Tensor] = {}
        self.scalars: dict[str, Tensor] = {}
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
        """What the weights move by next, in units of m; see [Note: late] in one_bit.py."""
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

    def commit(self, taken: bool) -> None:
        super().commit(taken)
        for name, moment in self.tentative.items():
            if taken:
                self.moments[name].copy_(moment)  # `optimizer.state` shows this memory
        self.tentative = {}

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

    def pieces(self, own: Tensor) -> list[Tensor]:
        """A buffer of this rank's own values, cut by tensor: flat, empty where it has none."""
        ends = list(itertools.accumulate(self.flat.sizes))
        cuts = [min(max(end - self.own.start, 0), own.numel()) for end in ends]
        return [own[a:b] for a, b in itertools.pairwise([0, *cuts])]

    def entries(self, index: int) -> dict[str, Tensor]:
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
            if name in PER_VALUE or value.dim() > 0:
                held = self.moments.get(name)
                piece = self.pieces(self.new_moment(name) if held is None else held)[at]
                start = max(0, self.own.start - begins)
                piece.copy_(value.reshape(-1)[start : start + piece.numel()])
            else:
                held = self.scalars.get(name)
                (self.new_scalar(name, 0.0) if held is None else held)[at] = value

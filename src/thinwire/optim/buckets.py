"""Buckets: parameters that travel together, and the backward pass they travel behind.

[Note: order of buckets] A bucket is launched when all of its gradients are there and every bucket
before it has been launched. The order is fixed, so all ranks issue the same transfers in the same
order, whichever gradients came first on each of them; what is left is launched by step(). Buckets
follow the order in which rank 0's first backward pass produced the gradients.
"""

import itertools
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from thinwire.optim.flat import Flat, local_part
from thinwire.wire.codecs import ErrorFeedback, Feedback, OneBit
from thinwire.wire.compressed_mean import own_slice
from thinwire.wire.flight import Flight

# What a tensor of a single value has of every value.
PER_VALUE = ("exp_avg", "exp_avg_sq", "fresh_sq", "anchor", "update")
_MB = 1_000_000


class TentativeFeedback(ErrorFeedback):
    """Errors that are taken over only by `commit`: a step may be skipped for another bucket's
    sake, and must then leave no trace in this one."""

    def settle(self, finite: bool) -> None:
        pass

    def commit(self, taken: bool) -> None:
        super().settle(taken)


class FlatBucket:
    """Tensors as one flat buffer.

    buffer   (N,)    what travels: gradients or momentum on the way out, their mean on the way back
    """

    memory: Feedback | None = None
    """What the codec remembers of the buffer, where it does."""

    def __init__(self, indices: Sequence[int], parameters: Sequence[Tensor]) -> None:
        self.indices = list(indices)  # of the parameters, in the optimizer's order
        self.parameters = [parameters[i] for i in indices]
        self.flat = Flat(self.parameters)
        self.buffer = self.flat.new().zero_()
        self.flight: Flight | None = None
        self._seen: tuple[list[tuple[int, int]], Tensor] | None = None

    def commit(self, taken: bool) -> None:
        """The step is taken or not: by all buckets of all ranks alike."""
        if self.memory is not None:
            self.memory.settle(taken)

    def views(self, flat: Tensor) -> list[Tensor]:
        """A buffer of all N values, seen as the tensors."""
        return self.flat.views(flat)

    def take_gradients(self) -> Tensor:
        """Copies the gradients into the buffer; none counts as zeros."""
        return self.flat.pack([p.grad for p in self.parameters], self.buffer)

    def note_gradients(self) -> None:
        """Remembers which gradients were sent, to find out whether they are changed later."""
        self._seen = self._versions(), self._first_values()

    def gradients_changed(self) -> bool:
        seen, self._seen = self._seen, None
        if seen is None:
            return False
        return seen[0] != self._versions() or not seen[1].equal(self._first_values())

    def _versions(self) -> list[tuple[int, int]]:
        return [version(p) for p in self.parameters]

    def _first_values(self) -> Tensor:
        """One value of each gradient: GradScaler.unscale_ writes past the versions."""
        gradients = [local_part(p.grad) for p in self.parameters if p.grad is not None]
        values = [g.reshape(-1)[0].nan_to_num() for g in gradients if g.numel()]
        return torch.stack(values) if values else torch.zeros(0)


class Bucket(FlatBucket):
    """A flat buffer with the moments of its values.

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
    def mine(self) -> Tensor:
        """The part of the buffer that this rank keeps moments of."""
        return self.buffer[self.own]

    def reset_feedback(self) -> None:
        """Forgets what the codec has lost so far."""
        self.feedback = TentativeFeedback(OneBit())

    def commit(self, taken: bool) -> None:
        """The step is taken or not: by all buckets of all ranks alike."""
        self.feedback.commit(taken)
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


def arrange(
    order: Sequence[int],
    parameters: Sequence[Tensor],
    groups: Sequence[dict[str, Any]],
    bucket_mb: float | None,
    *,
    size: int = 1,
    rank: int = 0,
) -> list[Bucket]:
    """Parameters in the given order, cut into buckets of one kind of group each.

    None as `bucket_mb` makes about four buckets of 1 to 25 MB of float32. Of the moments this rank
    keeps those of the `rank`-th of `size` parts.
    """
    kinds = [(group["compress"], tuple(group["betas"])) for group in groups]
    return [
        Bucket(members, parameters, groups, size=size, rank=rank)
        for members in cut(order, parameters, kinds, bucket_mb)
    ]


def cut(
    order: Sequence[int],
    parameters: Sequence[Tensor],
    kinds: Sequence[Hashable],
    bucket_mb: float | None,
) -> list[list[int]]:
    """Parameters in the given order, of one kind and device each, about `bucket_mb` at a time."""
    mb = {i: local_part(parameters[i]).numel() * 4 / _MB for i in order}
    enough = min(25.0, max(1.0, sum(mb.values()) / 4)) if bucket_mb is None else bucket_mb
    filling: dict[Hashable, list[int]] = {}
    full: list[list[int]] = []
    for index in order:
        kind = (kinds[index], parameters[index].device)
        members = filling.setdefault(kind, [])
        members.append(index)
        if sum(mb[i] for i in members) >= enough:
            full.append(filling.pop(kind))
    return [*full, *filling.values()]


class Backward:
    """Watches the backward pass: which gradients are there, and in which order they came."""

    def __init__(self, parameters: Sequence[Tensor], ready: Callable[[int], None]) -> None:
        """`ready(index)` is called for every gradient of a pass that is not `accumulating`."""
        self.order: dict[int, None] = {}  # as an ordered set
        self._accumulating = False
        owner = weakref.WeakMethod(ready)
        for index, parameter in enumerate(parameters):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._hook(index, owner))

    def _hook(self, index: int, owner: "weakref.WeakMethod[Any]") -> Callable[[Tensor], None]:
        me = weakref.ref(self)

        def hook(_parameter: Tensor) -> None:
            watcher, ready = me(), owner()
            if watcher is None or ready is None:  # the optimizer is gone
                return
            watcher.order.setdefault(index)
            if not watcher._accumulating:
                ready(index)

        return hook

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before


def version(parameter: Tensor) -> tuple[int, int]:
    """Which gradient a parameter has, and how often that was written to."""
    gradient = parameter.grad
    return (0, 0) if gradient is None else (id(gradient), gradient._version)

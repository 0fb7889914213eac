"""Buckets: parameters that travel together, and the backward pass they travel behind.

[Note: order of buckets] A bucket is launched when all of its gradients are there and every bucket
before it has been launched. The order is fixed, so all ranks issue the same transfers in the same
order, whichever gradients came first on each of them; what is left is launched by step(). Buckets
follow the order in which rank 0's first backward pass produced the gradients.
"""

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from thinwire.optim.flat import Flat, local_part
from thinwire.wire.codecs import Feedback
from thinwire.wire.flight import Flight

_MB = 1_000_000


class Bucket:
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


def arrange(
    order: Sequence[int],
    parameters: Sequence[Tensor],
    kinds: Sequence[Hashable],
    bucket_mb: float | None,
    count: int = 4,
) -> list[list[int]]:
    """Parameters in the given order, of one kind and device each, about `bucket_mb` at a time.

    None makes about `count` of 1 to 25 MB of float32.
    """
    mb = {i: local_part(parameters[i]).numel() * 4 / _MB for i in order}
    enough = min(25.0, max(1.0, sum(mb.values()) / count)) if bucket_mb is None else bucket_mb
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

"""Bucket: parameters that travel together, as one flat buffer.

[Note: changes past the versions] A gradient that is changed after it was sent would be averaged as
it was before. torch counts writes to a tensor, but not those through `.data` nor GradScaler's. The
first steps therefore compare the sum of every gradient as well, which costs two passes over them;
later steps compare one value of each, at another place every time. A loop that changes gradients so
is refused at its first steps in all likelihood, one that begins to later within some of them.
"""

import itertools
from collections.abc import Container, Hashable, Mapping, Sequence

import torch
from torch import Tensor

from thinwire.flat import Flat, local_part
from thinwire.wire.codecs import Feedback
from thinwire.wire.flight import Flight

_MB = 1_000_000
PROBED_WHOLE = 3  # steps, see [Note: changes past the versions]


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
        self.resting: frozenset[int] = frozenset()
        """Positions of the tensors that no rank had a gradient for at the last step."""
        self._seen: tuple[list[tuple[int, int]], Tensor] | None = None

    def commit(self, taken: bool, used: Container[int]) -> None:
        """The step is taken or not: by all buckets of all ranks alike, for the parameters used."""
        self.resting = frozenset(at for at, i in enumerate(self.indices) if i not in used)
        if self.memory is not None:
            self.memory.settle(taken, [self.spans()[at] for at in sorted(self.resting)])

    def rests(self, indices: Container[int]) -> None:
        """Which tensors were at rest in the buckets that this one takes the place of."""
        self.resting = frozenset(at for at, i in enumerate(self.indices) if i in indices)

    def spans(self) -> list[slice]:
        """Where in the buffer each tensor is."""
        ends = list(itertools.accumulate(self.flat.sizes))
        return [slice(end - size, end) for end, size in zip(ends, self.flat.sizes, strict=True)]

    def views(self, flat: Tensor) -> list[Tensor]:
        """A buffer of all N values, seen as the tensors."""
        return self.flat.views(flat)

    def take_gradients(self, given: Mapping[int, Tensor] | None = None) -> Tensor:
        """Copies the gradients, or those given by index, into the buffer; none counts as zeros."""
        gradients = [p.grad for p in self.parameters]
        if given is not None:
            gradients = [given.get(index) for index in self.indices]
        return self.flat.pack(gradients, self.buffer)

    def note_gradients(self, step: int) -> None:
        """Remembers which gradients were sent, to find out whether they are changed later."""
        self._seen = self._versions(), self._probe(step)

    def gradients_changed(self, step: int) -> bool:
        """Whether they are others than at `note_gradients(step)`."""
        seen, self._seen = self._seen, None
        if seen is None:
            return False
        return seen[0] != self._versions() or not seen[1].equal(self._probe(step))

    def _versions(self) -> list[tuple[int, int]]:
        return [version(p) for p in self.parameters]

    def _probe(self, step: int) -> Tensor:
        """What the versions do not tell, see [Note: changes past the versions]: a number for each
        gradient, of all of its values at first, later of one of them, another at every step."""
        gradients = [local_part(p.grad) for p in self.parameters if p.grad is not None]
        parts = [g.reshape(-1) for g in gradients if g.numel()]
        if step >= PROBED_WHOLE:
            parts = [g[(step * 40503) % g.numel()].reshape(1) for g in parts]
        sums = [g.nan_to_num().double().sum() for g in parts]
        return torch.stack(sums) if sums else torch.zeros(0)


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


def version(parameter: Tensor) -> tuple[int, int]:
    """Which gradient a parameter has, and how often that was written to."""
    gradient = parameter.grad
    return (0, 0) if gradient is None else (id(gradient), gradient._version)

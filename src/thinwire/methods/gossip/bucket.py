"""NeighbourBucket: a bucket whose values are mixed with those of the neighbours."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.methods.overlap.bucket import Bucket


class NeighbourBucket(Bucket):
    """
    moments  (N,)    what the method keeps; with a codec also its differences'
    proposed (N,)    z, while its differences travel
    """

    def __init__(
        self, indices: Sequence[int], parameters: Sequence[Tensor], groups: Sequence[dict[str, Any]]
    ) -> None:
        super().__init__(indices, parameters)
        self.groups = [groups[i] for i in indices]
        self.moments: dict[str, Tensor] = {}
        self.proposed: Tensor | None = None

    def new_moment(self, name: str) -> None:
        self.moments[name] = torch.zeros_like(self.buffer)

    def tensors(self, flat: Tensor) -> Iterable[tuple[Tensor, Tensor, dict[str, Any]]]:
        """(part of `flat`, parameter, its group) of every tensor."""
        return zip(self.views(flat), self.parameters, self.groups, strict=True)

    def entries(self) -> dict[int, dict[str, Tensor]]:
        """What is kept for every parameter, by name; it shares the bucket's memory."""
        held = {name: self.views(flat) for name, flat in self.moments.items()}
        return {
            index: {name: views[at] for name, views in held.items()}
            for at, index in enumerate(self.indices)
        }

"""Shards: what the ranks that share one replica must decide together.

With FSDP2 a rank holds a part of every weight. Norms (of the mean, of the momentum) and the verdict
whether a round is finite belong to the whole replica, so they are summed up over its ranks: a few
bytes a round, inside the group. Where nothing is sharded nothing is sent.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from thinwire.wire.wire import Wire


class Shards:
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        meshes = {t.device_mesh for t in tensors if isinstance(t, DTensor)}
        self._wire: Wire | None = None
        if not meshes:
            return
        mesh = meshes.pop()
        if meshes or mesh.ndim != 1:
            raise ValueError(
                "parameters must be sharded along one dimension of one DeviceMesh (FSDP2 over "
                'mesh["shard"]); replicas are this optimizer\'s business'
            )
        self._wire = Wire(mesh, name="shards")

    @property
    def several(self) -> bool:
        """Whether a replica is spread over ranks at all."""
        return self._wire is not None

    def sum(self, values: Sequence[float]) -> list[float]:
        """Numbers of which each rank of the replica has its part."""
        return list(values) if self._wire is None else self._wire.agree(values, "sum")

    def norm(self, local: Tensor) -> float:
        """The Euclidean norm of a flat tensor of which each rank holds a part."""
        own = float(torch.linalg.vector_norm(local))
        if self._wire is None:
            return own
        return math.sqrt(self._wire.agree([own * own], "sum")[0])

    def all(self, verdict: bool) -> bool:
        """Whether it holds on every rank of the replica."""
        if self._wire is None:
            return verdict
        return bool(self._wire.agree([float(verdict)], "min")[0])

    def largest(self, values: list[float]) -> list[float]:
        """Each value's largest over the ranks of the replica."""
        if self._wire is None:
            return values
        return self._wire.agree(values, "max")

"""DSGD and DmSGD: decentralized SGD, and with ordinary momentum. The yardsticks of DecentLaM.

    DSGD     x_i = sum_j w_ij (x_j - lr g_j)
    DmSGD    m_i = b m_i + g_i ;   x_i = sum_j w_ij (x_j - lr m_j)             g with lam x in it

With data that differ between replicas DSGD rests at a distance of order lr from the optimum, and
DmSGD where DSGD with lr / (1-b) does: use DecentLaM, which has the momentum without the distance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.optim.checks import require_share
from thinwire.optim.decentralized import (
    DecentralizedOptimizer,
    NeighbourBucket,
    NeighbourSettings,
)
from thinwire.optim.flat import local_part
from thinwire.optim.stage_settings import spelled_out
from thinwire.wire.topology import Topology

if TYPE_CHECKING:
    from typing_extensions import Unpack


class DSGD(DecentralizedOptimizer):
    """Decentralized SGD without momentum. Settings as in `DecentLaM`."""

    @spelled_out(DecentralizedOptimizer, NeighbourSettings)
    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        weight_decay: float = 0.0,
        **settings: Unpack[NeighbourSettings],
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay}, **settings)

    def _check_group(self, name: str, group: dict[str, Any]) -> None:
        super()._check_group(name, group)
        require_agreement(name, self.topology)

    def _propose(self, bucket: NeighbourBucket) -> None:
        for z, x, group in self._tensors(bucket, bucket.buffer):
            z.mul_(-float(group["lr"])).add_(local_part(x))

    def _absorb(self, bucket: NeighbourBucket, mixed: Tensor) -> None:
        bucket.flat.unpack(mixed, bucket.parameters)


class DmSGD(DSGD):
    """Decentralized SGD with ordinary momentum. Settings as in `DecentLaM`."""

    @spelled_out(DecentralizedOptimizer, NeighbourSettings)
    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0.9,
        *,
        weight_decay: float = 0.0,
        **settings: Unpack[NeighbourSettings],
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        DecentralizedOptimizer.__init__(self, params, defaults, **settings)

    def _check_group(self, name: str, group: dict[str, Any]) -> None:
        super()._check_group(name, group)
        group["momentum"] = require_share(name, "momentum", group["momentum"])

    def _new_moments(self, bucket: NeighbourBucket) -> None:
        bucket.new_moment("momentum_buffer")

    def _propose(self, bucket: NeighbourBucket) -> None:
        momenta = bucket.views(bucket.moments["momentum_buffer"])
        for m, (z, x, group) in zip(momenta, self._tensors(bucket, bucket.buffer), strict=True):
            here = local_part(x)
            if x.grad is None:
                z.copy_(here)
                continue
            m.mul_(group["momentum"]).add_(z)
            z.copy_(m).mul_(-float(group["lr"])).add_(here)


def require_agreement(name: str, graph: Topology) -> None:
    """Refuses weights under which replicas only swap their values."""
    if not graph.gap > 1e-9:
        raise ValueError(
            f"{name}: on {graph.describe()}, so the replicas never agree; give ranks a weight for "
            "their own value, as from_edges does"
        )

"""DSGD and DmSGD: decentralized SGD, and with ordinary momentum. The baselines of DecentLaM.

    DSGD     x_i = sum_j w_ij (x_j - lr g_j)
    DmSGD    m_i = b m_i + g_i ;   x_i = sum_j w_ij (x_j - lr m_j)             g with lam x in it

With data that differ between replicas DSGD rests at a distance of order lr from the optimum, and
DmSGD where DSGD with lr / (1-b) does: use DecentLaM, which has the momentum without the distance.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.flat import local_part
from thinwire.methods.base import Shown, WireOptimizer
from thinwire.methods.gossip.bucket import NeighbourBucket
from thinwire.methods.gossip.engine import GossipEngine, GossipOptions
from thinwire.optim.checks import require_nonnegative, require_share
from thinwire.wire.codecs import Codec
from thinwire.wire.ranks import Group
from thinwire.wire.topology import Topology


class DSGD(WireOptimizer):
    """Decentralized SGD without momentum. Settings as in `DecentLaM`."""

    engine: GossipEngine
    topology = Shown[Topology]("topology", "Who talks to whom.")
    neighbours = Shown[Sequence[int]]("neighbours", "The ranks that this one talks to.")
    grad_norm = Shown[float]("grad_norm", "Of this replica's last gradient, before clipping.")
    clip = Shown[float | None]("clip", "Largest norm of a replica's gradient.", settable=True)
    buckets = Shown[list[NeighbourBucket]]("reducer.buckets", "What travels together.")

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        topology: str | Topology = "ring",
        weight_decay: float = 0.0,
        codec: Codec | None = None,
        clip: float | None = None,
        bucket_mb: float | None = None,
        overlap: bool = True,
        buffers: Iterable[Tensor] = (),
        group: Group = None,
    ) -> None:
        name = type(self).__name__
        options = GossipOptions(name, topology, codec, clip, buffers, group)
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay}, group=group)
        for settings in self.session.groups:
            require_nonnegative(name, settings, "lr", "weight_decay")
        require_agreement(name, options.topology)
        self.engine = GossipEngine(
            self.session, PlainRule(), options, bucket_mb=bucket_mb, overlap=overlap
        )


class DmSGD(WireOptimizer):
    """Decentralized SGD with ordinary momentum. Settings as in `DecentLaM`."""

    engine: GossipEngine
    topology = Shown[Topology]("topology", "Who talks to whom.")
    neighbours = Shown[Sequence[int]]("neighbours", "The ranks that this one talks to.")
    grad_norm = Shown[float]("grad_norm", "Of this replica's last gradient, before clipping.")
    clip = Shown[float | None]("clip", "Largest norm of a replica's gradient.", settable=True)
    buckets = Shown[list[NeighbourBucket]]("reducer.buckets", "What travels together.")

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0.9,
        *,
        topology: str | Topology = "ring",
        weight_decay: float = 0.0,
        codec: Codec | None = None,
        clip: float | None = None,
        bucket_mb: float | None = None,
        overlap: bool = True,
        buffers: Iterable[Tensor] = (),
        group: Group = None,
    ) -> None:
        name = type(self).__name__
        options = GossipOptions(name, topology, codec, clip, buffers, group)
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults, group=group)
        for settings in self.session.groups:
            require_nonnegative(name, settings, "lr", "weight_decay")
            settings["momentum"] = require_share(name, "momentum", settings["momentum"])
        require_agreement(name, options.topology)
        self.engine = GossipEngine(
            self.session, HeavyBallRule(), options, bucket_mb=bucket_mb, overlap=overlap
        )


class PlainRule:
    """x_i = sum_j w_ij (x_j - lr g_j)"""

    moments: Sequence[str] = ()

    def require(self, groups: Sequence[dict[str, Any]]) -> None:
        pass

    def propose(self, bucket: NeighbourBucket) -> None:
        for z, x, group in bucket.tensors(bucket.buffer):
            z.mul_(-float(group["lr"])).add_(local_part(x))

    def absorb(self, bucket: NeighbourBucket, mixed: Tensor) -> None:
        bucket.flat.unpack(mixed, bucket.parameters)


class HeavyBallRule(PlainRule):
    """m_i = b m_i + g_i ;   x_i = sum_j w_ij (x_j - lr m_j)"""

    moments: Sequence[str] = ("momentum_buffer",)

    def propose(self, bucket: NeighbourBucket) -> None:
        momenta = bucket.views(bucket.moments["momentum_buffer"])
        for m, (z, x, group) in zip(momenta, bucket.tensors(bucket.buffer), strict=True):
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

"""DecentLaM: momentum SGD among graph neighbours, without the bias that momentum adds.

    z_i = x_i - lr (g_i + lam x_i) ;   zbar_i = sum_j w_ij z_j                what neighbours send
    m_i = b m_i + (x_i - zbar_i) / lr ;   x_i = x_i - lr m_i

Same traffic as plain decentralized SGD, and the same fixed point x = W (x - lr g): at rest m = 0,
whatever b. Ordinary momentum (DmSGD, dsgd.py) rests where decentralized SGD with a step of
lr / (1-b) would, whose distance from the optimum is 1/(1-b)² as large.

[Note: units] Kept is u = lr m, in units of weights, so that the code reads

    u = b u + (x - zbar) ;   x = x - u

m holds (x - W x) / lr, the disagreement of the replicas in units of gradients. When lr changes, m
must be rescaled by lr_old / lr_new, or the same disagreement would count as another; u = lr m needs
no rescaling, and an lr of 0 divides nothing. (torch's SGD keeps m: there a change of lr acts on the
past steps in the momentum too. With a constant lr there is no difference.)

[Note: complete graph] With w_ij = 1/n and replicas at one point, zbar is x - lr (mean g + lam x):
momentum SGD with data parallelism, up to rounding.

[Note: no Adam] Dividing by sqrt(v_i) after the exchange would scale x - W x too, and leave the
ellipse at once; dividing g_i before it gives every replica a metric of its own, and the replicas
settle where sum_i g_i / sqrt(v_i) = 0, which is not the optimum on any graph, the complete one
included. It would take a common v: another exchange of the same size.

Stability: wire/topology.py, [Note: ellipse]. Paper: DecentLaM, arXiv 2104.11981.
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


class DecentLaM(WireOptimizer):
    """Momentum SGD whose replicas talk to their neighbours in a graph, and to nobody else.

    Replicas stay close to each other but never equal: evaluate under `consensus()`, and call
    `finish()` at the end.

    Args:
        params: tensors or groups of them, as for any torch optimizer.
        lr: as in momentum SGD. The distance from the optimum grows with it, faster on graphs with
            a small spectral gap: lower it when the loss stalls above data parallelism's.
        momentum: b. Any below 1 is stable where weights are symmetric; elsewhere one that is not is
            refused, naming the largest that is.
        topology: who talks to whom: "ring", "torus", "exponential", "complete", "edges:0-1,1-2", or
            a graph from `thinwire.topology`. Denser when the loss falls behind data parallelism,
            sparser when the network does.
        weight_decay: lam, added to the gradient.
        codec: form in which weights travel: float32 by default; Dense(torch.bfloat16), Int8() or
            Int4() send what has changed since the last step in that form.
        clip: largest norm of a replica's own gradient. It is known only after the whole backward
            pass, so with it nothing leaves before: leave it out for overlap.
        bucket_mb: size of the buckets, in MB of float32; about four of 1 to 25 MB by default.
        overlap: send buckets during the backward pass. Then gradients must not be changed between
            backward and step (use clip=), and gradient accumulation needs `accumulating()`.
        buffers: the model's buffers (`model.buffers()`), if it has any that are learnt from data:
            `consensus()` and `finish()` average them too.
        group: a ProcessGroup or one dimension of a DeviceMesh; all ranks by default.
    """

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
        rule = MomentumRule(name, options.topology)
        for settings in self.session.groups:
            require_nonnegative(name, settings, "lr", "weight_decay")
            require_stable(name, settings["momentum"], options.topology)
            settings["momentum"] = float(settings["momentum"])
        self.engine = GossipEngine(
            self.session, rule, options, bucket_mb=bucket_mb, overlap=overlap
        )


class MomentumRule:
    """u = b u + (x - zbar) ;   x = x - u"""

    moments: Sequence[str] = ("velocity",)  # u

    def __init__(self, name: str, topology: Topology) -> None:
        self._name, self._topology = name, topology
        self._stable: set[float] = set()

    def require(self, groups: Sequence[dict[str, Any]]) -> None:
        for group in groups:  # a scheduler may have changed it
            if group["momentum"] not in self._stable:
                require_stable(self._name, group["momentum"], self._topology)
                self._stable.add(group["momentum"])

    def propose(self, bucket: NeighbourBucket) -> None:
        for z, x, group in bucket.tensors(bucket.buffer):
            z.mul_(-float(group["lr"])).add_(local_part(x))

    def absorb(self, bucket: NeighbourBucket, mixed: Tensor) -> None:
        velocities = bucket.views(bucket.moments["velocity"])
        for u, (zbar, x, group) in zip(velocities, bucket.tensors(mixed), strict=True):
            here = local_part(x)
            if x.grad is None:
                here.copy_(zbar)
                continue
            # x - zbar before u: added to x first, u would lose its last digits.
            u.mul_(group["momentum"]).add_(zbar.neg_().add_(here))
            here.sub_(u)


def require_stable(name: str, momentum: Any, graph: Topology) -> None:
    """Refuses a momentum outside the ellipse, naming the largest inside."""
    largest = graph.largest_momentum
    bound = "any below 1 is" if largest >= 1 else f"the largest stable one is {largest:g}"
    try:
        require_share(name, "momentum", momentum)
    except ValueError as error:
        raise ValueError(f"{error}; on {graph.describe()}, {bound}") from None
    if not graph.stable(momentum):
        raise ValueError(
            f"{name}(momentum={momentum:g}) is unstable on {graph.describe()}: an eigenvalue of "
            f"its weights lies outside the ellipse of that momentum; {bound}. Symmetric weights "
            "(from_edges) are stable with any below 1"
        )

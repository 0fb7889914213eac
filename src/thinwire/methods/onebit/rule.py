"""Rule: what a step of a one-bit method is, as functions on a bucket.

    payload      this rank's gradient is in the buffer; what is to be averaged takes its place
    learn        the mean is in the buffer: m (and v, in the warm-up) learn from it
    direct       m̂ / (sqrt(v̂) + eps)
    move         the weights take a step in these directions
    freeze       what a bucket needs for the compressed stage

Adam's are here; OneBitAdam and OneBitLamb change what is theirs. A rule sends nothing, with one
exception: norms of tensors that FSDP2 has spread over the ranks of a replica are summed up there.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.flat import local_part
from thinwire.methods.onebit.moments import MomentBucket
from thinwire.methods.onebit.progress import Progress
from thinwire.methods.shared.shards import Shards
from thinwire.optim.checks import require_betas, require_bool, require_nonnegative
from thinwire.wire.wire import Wire

State = dict[str, Any]


@dataclass(frozen=True)
class Learned:
    """What `learn` has found out that `move` needs."""

    ratios: Tensor | None = None
    """1-bit LAMB's, (L,): how far the variance of every tensor has gone since the freeze."""
    paces: Mapping[int, float] = field(default_factory=dict)
    """What directions still have to be multiplied by, by position of the tensor."""


class Rule:
    """`shards` are those of the parameters; `sharded` says that each rank keeps a part of m and v
    alone (sharded_moments.py)."""

    def __init__(self, progress: Progress, shards: Shards, *, sharded: bool) -> None:
        self.progress, self.shards, self.sharded = progress, shards, sharded

    @classmethod
    def check_group(cls, name: str, group: dict[str, Any]) -> None:
        """Of the parameters, before the rule is made."""
        require_nonnegative(name, group, "lr", "eps", "weight_decay")
        group["betas"] = require_betas(name, group["betas"])
        for key in ("compress", "bias_correction"):
            group[key] = require_bool(name, key, group[key])

    @property
    def equalises(self) -> bool:
        """Whether payloads of all tensors are brought to one size before they share a scale."""
        return self.sharded

    # -- sending ----------------------------------------------------------------------------------

    def payload(self, bucket: MomentBucket) -> None:
        for part, (b1, _) in bucket.runs(bucket.betas.__getitem__, resting=True):
            bucket.buffer[part].lerp_(bucket.m[part], b1)

    def own_direction(self, bucket: MomentBucket, mean: Tensor) -> Tensor:
        """The direction of an owner's part, from the mean gradient: see sharded_moments.py. It runs
        in a thread of the wire: what it changes is tentative."""
        m = bucket.m.clone()
        for part, (b1, _) in bucket.runs(bucket.betas.__getitem__, resting=True):
            m[part].lerp_(mean[part], 1 - b1)
        bucket.tentative["exp_avg"] = m
        return self.direct(bucket, m, mean, coming=1)

    # -- learning ---------------------------------------------------------------------------------

    def learn(self, bucket: MomentBucket) -> Learned:
        if self.progress.frozen(bucket):
            return self.learn_frozen(bucket)
        for part, (b1, b2) in bucket.runs(bucket.betas.__getitem__):
            g = bucket.mine[part]
            bucket.m[part].lerp_(g, 1 - b1)
            bucket.v[part].mul_(b2).addcmul_(g, g, value=1 - b2)
        return Learned()

    def learn_frozen(self, bucket: MomentBucket) -> Learned:
        """The mean of the payloads is in the buffer."""
        for part, _ in bucket.runs(lambda at: None):
            bucket.m[part] = bucket.buffer[part]
        return Learned()

    def learned_by_owners(self, buckets: Sequence[MomentBucket], wire: Wire) -> list[Learned]:
        """Of frozen buckets whose moments are sharded; a collective, if it is one."""
        return [Learned() for _ in buckets]

    def observe(self, norm: float) -> None:
        """The norm of the mean gradient of a dense step, after clipping."""

    # -- directions -------------------------------------------------------------------------------

    def direct_landed(self, bucket: MomentBucket, learned: Learned) -> Learned:
        """The directions into the buffer, right after m was learnt from it."""
        self.direct(bucket, bucket.m, bucket.mine)
        return learned

    def direct(self, bucket: MomentBucket, m: Tensor, out: Tensor, coming: int = 0) -> Tensor:
        """m̂ / (sqrt(v̂) + eps) of this rank's own values, the last step's or one to come: then it
        is not yet known which tensors rest."""
        if self.progress.frozen(bucket):
            return self._direct_frozen(bucket, m, out, coming)
        torch.sqrt(bucket.v, out=out)
        for part, (first, second, eps) in bucket.runs(
            lambda at: (
                self.correction(bucket, at),
                self.variance_correction(bucket, at),
                bucket.groups[at]["eps"],
            )
        ):
            root = out[part]
            if second != 1.0:
                root.div_(math.sqrt(second))
            root.add_(eps)
            torch.div(m[part], root, out=root).div_(first)
        return out

    def _direct_frozen(self, bucket: MomentBucket, m: Tensor, out: Tensor, coming: int) -> Tensor:
        zero, roots = out.new_zeros(()), bucket.roots()
        for part, first in bucket.runs(
            lambda at: self.correction(bucket, at, coming), resting=coming > 0
        ):
            torch.addcdiv(zero, m[part], roots[part], value=1 / first, out=out[part])
        return out

    def correction(self, bucket: MomentBucket, at: int, coming: int = 0) -> float:
        """What m of a tensor is divided by, at its last step or `coming` ones later."""
        steps = bucket.counts["step"][at] + coming
        return 1 - bucket.betas[at][0] ** steps if bucket.groups[at]["bias_correction"] else 1.0

    def variance_correction(self, bucket: MomentBucket, at: int) -> float:
        """What v of a tensor is divided by; a frozen one holds its correction."""
        steps = max(1, bucket.counts["step"][at])
        return 1 - bucket.betas[at][1] ** steps if bucket.groups[at]["bias_correction"] else 1.0

    # -- moving -----------------------------------------------------------------------------------

    def move(self, bucket: MomentBucket, directions: list[Tensor], learned: Learned) -> None:
        """Changes the weights of a bucket; `directions` may be overwritten."""
        raise NotImplementedError

    def used(self, bucket: MomentBucket) -> Iterable[tuple[int, Tensor, dict[str, Any]]]:
        """(position, what this rank has of the parameter, its group) of the tensors in use."""
        for at in bucket.used:
            yield at, local_part(bucket.parameters[at]), bucket.groups[at]

    def norms_of(self, tensors: Sequence[Tensor]) -> Tensor:
        """(L,), of which FSDP2 may have left this rank a part of each."""
        norms = torch.stack([torch.linalg.vector_norm(t.float()) for t in tensors])
        if not self.shards.several:
            return norms
        squares = self.shards.sum(norms.double().square().tolist())
        return torch.tensor(squares, device=norms.device).sqrt().to(norms.dtype)

    # -- the freeze -------------------------------------------------------------------------------

    def freeze(self, bucket: MomentBucket) -> None:
        """v has been frozen, and is above its floor."""

    # -- settings and state -----------------------------------------------------------------------

    def settings(self) -> State:
        """What must be the same on all ranks."""
        return {}

    def state(self) -> State:
        """What the rule keeps beside the buckets; the same on all ranks, JSON."""
        return {}

    def require(self, kept: State, compressed: bool) -> None:
        """Refuses a state whose buckets mean another thing; `compressed`: it was saved after the
        freeze, with whole moments."""

    def load_state(self, kept: State) -> None:
        pass

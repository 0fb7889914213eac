"""TwoStages: when 1-bit Adam and 1-bit LAMB send, skip, clip, freeze and move.

    warm-up      g = mean_i g_i, dense ;  the rule's own update of m, v and x
    freeze       v is kept from here on, lifted to a floor (floor.py)
    compressed   M = compressed mean of (b1 m + (1-b1) g_i) ;  the rule's update with v frozen

What a step is belongs to the rule (rule.py; one_bit_adam.py, one_bit_lamb.py). Groups with
compress=False stay in the first stage. The parts that combine are held:

    reducer      buckets, sent during the backward pass                 overlap/reducer.py
    route        one wire, or one inside a node and one between nodes   overlap/route.py
    placement    whole moments on every rank, or each rank a part of them     sharded_moments.py
    clipping     by a norm that no rank may know                        clipping.py
    delay        the step with the momentum of the step before          delayed_step.py
    store        moments and errors as a state_dict                     store.py

[Note: skipped steps] A NaN or an infinity on any rank makes the mean of its bucket one on all
ranks. All buckets have landed before anything is changed: a step is taken everywhere or nowhere.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.methods.engine import State
from thinwire.methods.onebit.clipping import Clipping
from thinwire.methods.onebit.delayed_step import DelayedStep
from thinwire.methods.onebit.floor import lift, sums_of
from thinwire.methods.onebit.freeze import FreezeRule
from thinwire.methods.onebit.mean_norm import MeanNorm
from thinwire.methods.onebit.moments import MomentBucket
from thinwire.methods.onebit.progress import Progress
from thinwire.methods.onebit.rule import Rule
from thinwire.methods.onebit.sharded_moments import Placement, ShardedMoments, WholeMoments
from thinwire.methods.onebit.stage_state import StageState
from thinwire.methods.onebit.store import MomentStore
from thinwire.methods.overlap.engine import Kept, ReducingEngine
from thinwire.methods.overlap.reducer import GradientReducer
from thinwire.methods.overlap.route import Direct, TwoLevels
from thinwire.methods.session import Session
from thinwire.methods.shared.shards import Shards
from thinwire.optim.checks import (
    require_bool,
    require_codec,
    require_count,
    require_group,
    require_positive,
    require_share,
)
from thinwire.wire.agreement import require_same, require_same_values
from thinwire.wire.codecs import Codec, Dense
from thinwire.wire.ranks import Group
from thinwire.wire.wire import Wire


@dataclass
class StageOptions:
    """What the one-bit methods are given in common; `OneBitAdam` explains it. Checked here."""

    name: str
    freeze_at: int | None
    floor: float
    clip: float | None
    dense: Codec | None
    bucket_mb: float | None
    overlap: bool
    inside: Group = None
    shard_state: bool = False
    delayed_step: bool = False

    def __post_init__(self) -> None:
        name = self.name
        if self.freeze_at is not None:
            self.freeze_at = require_count(name, "freeze_at", self.freeze_at)
        self.floor = require_share(name, "floor", self.floor)
        if self.clip is not None:
            self.clip = require_positive(name, "clip", self.clip)
        why = "the warm-up's errors end with it"
        require_codec(name, "dense", self.dense, memory=False, why=why)
        require_group(name, "inside", self.inside)
        self.shard_state = require_bool(name, "shard_state", self.shard_state)
        self.delayed_step = require_bool(name, "delayed_step", self.delayed_step)
        if self.shard_state:
            self._check_sharding()

    def _check_sharding(self) -> None:
        name = self.name
        if self.delayed_step:
            raise ValueError(
                f"{name}(shard_state=True, delayed_step=True): with shards directions travel, "
                "which leave no momentum to wait with; leave one of the two out"
            )
        if self.dense is not None and not isinstance(self.dense, Dense):
            raise ValueError(
                f"{name}(shard_state=True) sends directions in the form of `dense`, which must not "
                f"lose them: it takes Dense(...) there, got {self.dense!r}"
            )
        if self.inside is not None:
            raise ValueError(
                f"{name}(shard_state=True, inside=...): the state is spread over one group of "
                "ranks; leave one of the two out"
            )

    def shards_of(self, parameters: Sequence[Tensor]) -> Shards:
        """Of parameters that FSDP2 has spread over the ranks of a replica."""
        shards = Shards(parameters)
        if shards.several and (self.inside is not None or self.shard_state):
            raise ValueError(
                f"{self.name}: FSDP2 has spread the parameters over the ranks of a replica "
                f"already; leave {'inside=' if self.inside is not None else 'shard_state='} out, "
                "and give the replica dimension of the mesh as group="
            )
        return shards


class TwoStages(ReducingEngine[MomentBucket]):
    """The engine of `OneBitAdam` and `OneBitLamb`."""

    def __init__(
        self, session: Session, rule: Rule, progress: Progress, options: StageOptions
    ) -> None:
        super().__init__(session)
        self.rule, self.progress, self.options = rule, progress, options
        self._shards, wire = rule.shards, session.wire
        self.inside = None
        if options.inside is not None:
            self.inside = Wire(options.inside, name=f"{session.name} inside")
        self.route = Direct(wire) if self.inside is None else TwoLevels(self.inside, wire)
        self.reducer = GradientReducer(
            session,
            self,
            bucket_mb=options.bucket_mb,
            overlap=options.overlap,
            route=self.route,
        )
        self.placement: Placement = (
            ShardedMoments(wire, options.dense)
            if options.shard_state
            else WholeMoments(wire, options.dense, self._shards)
        )
        self.store = MomentStore(session, self.reducer, self.placement.parts)
        self.clipping = Clipping(session, self._shards, MeanNorm(wire, self.inside), options.clip)
        polls = options.delayed_step and self.inside is None
        self.delay = DelayedStep(
            session, self.reducer, rule, self.clipping, progress, polls_norm=polls
        )
        self._freezing = FreezeRule(max(g["betas"][1] for g in session.groups))
        self.saved = StageState(self)

    # -- a step -----------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> None:
        reducer, clipping = self.reducer, self.clipping
        reducer.require_usable_gradients()
        if not self.buckets:
            reducer.begin()
        clipping.factor = 1.0
        if self.progress.compressing:
            self.delay.measure()
        reducer.launch_rest()
        spread = 0.0 if self.progress.compressing else clipping.spread()
        if self.options.delayed_step and self.progress.compressing:
            self.delay.leave()
            return
        self.delay.stand()  # after a state that was saved with delayed steps
        if not reducer.land():
            self.session.account.skipped += 1
            clipping.grad_norm = math.nan
            return
        self.progress.count_step(self.buckets)
        if not self.progress.compressing:
            clipping.clip_mean(self.buckets, spread)
            self.rule.observe(clipping.clipped_norm)
        self._move()
        if not self.progress.compressing and self._due():
            self._freeze()

    def _move(self) -> None:
        """m, v and, into the buffers of all ranks, the directions; then the weights."""
        rule, frozen = self.rule, self.progress.frozen
        here = [bucket for bucket in self.buckets if self.placement.learns(frozen(bucket))]
        elsewhere = [bucket for bucket in self.buckets if bucket not in here]
        learned = [rule.direct_landed(bucket, rule.learn(bucket)) for bucket in here]
        self.placement.spread([bucket for bucket in here if not frozen(bucket)])
        learned += rule.learned_by_owners(elsewhere, self.wire)
        for bucket, known in zip([*here, *elsewhere], learned, strict=True):
            rule.move(bucket, bucket.views(bucket.buffer), known)

    # -- what the reducer asks --------------------------------------------------------------------

    def launch(self, bucket: MomentBucket) -> None:
        self.delay.arrive()
        bucket.take_betas()
        if self.delay.held is None:
            self.session.unscaled(bucket.take_gradients())
        else:
            bucket.take_gradients(self.delay.held)
        if self.clipping.factor != 1.0:
            bucket.buffer.mul_(self.clipping.factor)
        self.route.send(bucket, self._send)

    def _send(self, bucket: MomentBucket, part: Tensor) -> None:
        frozen, prepare = self.progress.frozen(bucket), self.delay.preparing(bucket)
        self.placement.send(bucket, part, self.rule, frozen=frozen, prepare=prepare)

    def may_overlap(self) -> bool:
        return self.overlap and not (self.progress.compressing and self.clipping.clip is not None)

    def agreed(self, finite: bool) -> bool:
        """Also finds the norm of the mean gradients."""
        dense = [bucket for bucket in self.buckets if not self.progress.frozen(bucket)]
        if self.progress.compressing and self.placement.decides_alone(dense):
            return self._shards.all(finite)
        finite, self.clipping.square = self.placement.verdict(finite, dense)
        return finite

    def make_buckets(self, order: Sequence[int], whole: bool = False) -> list[MomentBucket]:
        # Nothing waits for the last bucket of a delayed step: fewer ones disturb the compute less.
        count = 2 if self.options.delayed_step and self.progress.compressing else 4
        return self.store.make_buckets(order, whole, count)

    def admitting(self, indices: Sequence[int]) -> None:
        """After the freeze such a parameter stays dense: it has no variance to be frozen."""
        if not self.progress.compressing:
            return
        self.store.always_dense |= set(indices)
        warnings.warn(
            f"{self.name}: parameters {list(indices)} got their first gradient after "
            "the variance was frozen; their gradients travel dense from here on, as in a group "
            "with compress=False",
            stacklevel=4,
        )

    def held(self) -> Kept:
        """With shards, or nodes and delayed steps, a collective: all ranks get the same."""
        self.delay.arrive()
        if not self.options.shard_state:
            return self.store.whole_entries(None)
        wire = self.session.evaluation
        return self.store.whole_entries(lambda b, own: self.placement.whole(b, own, wire))

    def held_in_common(self) -> Kept:
        return self.held()

    def take_over(self, held: Kept) -> None:
        self.store.adopt(held)

    def rearranged(self) -> None:
        self.store.show()

    # -- the freeze -------------------------------------------------------------------------------

    def _due(self) -> bool:
        lr = max(float(group["lr"]) for group in self.session.groups)
        settled = self._freezing.observe(self.clipping.square, lr, self.progress.steps)
        freeze_at = self.options.freeze_at
        return settled if freeze_at is None else self.progress.steps >= freeze_at

    def _freeze(self) -> None:
        self.progress.frozen_at = self.progress.steps
        if self.options.delayed_step:  # it has larger buckets
            self.reducer.arrange([i for bucket in self.buckets for i in bucket.indices])
        for bucket in self.buckets:
            if bucket.compress:
                self._freeze_bucket(bucket)
        if self.options.delayed_step:
            self.delay.begin()
        self.store.show()

    def _freeze_bucket(self, bucket: MomentBucket) -> None:
        """The bias correction of this step stays in v."""
        rule = self.rule
        for part, second in bucket.runs(
            lambda at: rule.variance_correction(bucket, at), resting=True
        ):
            bucket.v[part].div_(second)
        sums, sizes = self.placement.totals(bucket, sums_of(bucket, bucket.v))
        floor = self.options.floor
        lift(bucket, bucket.v, floor, sums, sizes, by_tensor=rule.equalises)
        rule.freeze(bucket)

    def finish(self) -> None:
        self.delay.stand()
        warn_if_all_dense(self.name, self.options.freeze_at, self.progress)

    # -- the start, and state ---------------------------------------------------------------------

    def check_start(self) -> None:
        if self.inside is not None:
            weights = self.session.parameters
            require_same(self.inside, self.settings())
            require_same_values(self.inside, weights, "the weights at the first step")
        super().check_start()

    def settings(self) -> dict[str, Any]:
        options = self.options
        own = {
            "freeze_at": options.freeze_at,
            "floor": options.floor,
            "clip": self.clipping.clip,
            "dense": repr(options.dense),
            "shard_state": options.shard_state,
            "delayed_step": options.delayed_step,
        }
        return super().settings() | self.group_settings() | own | self.rule.settings()

    def kept(self) -> State:
        """What there is to save beside the moments; the same on all ranks, JSON."""
        own = {
            "frozen_at": self.progress.frozen_at,
            "latecomers": sorted(self.store.always_dense),
            "sharded": self.options.shard_state,
            "rule": self._freezing.state_dict(),
            "norms": self.clipping.norms.state_dict(),
        }
        return {"steps": self.progress.steps} | own | self.delay.state() | self.rule.state()

    def restore(self, kept: State) -> None:
        sharded, frozen = kept.get("sharded", False), kept["frozen_at"] is not None
        self.rule.require(kept, compressed=frozen and not self.options.shard_state)
        if frozen and sharded != self.options.shard_state:
            raise ValueError(
                f"{self.name}: the state was saved with shard_state={sharded} after the "
                "variance was frozen, when m and the errors mean another thing than with "
                f"shard_state={not sharded}; load it as it was saved"
            )
        self.progress.steps, self.progress.frozen_at = kept["steps"], kept["frozen_at"]
        self.store.always_dense = set(kept.get("latecomers", ()))
        self.clipping.factor = 1.0
        if isinstance(self.route, TwoLevels):
            self.route.forget()
        self.delay.load_state(kept)
        self._freezing.load_state_dict(kept["rule"])
        self.clipping.norms.load_state_dict(kept.get("norms", {"dense": []}))
        self.rule.load_state(kept)

    def state_dict(self) -> State:
        return self.saved.own()

    def portable_state_dict(self) -> State:
        return self.saved.portable()

    def load_state_dict(self, state: State) -> None:
        self.saved.load(state)


def warn_if_all_dense(name: str, freeze_at: int | None, progress: Progress) -> None:
    """At the end of a run."""
    if freeze_at is None or progress.compressing:
        return
    warnings.warn(
        f"{name}(freeze_at={freeze_at}): the run ended after {progress.steps} steps, all of them "
        "dense; set freeze_at below that, or leave it out",
        stacklevel=4,
    )

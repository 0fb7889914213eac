"""GossipEngine: when replicas send to their neighbours in a graph, and mix what they hear.

    g_i    = own gradient + lam x_i
    z_i    = what the rule proposes, from x_i and g_i
    zbar_i = sum_j w_ij z_j                          W: a `Topology`, neighbours alone
    x_i    = what the rule makes of zbar_i

A method is a rule (`MixingRule`): `propose` and `absorb`. z needs nothing but the gradients of its
own values, so a bucket leaves during the backward pass as soon as those are there. With a codec
only differences travel (differences.py).

[Note: not finite] No message reaches everybody within a step, so a step cannot be skipped
everywhere. A gradient that is not finite counts as zero instead: its replica mixes as ever and
counts a skipped step; the others never see it. With overlap that goes for each bucket by itself.

[Note: unused parameters] A replica that has no gradient for a parameter sends its weights as they
are, and leaves its momentum alone. So a layer that is frozen on all replicas stays where it is, and
one that differs between them goes on towards their mean. A parameter that is trained later than
from the first step on, once `requires_grad` is set, joins the buckets then: at the same step on all
replicas, for no message reaches everybody within a step.

[Note: learning rate] z holds lr g, and a bucket that leaves early takes the lr of that moment. An
lr that changes between the backward pass and step() is refused once a bucket has left.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from thinwire.errors import NonFinite
from thinwire.flat import Flat, local_part
from thinwire.methods.engine import State
from thinwire.methods.gossip.bucket import NeighbourBucket
from thinwire.methods.gossip.differences import MOMENTS, OLD_NAMES, Differences
from thinwire.methods.overlap.bucket import arrange
from thinwire.methods.overlap.engine import Kept, ReducingEngine
from thinwire.methods.overlap.reducer import GradientReducer
from thinwire.methods.overlap.saved_state import SavedState
from thinwire.methods.session import Session
from thinwire.methods.shared.consensus import mean_of_replicas
from thinwire.methods.shared.finite import finite_means
from thinwire.methods.shared.model_buffers import ModelBuffers
from thinwire.methods.shared.shards import Shards
from thinwire.optim.checks import (
    refusal,
    require_buffers,
    require_group,
    require_kind,
    require_positive,
)
from thinwire.wire import topology as topologies
from thinwire.wire.codecs import Codec, Dense, Int4, Int8
from thinwire.wire.flight import all_finite
from thinwire.wire.ranks import Group, group_size
from thinwire.wire.topology import Topology


class MixingRule(Protocol):
    """What a step of a decentralized method is."""

    moments: Sequence[str]
    """What the method keeps of every value."""

    def require(self, groups: Sequence[dict[str, Any]]) -> None:
        """Before every step: refuses settings that a scheduler should not have made."""

    def propose(self, bucket: NeighbourBucket) -> None:
        """The gradient is in the bucket's buffer; z takes its place."""

    def absorb(self, bucket: NeighbourBucket, mixed: Tensor) -> None:
        """Moves the parameters, given zbar."""


class GossipOptions:
    """What the decentralized methods are given in common; `DecentLaM` explains it."""

    def __init__(
        self,
        name: str,
        topology: str | Topology,
        codec: Codec | None,
        clip: float | None,
        buffers: Iterable[Tensor],
        group: Group,
    ) -> None:
        require_group(name, "group", group)
        self.buffers = require_buffers(name, buffers)
        self.topology = find_topology(name, topology, group_size(group))
        self.clip = None if clip is None else require_positive(name, "clip", clip)
        if codec is not None and not isinstance(codec, Dense | Int8 | Int4):
            wants = "Dense(), Int8() or Int4(), which keep most of a value and have no memory"
            raise refusal(name, "codec", wants, codec)
        self.codec = codec


class GossipEngine(ReducingEngine[NeighbourBucket]):
    """The engine of `DecentLaM`, `DSGD` and `DmSGD`."""

    def __init__(
        self,
        session: Session,
        rule: MixingRule,
        options: GossipOptions,
        *,
        bucket_mb: float | None,
        overlap: bool,
    ) -> None:
        super().__init__(session)
        self.rule, self.topology, self.codec = rule, options.topology, options.codec
        self.clip = options.clip
        self._groups = session.group_of_each()
        self.neighbours, self._weights = self.topology.neighbours(session.wire.rank)
        self._differences = (
            None if options.codec is None else Differences(options.codec, self._weights)
        )
        # Nobody is asked which parameters are used: see [Note: unused parameters].
        self.reducer = GradientReducer(
            session, self, bucket_mb=bucket_mb, overlap=overlap, asks_usage=False
        )
        self._saved = SavedState(session, self.reducer)
        self._shards = Shards(session.parameters)
        self.model_buffers = ModelBuffers(options.buffers, session.wire)
        self.grad_norm = math.nan
        """Of this replica's gradient at the last step, before clipping."""
        self._factor = 1.0  # on the gradients of this step
        self._usable = True  # whether the whole of them is
        self._dropped = False  # whether any bucket of this step went without its gradient
        self._lrs: list[float] = []  # with which buckets have left early

    # -- a step -----------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> None:
        self.rule.require(self.session.groups)
        self.reducer.require_usable_gradients()
        if not self.buckets:
            self.reducer.begin()
        self._require_same_lr()
        self._measure()
        self.reducer.launch_rest()
        self._join_unfrozen()
        for bucket in self.buckets:
            self.rule.absorb(bucket, self._heard(bucket))
        if self._dropped:
            self.session.account.skipped += 1
        self._factor, self._usable, self._dropped = 1.0, True, False

    def _join_unfrozen(self) -> None:
        parameters, place = self.session.parameters, self.reducer.place
        new = [i for i, p in enumerate(parameters) if i not in place and _trained(p)]
        if not new:
            return
        everywhere = [json.loads(t) for t in self.wire.gather_bytes(json.dumps(new).encode())]
        if any(other != new for other in everywhere):
            raise RuntimeError(
                f"{self.name}: parameters {new} are trained here for the first time, on "
                f"other ranks {everywhere}; unfreeze the same ones at the same step everywhere"
            )
        self.reducer.admit(new)

    def launch(self, bucket: NeighbourBucket) -> None:
        if self.reducer.launched == 0:
            self._lrs = self._learning_rates()
        self._take_gradient(bucket)
        self.rule.propose(bucket)
        if not all_finite(bucket.buffer):
            raise NonFinite(
                f"{self.name}: the weights of rank {self.wire.world.rank} are no longer "
                "finite, and would spread to its neighbours; lower lr, or clip"
            )
        if self._differences is not None:
            self._differences.encode(bucket)
        bucket.flight = self.wire.exchange(
            bucket.buffer, self.neighbours, self._weights, codec=self.codec
        )

    def _take_gradient(self, bucket: NeighbourBucket) -> None:
        """Into the buffer, with decay; zeros where it cannot be used, see [Note: not finite]."""
        g = self.session.unscaled(bucket.take_gradients())
        if not self._usable or not all_finite(g):
            g.zero_()
            self._dropped = True
            return
        if self._factor != 1.0:
            g.mul_(self._factor)
        for view, x, group in bucket.tensors(g):
            if x.grad is not None and group["weight_decay"]:
                view.add_(local_part(x), alpha=group["weight_decay"])

    def _heard(self, bucket: NeighbourBucket) -> Tensor:
        """zbar, once the neighbours' part of it has landed."""
        assert bucket.flight is not None
        heard = bucket.flight.wait()
        bucket.flight = None
        return heard if self._differences is None else self._differences.mixed(bucket, heard)

    def may_overlap(self) -> bool:
        return self.overlap and self.clip is None

    def _measure(self) -> None:
        """The norm of this replica's gradient, and what it asks for where nothing has left."""
        scale = 1.0 if self.session.scale is None else float(self.session.scale)
        norms = [
            torch.linalg.vector_norm(local_part(p.grad).float())
            for p in self.session.parameters
            if p.grad is not None
        ]
        self.grad_norm = self._shards.norm(torch.stack(norms)) / scale if norms else 0.0
        self._usable = math.isfinite(self.grad_norm) and not self.session.overflow
        if self.clip is not None and self.clip < self.grad_norm < math.inf:
            self._factor = self.clip / self.grad_norm

    def _learning_rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.session.groups]

    def _require_same_lr(self) -> None:
        if self.reducer.launched and self._lrs != self._learning_rates():
            raise RuntimeError(
                f"{self.name}: lr was changed from {self._lrs} to "
                f"{self._learning_rates()} after weights had been sent with it during the backward "
                "pass; change it after step(), as a scheduler does, or build with overlap=False"
            )

    # -- the mean of the replicas -----------------------------------------------------------------

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, the model holds the mean of the replicas' weights and buffers."""
        wire = self.session.evaluation
        own = self.model_buffers.swap_in_mean(wire)
        try:
            with mean_of_replicas(wire, self.session.parameters, self._shards):
                yield
        finally:
            self.model_buffers.restore(own)

    @torch.no_grad()
    def finish(self) -> None:
        """Makes the replicas equal."""
        self._meet()
        self.model_buffers.finish()

    def _meet(self) -> None:
        """All replicas go to their mean; a collective."""
        parameters = self.session.parameters
        flat = Flat(parameters)
        values = flat.pack(parameters, flat.new())
        (mean,) = finite_means(self.wire, [values], self._shards, self.name)
        flat.unpack(mean, parameters)
        if self._differences is not None:
            for bucket in self.buckets:
                self._differences.begin(bucket)

    # -- what the reducer asks --------------------------------------------------------------------

    def used_at_first(self) -> list[bool]:
        return [_trained(p) for p in self.session.parameters]

    def make_buckets(self, order: Sequence[int], whole: bool = False) -> list[NeighbourBucket]:
        parameters = self.session.parameters
        kinds = [Flat([p]).dtype for p in parameters]
        size = math.inf if whole else self.reducer.bucket_mb
        members = arrange(order, parameters, kinds, size)
        buckets = [NeighbourBucket(m, parameters, self._groups) for m in members]
        for bucket in buckets:
            for name in self.rule.moments:
                bucket.new_moment(name)
            if self._differences is not None:
                for name in MOMENTS:
                    bucket.new_moment(name)
                self._differences.begin(bucket)
        return buckets

    def rearranged(self) -> None:
        for index, entries in self._entries().items():
            self.session.state[self.session.parameters[index]] = entries

    def settings(self) -> dict[str, Any]:
        own = {"codec": repr(self.codec), "clip": self.clip, "weights": self._graph()}
        return super().settings() | self.group_settings() | own

    def _graph(self) -> str:
        return str(self.topology.matrix.tolist())

    # -- state ------------------------------------------------------------------------------------

    def _entries(self) -> Kept:
        return {i: held for bucket in self.buckets for i, held in bucket.entries().items()}

    def state_dict(self) -> State:
        """This replica's own, weights excepted: goes on bit for bit on the same graph."""
        graph = {"ranks": self.wire.size, "weights": self._graph(), "codec": repr(self.codec)}
        return self._saved.describe(self._entries(), graph)

    def portable_state_dict(self) -> State:
        """Replicas differ, and so do their states: any of them loads on any graph."""
        return self.state_dict()

    @torch.no_grad()
    def load_state_dict(self, state: State) -> None:
        """Takes the state of a replica on any graph; load the model's weights first.

        On a graph of another size, or with a codec on any other graph, the replicas meet at the
        mean of their weights and moments: then all of them must load at the same time.
        """
        self._saved.check(state)
        for index, entries in sorted(state["state"].items(), key=lambda item: int(item[0])):
            wanted = local_part(self.session.parameters[int(index)]).shape
            for value in entries.values():
                self._saved.check_shape(int(index), value.shape, wanted)
        self.reducer.abandon()
        self._saved.load(state)
        kept = self._entries()
        for index, entries in state["state"].items():
            for name, value in entries.items():
                here = kept[int(index)].get(OLD_NAMES.get(name, name))
                if here is not None:
                    here.copy_(value)
        self.session.checked = True  # replicas of a resumed run differ, rightly
        saved = state["method"]
        same = saved["weights"] == self._graph() and saved["codec"] == repr(self.codec)
        if not same and (saved["ranks"] != self.wire.size or self.codec is not None):
            self._rejoin()

    def _rejoin(self) -> None:
        for bucket in self.buckets:
            for name, moment in bucket.moments.items():
                if name not in MOMENTS:
                    moment.copy_(self.wire.mean(moment.clone()).wait())
        self._meet()


def _trained(parameter: Tensor) -> bool:
    return parameter.numel() > 0 and (parameter.requires_grad or parameter.grad is not None)


def find_topology(name: str, topology: str | Topology, size: int) -> Topology:
    """The graph that was asked for, if it has as many ranks as the group."""
    if isinstance(topology, str):
        try:
            return topologies.parse(topology, size)
        except ValueError as error:
            raise ValueError(f"{name}(topology={topology!r}): {error}") from None
    require_kind(name, "topology", topology, Topology, "a name such as 'ring' or a Topology")
    if topology.size != size:
        raise ValueError(
            f"{name}(topology=...): {topology.name} has {topology.size} ranks and the group "
            f"{size}; make it for {size}, or name it ('ring') and it is made for the group"
        )
    return topology

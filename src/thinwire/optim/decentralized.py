"""DecentralizedOptimizer: what the methods share whose replicas talk to graph neighbours alone.

    g_i    = own gradient + lam x_i
    z_i    = what the method proposes, from x_i and g_i
    zbar_i = sum_j w_ij z_j                          W: a `Topology`, neighbours alone
    x_i    = what the method makes of zbar_i

A method is `_propose` and `_absorb`. z needs nothing but the gradients of its own values, so a
bucket leaves during the backward pass as soon as those are there.

[Note: codecs] Most of a z is a weight that was sent a step ago. Rounding it anew every time would
draw every weight to the codec's nearest grid point, harder than the gradient draws it anywhere. So
the neighbours keep what they have heard, and only news travels:

    q_i = C[z_i - h_i] ; h_i = h_i + q_i ; s_i = s_i + sum_j w_ij (q_j - q_i) ; zbar_i = z_i + s_i

h_i is what i has told, s_i = sum_j w_ij (h_j - h_i); all start at one point, h_i = x, s_i = 0. Rows
and columns of W sum to 1, hence sum_i s_i = 0: what the codec loses never moves the mean of the
replicas. It costs two buffers, and one while the transfer lasts. C must keep most of its input:
with one bit a value this diverges (measured), so only Dense, Int8 and Int4 are taken.

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
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.errors import NonFinite
from thinwire.optim.buckets import Bucket, arrange
from thinwire.optim.checks import (
    refusal,
    require_buffers,
    require_group,
    require_kind,
    require_nonnegative,
    require_positive,
)
from thinwire.optim.consensus import mean_of_replicas
from thinwire.optim.departures import Departures, State
from thinwire.optim.finite import finite_means
from thinwire.optim.flat import Flat, local_part
from thinwire.optim.shards import Shards
from thinwire.optim.travelling_buffers import TravellingBuffers
from thinwire.wire import topology as topologies
from thinwire.wire.codecs import Codec, Dense, Int4, Int8
from thinwire.wire.flight import all_finite
from thinwire.wire.topology import Topology
from thinwire.wire.wire import Group, group_size


class NeighbourBucket(Bucket):
    """
    moments  (N,)    what the method keeps; with a codec also h ("told") and s ("apart")
    proposed (N,)    z, while its news travel
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

    def entries(self) -> dict[int, dict[str, Tensor]]:
        """What is kept for every parameter, by name; it shares the bucket's memory."""
        held = {name: self.views(flat) for name, flat in self.moments.items()}
        return {
            index: {name: views[at] for name, views in held.items()}
            for at, index in enumerate(self.indices)
        }


class NeighbourSettings(TypedDict, total=False):
    """What the decentralized methods have in common. See `DecentLaM`, which explains them."""

    topology: str | Topology
    codec: Codec | None
    clip: float | None
    bucket_mb: float | None
    overlap: bool
    buffers: Iterable[Tensor]
    group: Group


class DecentralizedOptimizer(Departures[NeighbourBucket]):
    """See `DecentLaM` for the settings."""

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        topology: str | Topology = "ring",
        codec: Codec | None = None,
        clip: float | None = None,
        bucket_mb: float | None = None,
        overlap: bool = True,
        buffers: Iterable[Tensor] = (),
        group: Group = None,
    ) -> None:
        name = type(self).__name__
        require_group(name, "group", group)
        buffers = require_buffers(name, buffers)
        self.topology = find_topology(name, topology, group_size(group))
        if clip is not None:
            clip = require_positive(name, "clip", clip)
        if codec is not None and not isinstance(codec, Dense | Int8 | Int4):
            wants = "Dense(), Int8() or Int4(), which keep most of a value and have no memory"
            raise refusal(name, "codec", wants, codec)
        self.codec, self.clip = codec, clip
        super().__init__(params, defaults, group=group, name=name)
        for settings in self.param_groups:
            self._check_group(name, settings)
        self._groups = [g for g in self.param_groups for _ in g["params"]]
        self._prepare(bucket_mb, overlap)
        self.neighbours, self._weights = self.topology.neighbours(self.wire.rank)
        self._shards = Shards(self._parameters)
        self._buffers = TravellingBuffers(buffers, self.wire)
        self.grad_norm = math.nan
        """Of this replica's gradient at the last step, before clipping."""
        self._factor = 1.0  # on the gradients of this step
        self._usable = True  # whether the whole of them is
        self._dropped = False  # whether any bucket of this step went without its gradient
        self._lrs: list[float] = []  # with which buckets have left early

    # -- what a method defines --------------------------------------------------------------------

    def _propose(self, bucket: NeighbourBucket) -> None:
        """The gradient is in the bucket's buffer; z takes its place."""
        raise NotImplementedError

    def _absorb(self, bucket: NeighbourBucket, mixed: Tensor) -> None:
        """Moves the parameters, given zbar."""
        raise NotImplementedError

    def _check_group(self, name: str, group: dict[str, Any]) -> None:
        require_nonnegative(name, group, "lr", "weight_decay")

    def _new_moments(self, bucket: NeighbourBucket) -> None:
        """What the method keeps of every value."""

    # -- a step -----------------------------------------------------------------------------------

    @torch.no_grad()
    def _step(self) -> None:
        self._require_usable_gradients()
        if not self.buckets:
            self._begin()
        self._require_same_lr()
        self._measure()
        self._launch_rest()
        self._join_unfrozen()
        for bucket in self.buckets:
            self._absorb(bucket, self._heard(bucket))
        if self._dropped:
            self.account.skipped += 1
        self._factor, self._usable, self._dropped = 1.0, True, False

    def _ask_usage(self) -> None:
        """Nobody is asked: see [Note: unused parameters]."""

    def _join_unfrozen(self) -> None:
        new = [i for i, p in enumerate(self._parameters) if i not in self._place and _trained(p)]
        if not new:
            return
        everywhere = [json.loads(t) for t in self.wire.gather_bytes(json.dumps(new).encode())]
        if any(other != new for other in everywhere):
            raise RuntimeError(
                f"{type(self).__name__}: parameters {new} are trained here for the first time, on "
                f"other ranks {everywhere}; unfreeze the same ones at the same step everywhere"
            )
        self._admit(new)

    def _launch(self, bucket: NeighbourBucket) -> None:
        if self._launched == 0:
            self._lrs = self._learning_rates()
        self._take_gradient(bucket)
        self._propose(bucket)
        if not all_finite(bucket.buffer):
            raise NonFinite(
                f"{type(self).__name__}: the weights of rank {self.wire.world.rank} are no longer "
                "finite, and would spread to its neighbours; lower lr, or clip"
            )
        if self.codec is not None:
            self._tell(bucket)
        bucket.flight = self.wire.exchange(
            bucket.buffer, self.neighbours, self._weights, codec=self.codec
        )

    def _take_gradient(self, bucket: NeighbourBucket) -> None:
        """Into the buffer, with decay; zeros where it cannot be used, see [Note: not finite]."""
        g = self._unscaled(bucket.take_gradients())
        if not self._usable or not all_finite(g):
            g.zero_()
            self._dropped = True
            return
        if self._factor != 1.0:
            g.mul_(self._factor)
        for view, x, group in self._tensors(bucket, g):
            if x.grad is not None and group["weight_decay"]:
                view.add_(local_part(x), alpha=group["weight_decay"])

    def _tell(self, bucket: NeighbourBucket) -> None:
        """z gives way to the news in it; all of s but what the neighbours have to say."""
        assert self.codec is not None
        told, apart = bucket.moments["told"], bucket.moments["apart"]  # h and s
        bucket.proposed = bucket.buffer.clone()
        news = bucket.buffer.sub_(told)
        part = self.codec.part(news.numel(), 1)
        q = torch.empty_like(news)
        self.codec.decode(self.codec.encode(news, 1, part), part, q)
        told.add_(q)
        # `exchange` returns news + sum_j w_ij (q_j - news).
        given = sum(self._weights)
        apart.add_(news, alpha=given - 1).add_(q, alpha=-given)

    def _heard(self, bucket: NeighbourBucket) -> Tensor:
        """zbar, once the neighbours' part of it has landed."""
        assert bucket.flight is not None
        mixed = bucket.flight.wait()
        bucket.flight = None
        if self.codec is None:
            return mixed
        apart = bucket.moments["apart"].add_(mixed)
        assert bucket.proposed is not None
        zbar, bucket.proposed = bucket.proposed.add_(apart), None
        return zbar

    def _overlaps(self) -> bool:
        return self.overlap and self.clip is None

    def _measure(self) -> None:
        """The norm of this replica's gradient, and what it asks for where nothing has left."""
        scale = 1.0 if self._scale is None else float(self._scale)
        norms = [
            torch.linalg.vector_norm(local_part(p.grad).float())
            for p in self._parameters
            if p.grad is not None
        ]
        self.grad_norm = self._shards.norm(torch.stack(norms)) / scale if norms else 0.0
        found_inf = getattr(self, "found_inf", None)
        overflow = found_inf is not None and float(found_inf) > 0
        self._usable = math.isfinite(self.grad_norm) and not overflow
        if self.clip is not None and self.clip < self.grad_norm < math.inf:
            self._factor = self.clip / self.grad_norm

    def _tensors(
        self, bucket: NeighbourBucket, flat: Tensor
    ) -> Iterable[tuple[Tensor, Tensor, dict[str, Any]]]:
        """(part of `flat`, parameter, its group) of every tensor."""
        return zip(bucket.views(flat), bucket.parameters, bucket.groups, strict=True)

    def _learning_rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.param_groups]

    def _require_same_lr(self) -> None:
        if self._launched and self._lrs != self._learning_rates():
            raise RuntimeError(
                f"{type(self).__name__}: lr was changed from {self._lrs} to "
                f"{self._learning_rates()} after weights had been sent with it during the backward "
                "pass; change it after step(), as a scheduler does, or build with overlap=False"
            )

    # -- meeting ----------------------------------------------------------------------------------

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, the model holds the mean of the replicas' weights and buffers."""
        own = self._buffers.swap_in_mean(self.meeting)
        try:
            with mean_of_replicas(self.meeting, self._parameters, self._shards):
                yield
        finally:
            self._buffers.restore(own)

    @torch.no_grad()
    def finish(self) -> None:
        """Makes the replicas equal."""
        self._meet()
        self._buffers.finish()

    def _meet(self) -> None:
        """All replicas go to their mean; a collective."""
        flat = Flat(self._parameters)
        values = flat.pack(self._parameters, flat.new())
        (mean,) = finite_means(self.wire, [values], self._shards, type(self).__name__)
        flat.unpack(mean, self._parameters)
        for bucket in self.buckets:
            self._agree_on_start_of(bucket)

    # -- the start --------------------------------------------------------------------------------

    def _agree_on_start(self, order: str, used: list[float]) -> tuple[str, list[float]]:
        trained = [float(_trained(p)) for p in self._parameters]
        return super()._agree_on_start(order, trained)

    def _make_buckets(self, order: Sequence[int], whole: bool = False) -> list[NeighbourBucket]:
        kinds = [Flat([p]).dtype for p in self._parameters]
        size = math.inf if whole else self.bucket_mb
        members = arrange(order, self._parameters, kinds, size)
        buckets = [NeighbourBucket(m, self._parameters, self._groups) for m in members]
        for bucket in buckets:
            self._new_moments(bucket)
            if self.codec is not None:
                for name in ("told", "apart"):
                    bucket.new_moment(name)
                self._agree_on_start_of(bucket)
        return buckets

    def _agree_on_start_of(self, bucket: NeighbourBucket) -> None:
        """All replicas are at one point: everybody knows what everybody would have told."""
        if self.codec is not None:
            bucket.flat.pack(bucket.parameters, bucket.moments["told"])
            bucket.moments["apart"].zero_()

    def _set_buckets(self, buckets: Sequence[NeighbourBucket]) -> None:
        super()._set_buckets(buckets)
        for index, entries in self._entries().items():
            self.state[self._parameters[index]] = entries

    def _settings(self) -> dict[str, Any]:
        own = {"codec": repr(self.codec), "clip": self.clip, "weights": self._graph()}
        return super()._settings() | self._group_settings() | own

    def _graph(self) -> str:
        return str(self.topology.matrix.tolist())

    # -- state ------------------------------------------------------------------------------------

    def _entries(self) -> dict[int, dict[str, Tensor]]:
        return {i: held for bucket in self.buckets for i, held in bucket.entries().items()}

    def state_dict(self) -> State:
        """This replica's own, weights excepted: goes on bit for bit on the same graph."""
        graph = {"ranks": self.wire.size, "weights": self._graph(), "codec": repr(self.codec)}
        return self._described(self._entries(), graph)

    @torch.no_grad()
    def load_state_dict(self, state_dict: State) -> None:
        """Takes the state of a replica on any graph; load the model's weights first.

        On a graph of another size, or with a codec on any other graph, the replicas meet at the
        mean of their weights and moments: then all of them must load at the same time.
        """
        self._check_described(state_dict)
        for index, entries in sorted(state_dict["state"].items(), key=lambda item: int(item[0])):
            wanted = local_part(self._parameters[int(index)]).shape
            for value in entries.values():
                self._check_shape(int(index), value.shape, wanted)
        self._abandon()
        self._load_described(state_dict)
        kept = self._entries()
        for index, entries in state_dict["state"].items():
            for name, value in entries.items():
                if name in kept[int(index)]:
                    kept[int(index)][name].copy_(value)
        self._checked = True  # replicas of a resumed run differ, rightly
        saved = state_dict["method"]
        same = saved["weights"] == self._graph() and saved["codec"] == repr(self.codec)
        if not same and (saved["ranks"] != self.wire.size or self.codec is not None):
            self._rejoin()

    def _rejoin(self) -> None:
        for bucket in self.buckets:
            for name, moment in bucket.moments.items():
                if name not in ("told", "apart"):
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

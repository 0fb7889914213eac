"""RunningStatistics: what a model learns from data without a gradient (BatchNorm's mean, variance).

Every replica's follow its own share of the data. The model to evaluate, to export and to end with
has their mean. (DistributedDataParallel by itself sends those of the first replica to all others
before every forward pass, and evaluates with them.)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.methods.shared.model_buffers import ModelBuffers
from thinwire.wire.evaluation import EvaluationWire
from thinwire.wire.ranks import Group
from thinwire.wire.wire import Wire


class RunningStatistics:
    """Those of one replica. They meet on a wire of their own, for evaluation is no part of what a
    method costs; it is made when it is first needed, so that others cost nothing."""

    def __init__(self, model: nn.Module, group: Group) -> None:
        self._named = {n: b for n, b in model.named_buffers() if b.is_floating_point()}
        self._group = group
        self._made: tuple[Wire, ModelBuffers] | None = None

    def _meet(self) -> tuple[Wire, ModelBuffers]:
        if self._made is None:
            wire = EvaluationWire(self._group, name="statistics")
            self._made = wire, ModelBuffers(self._named.values(), wire)
        return self._made

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, the model has the mean of the replicas'."""
        if not self._named:
            yield
            return
        wire, buffers = self._meet()
        with torch.no_grad():
            own = buffers.swap_in_mean(wire)
        try:
            yield
        finally:
            with torch.no_grad():
                buffers.restore(own)

    @torch.no_grad()
    def settle(self) -> None:
        """Every replica takes over the mean."""
        if self._named:
            wire, buffers = self._meet()
            buffers.swap_in_mean(wire)

    def means(self) -> dict[str, Tensor]:
        """The mean of the replicas', by name in the model's state; all of them call it."""
        with self.consensus():
            return {name: buffer.clone() for name, buffer in self._named.items()}

    def state(self) -> dict[str, Any]:
        """This replica's own."""
        return {"statistics": dict(self._named)} if self._named else {}

    @torch.no_grad()
    def load_state(self, state: dict[str, Any]) -> None:
        """What `state` gave. Another number of replicas goes on from the means instead, which the
        model's state has."""
        for name, value in state.get("statistics", {}).items():
            self._named[name].copy_(value)

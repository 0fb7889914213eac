"""GradientAverage: data parallelism with a codec.

    g = mean_i C[g_i] ;   x = Inner(x, g)

Every step, in the caller's own optimizer, with the gradients of all replicas averaged in whatever
form the codec gives them. With the dense float32 codec this is plain data parallelism. All replicas
apply the same bits, so they stay equal. A step in which any replica's gradient is not finite is
skipped on all of them and counted.
"""

from typing import Any

import torch
from torch import Tensor

from thinwire.optim.base import WireOptimizer
from thinwire.optim.flat import Flat
from thinwire.wire.codecs import Codec, Dense, ErrorFeedback
from thinwire.wire.wire import Group


class GradientAverage(WireOptimizer):
    """Averages gradients over the replicas before each step of `inner`.

    Args:
        inner: any torch optimizer over the model's parameters.
        codec: the form in which gradients travel. Change it when `account.exposed` is a large share
            of the run: Int8() first, then ErrorFeedback(Int4()).
        group: a ProcessGroup or one dimension of a DeviceMesh; all ranks by default.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        *,
        codec: Codec | ErrorFeedback | None = None,
        group: Group = None,
    ) -> None:
        super().__init__(inner, group=group, name="GradientAverage")
        self.codec = codec or Dense()
        self._trained = [p for p in self._parameters if p.requires_grad]
        self._flat = Flat(self._trained)
        self._buffer: Tensor | None = None
        self._ahead = False  # the averaged gradients are already in place

    @torch.no_grad()
    def average(self) -> bool:
        """Averages the gradients now, for callers that clip or look at them before `step()`.

        Returns whether they are finite on every replica; `step()` skips if they are not.
        """
        if self._buffer is None:
            self._buffer = self._flat.new()
        gradients = [p.grad for p in self._trained]
        self._flat.pack(gradients, self._buffer)
        flight = self.wire.mean(self._unscaled(self._buffer), self.codec)
        mean = flight.wait()
        self._finite = flight.finite
        if self._finite:
            for parameter, view in zip(self._trained, self._flat.views(mean), strict=True):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad.copy_(view)
        self._ahead = True
        return self._finite

    def _step(self) -> None:
        if not self._ahead:
            self.average()
        self._ahead = False
        if self._finite:
            self.inner.step()
        else:
            self.account.skipped += 1

    def method_state(self) -> dict[str, Any]:
        if isinstance(self.codec, ErrorFeedback):
            return {"error": self.codec.state_dict()}
        return {}

    def load_method_state(self, state: dict[str, Any]) -> None:
        if isinstance(self.codec, ErrorFeedback) and "error" in state:
            self.codec.load_state_dict(state["error"])

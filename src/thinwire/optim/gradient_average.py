"""GradientAverage: data parallelism with a codec.

    g = mean_i C[g_i] ;   x = Inner(x, g)

Every step, in the caller's own optimizer, with the gradients of all replicas averaged in whatever
form the codec gives them. With the dense float32 codec this is plain data parallelism. All replicas
apply the same bits, so they stay equal. A step in which any replica's gradient is not finite is
skipped on all of them and counted.

[Note: parameters without gradients] A parameter whose gradient is None on some replicas counts as
zero there. One that has none on any replica must keep none, for to the inner optimizer a gradient
of zero is not the same (weight decay, moments). The replicas agree on those at the first step; such
a parameter is left alone until a mean arrives for it that is not zero.
"""

from typing import Any

import torch
from torch import Tensor

from thinwire.optim.base import WrappingOptimizer
from thinwire.optim.flat import Flat, local_part
from thinwire.wire.codecs import Codec, Dense, ErrorFeedback
from thinwire.wire.wire import Group


class GradientAverage(WrappingOptimizer):
    """Averages gradients over the replicas before each step of `inner`.

    With GradScaler, call `scaler.unscale_(optimizer)` before `average()`; `scaler.step(optimizer)`
    alone needs nothing.

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
        if codec is not None and not isinstance(codec, Codec | ErrorFeedback):
            raise ValueError(f"codec takes a thinwire codec such as Int8(), got {codec!r}")
        super().__init__(inner, group=group, name="GradientAverage")
        self._trained = [p for p in self._parameters if p.requires_grad]
        self._flat = Flat(self._trained)
        self.codec = codec or Dense(self._flat.dtype)
        self._buffer: Tensor | None = None
        self._ahead = False  # the averaged gradients are already in place
        self._idle: set[int] | None = None  # see [Note: parameters without gradients]

    @torch.no_grad()
    def average(self) -> bool:
        """Averages the gradients now, for callers that clip or look at them before `step()`.

        Returns whether they are finite on every replica; `step()` skips if they are not.
        """
        self._require_same_start()
        if self._buffer is None:
            self._buffer = self._flat.new()
        gradients = [p.grad for p in self._trained]
        if self._idle is None:
            used = self.wire.agree([float(g is not None) for g in gradients])
            self._idle = {index for index, flag in enumerate(used) if not flag}
        self._flat.pack(gradients, self._buffer)
        flight = self.wire.mean(self._unscaled(self._buffer), self.codec)
        mean = flight.wait()
        self._finite = flight.finite
        if self._finite:
            self._hand_over(self._flat.views(mean))
        self._ahead = True
        return self._finite

    def _hand_over(self, means: list[Tensor]) -> None:
        """The averaged gradients to the parameters."""
        assert self._idle is not None
        self._idle = {index for index in self._idle if not means[index].any()}
        for index, (parameter, mean) in enumerate(zip(self._trained, means, strict=True)):
            if index in self._idle:
                parameter.grad = None
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            local_part(parameter.grad).copy_(mean)

    def _step(self) -> None:
        if not self._ahead:
            self.average()
        elif self._scale is not None:
            self._ahead = False
            raise RuntimeError(
                "the gradients were averaged while GradScaler's scale was still in them; call "
                "scaler.unscale_(optimizer) before optimizer.average()"
            )
        self._ahead = False
        if self._finite:
            self.inner.step()
        else:
            self.account.skipped += 1

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "codec": repr(self.codec)}

    def method_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        if self._idle is not None:
            state["idle"] = sorted(self._idle)
        if isinstance(self.codec, ErrorFeedback):
            state["error"] = self.codec.state_dict()
        return state

    def load_method_state(self, state: dict[str, Any]) -> None:
        self._idle = set(state["idle"]) if "idle" in state else None
        self._ahead = False
        if isinstance(self.codec, ErrorFeedback) and "error" in state:
            self.codec.load_state_dict(state["error"])

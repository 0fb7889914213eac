"""WireOptimizer: what every method shares.

A method wraps an inner torch optimizer and stands in its place: it *is* a torch.optim.Optimizer
that shares the inner one's parameter groups and state, so that learning-rate schedulers,
GradScaler, closures and gradient accumulation work on it unchanged.

[Note: loss scaling] GradScaler skips `step()` on a rank whose gradients overflowed. Ranks would
then disagree on how many steps, and so transfers, there were. The base therefore asks for the scale
and the overflow flag instead (`_step_supports_amp_scaling`): GradScaler sets them as attributes
`grad_scale` (None after `scaler.unscale_`) and `found_inf` around step(), and takes them away after
it. A method whose replicas take the same step decides with all of them; one whose replicas step by
themselves calls `_inner_step`. Scales are each replica's own and may differ, so gradients are
unscaled before they are sent.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from thinwire.optim.flat import local_part
from thinwire.wire.account import Account
from thinwire.wire.agreement import require_same, require_same_values
from thinwire.wire.wire import Group, Wire

Closure = Callable[[], float]


class WireOptimizer(torch.optim.Optimizer):
    """Base of all methods. A subclass implements `_step`, and `consensus`/`finish` if its replicas
    may differ between steps."""

    _step_supports_amp_scaling = True

    def __init__(self, inner: torch.optim.Optimizer, *, group: Group = None, name: str) -> None:
        if not isinstance(inner, torch.optim.Optimizer):
            raise ValueError(f"{name} wraps a torch.optim.Optimizer, got {type(inner).__name__}")
        if isinstance(inner, torch.optim.LBFGS):
            raise ValueError(
                f"{name} cannot wrap LBFGS, which takes several gradients a step; wrap an "
                "optimizer that takes one"
            )
        self.inner = inner
        self._parameters = [p for g in inner.param_groups for p in g["params"]]
        self._require_leaves(name)
        super().__init__(inner.param_groups, {})
        # The same lists and dicts as the inner optimizer's: a scheduler that writes an lr here
        # writes it there.
        self.param_groups = inner.param_groups
        self.defaults = inner.defaults
        self.state = inner.state
        self._group = group
        self._meeting: Wire | None = None
        self.wire = Wire(group, name=name)
        self._checked = False

    @property
    def account(self) -> Account:
        """Bytes sent, seconds exposed and hidden, so far."""
        return self.wire.account

    @property
    def meeting(self) -> Wire:
        """The wire of `consensus()`: evaluation is no part of what the method costs, so it has an
        account of its own."""
        if self._meeting is None:
            self._meeting = Wire(self._group, name=f"{self.wire.name} consensus")
        return self._meeting

    def step(self, closure: Closure | None = None) -> Any:
        """One inner step of this replica, and whatever the method sends or lands with it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._require_same_start()
        self._step()
        self.account.tick()
        return loss

    def _step(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} must implement _step")

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, the model holds the mean of the replicas: evaluate and save there."""
        yield

    def finish(self) -> None:
        """Lands every flight and makes the replicas equal. Call it once, at the end of training."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "wire"):
            raise ValueError(
                "parameters cannot be added after construction: the other replicas would not send "
                "them; build the optimizer with all of them"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state and, under "method", this replica's own part of it."""
        return {"inner": self.inner.state_dict(), "method": self.method_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict["inner"])
        self.adopt_inner()
        self.load_method_state(state_dict["method"])

    def adopt_inner(self) -> None:
        """Shares the inner optimizer's containers again, which it replaces when it loads."""
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

    def method_state(self) -> dict[str, Any]:
        """What this replica keeps beside the inner optimizer's state."""
        return {}

    def load_method_state(self, state: dict[str, Any]) -> None:
        pass

    @property
    def _scale(self) -> Tensor | None:
        """The factor on the gradients, while GradScaler calls step() with them still scaled."""
        return getattr(self, "grad_scale", None)

    def _unscaled(self, gradients: Tensor) -> Tensor:
        """Takes GradScaler's scale out of a flat buffer of gradients, in place."""
        if self._scale is not None:
            gradients.mul_(self._scale.to(gradients.device).reciprocal())
        return gradients

    @torch.no_grad()
    def _inner_step(self) -> bool:
        """A step of this replica alone, as GradScaler would have it; whether it was taken."""
        if self._scale is not None:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(self._scale.to(parameter.device).reciprocal())
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and float(found_inf) > 0:
            return False
        self.inner.step()
        return True

    def _require_leaves(self, name: str) -> None:
        for index, parameter in enumerate(self._parameters):
            if not parameter.is_leaf:
                raise ValueError(
                    f"{name}: parameter {index} of shape {tuple(parameter.shape)} is not a leaf "
                    "tensor (it was computed from others); pass the tensors that are trained"
                )

    def _require_same_start(self) -> None:
        if not self._checked:
            self._check_start()

    def _settings(self) -> dict[str, Any]:
        """What must be the same on all replicas for their transfers to match."""
        layout = {
            str(index): f"{p.dtype} {tuple(p.shape)}{'' if p.requires_grad else ', not trained'}"
            for index, p in enumerate(self._parameters)
        }
        return {"method": type(self).__name__, "parameter": layout}

    def _check_start(self) -> None:
        """Before anything else is sent: replicas that start apart never meet."""
        before = self.account.snapshot()
        require_same(self.wire, self._settings())
        require_same_values(
            self.wire, map(local_part, self._parameters), "the weights at the first step"
        )
        self.account.restore(before)  # what a method costs does not depend on where it was resumed
        self._checked = True

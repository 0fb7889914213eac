"""WireOptimizer: what every method shares.

Most methods wrap an inner torch optimizer and stand in its place: a `WrappingOptimizer` *is* a
torch.optim.Optimizer that shares the inner one's parameter groups and state, so that learning-rate
schedulers, GradScaler, closures and gradient accumulation work on it unchanged. The others own
their update rule.

[Note: loss scaling] GradScaler skips `step()` on a rank whose gradients overflowed. Ranks would
then disagree on how many steps, and so transfers, there were. The base therefore asks for the scale
and the overflow flag instead (`_step_supports_amp_scaling`): GradScaler sets them as attributes
`grad_scale` (None after `scaler.unscale_`) and `found_inf` around step(), and takes them away after
it. A method whose replicas take the same step decides with all of them; one whose replicas step by
themselves calls `_inner_step`. Scales are each replica's own and may differ, so gradients are
unscaled before they are sent.

[Note: loading] A method never keeps a tensor of the dictionary it was given: a caller may load the
same one twice, to go back a second time.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.optim.checks import (
    require_group,
    require_inner,
    require_kind,
    require_params,
    require_text,
)
from thinwire.optim.finite import StepGuard
from thinwire.optim.flat import Unchanged, local_part, shard_of
from thinwire.wire.account import Account
from thinwire.wire.agreement import require_same, require_same_values
from thinwire.wire.meeting import Meeting
from thinwire.wire.wire import Group, Wire

Closure = Callable[[], float]


class WireOptimizer(torch.optim.Optimizer):
    """Base of all methods. A subclass implements `_step`, and `consensus`/`finish` if its replicas
    may differ between steps."""

    _step_supports_amp_scaling = True

    def __init__(
        self, params: ParamsT, defaults: dict[str, Any], *, group: Group = None, name: str
    ) -> None:
        own = type(self).__name__
        require_text(own, "name", name)
        require_group(own, "group", group)
        require_kind(own, "defaults", defaults, dict, "a dict of settings")
        super().__init__(require_params(own, params), defaults)
        self._parameters: list[Tensor] = [p for g in self.param_groups for p in g["params"]]
        self._complex = [p for p in self._parameters if p.is_complex()]
        self.group = group
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
            self._meeting = Meeting(self.group, name=f"{self.wire.name} consensus")
        return self._meeting

    def step(self, closure: Closure | None = None) -> Any:
        """One inner step of this replica, and whatever the method sends or lands with it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._resolve_conjugates()
        self._require_same_start()
        self._step()
        self.account.tick()
        return loss

    def _step(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} must implement _step")

    @torch.no_grad()
    def _resolve_conjugates(self) -> None:
        """Gradients that autograd left conjugated by a flag have no real view to write to."""
        for parameter in self._complex:
            gradient = parameter.grad
            if gradient is not None and shard_of(gradient).is_conj():
                gradient.data = gradient.resolve_conj()  # the same tensor, so hooks still know it

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
        if not isinstance(param_group["params"], Tensor):
            param_group["params"] = list(param_group["params"])  # it may be a generator
        self._require_leaves(param_group["params"])
        super().add_param_group(param_group)

    @property
    def _scale(self) -> Tensor | None:
        """The factor on the gradients, while GradScaler calls step() with them still scaled."""
        return getattr(self, "grad_scale", None)

    def _unscaled(self, gradients: Tensor) -> Tensor:
        """Takes GradScaler's scale out of a flat buffer of gradients, in place."""
        if self._scale is not None:
            gradients.mul_(self._scale.to(gradients.device).reciprocal())
        return gradients

    def _require_leaves(self, params: Any) -> None:
        """Before torch's own check, which does not say which parameter it is."""
        added = sum(len(group["params"]) for group in self.param_groups)
        for index, entry in enumerate([params] if isinstance(params, Tensor) else params):
            parameter = entry[1] if isinstance(entry, tuple) else entry  # or a pair with a name
            if isinstance(parameter, Tensor) and not parameter.is_leaf:
                raise ValueError(
                    f"{type(self).__name__}: parameter {added + index} of shape "
                    f"{tuple(parameter.shape)} is not a leaf tensor (it was computed from others); "
                    "pass the tensors that are trained"
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


class WrappingOptimizer(WireOptimizer):
    """Base of the methods that leave the update rule to an inner optimizer."""

    def __init__(self, inner: torch.optim.Optimizer, *, group: Group = None, name: str) -> None:
        require_inner(name, inner)
        if isinstance(inner, torch.optim.LBFGS):
            raise ValueError(
                f"{name} cannot wrap LBFGS, which takes several gradients a step; wrap an "
                "optimizer that takes one"
            )
        self.inner = inner
        super().__init__(inner.param_groups, {}, group=group, name=name)
        # The same lists and dicts as the inner optimizer's: a scheduler that writes an lr here
        # writes it there.
        self.defaults = inner.defaults
        self._unchanged = Unchanged(name, self._parameters)
        self.adopt_inner()

    def adopt_inner(self) -> None:
        """Shares the inner optimizer's containers again, which it replaces when it loads."""
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state and, under "method", this replica's own part of it."""
        return {"inner": self.inner.state_dict(), "method": self.method_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # torch's optimizers go on in the tensors they are given: see [Note: loading].
        self.inner.load_state_dict(copied(state_dict["inner"]))
        self.adopt_inner()
        self.load_method_state(state_dict["method"])

    def method_state(self) -> dict[str, Any]:
        """What this replica keeps beside the inner optimizer's state."""
        return {}

    def load_method_state(self, state: dict[str, Any]) -> None:
        pass

    @torch.no_grad()
    def _inner_step(self, guard: StepGuard) -> bool:
        """A step of this replica alone, as GradScaler would have it; whether it was taken.

        One that would put a NaN into the inner optimizer's moments, which stay NaN for ever, is
        left out and counted.
        """
        if self._scale is not None:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(self._scale.to(parameter.device).reciprocal())
        found_inf = getattr(self, "found_inf", None)
        if not guard.allows(found_inf is not None and float(found_inf) > 0):
            self.account.skipped += 1
            return False
        self.inner.step()
        return True


def copied(tree: Any) -> Any:
    """A nest of dicts and lists with tensors of its own."""
    if isinstance(tree, Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        return {key: copied(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [copied(value) for value in tree]
    return tree

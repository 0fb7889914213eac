"""WireOptimizer: what a training loop sees of every method.

A method is made of parts that it holds:

    WireOptimizer   the torch.optim.Optimizer in the user's loop: groups, step(), consensus()
    Session         what a method knows of the run: parameters, wire, loss scale (session.py)
    Engine          when things are computed, sent and used (engine.py; one for each family)

The class of a method is its signature: it checks its arguments and chooses the parts. A method
that wraps an inner optimizer shares that one's parameter groups and state, so that learning-rate
schedulers, GradScaler, closures and gradient accumulation work on it unchanged.

[Note: loss scaling] GradScaler skips `step()` on a rank whose gradients overflowed. Ranks would
then disagree on how many steps, and so transfers, there were. So WireOptimizer asks for the scale
and the overflow flag instead (`_step_supports_amp_scaling`): GradScaler sets them as attributes
`grad_scale` (None after `scaler.unscale_`) and `found_inf` around step(), and takes them away after
it. A method whose replicas take the same step decides with all of them; one whose replicas step by
themselves calls `Session.inner_step`. Scales are each replica's own and may differ, so gradients
are unscaled before they are sent.

[Note: loading] A method never keeps a tensor of the dictionary it was given: a caller may load the
same one twice, to go back a second time.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, Generic, TypeVar, overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.methods.engine import Engine
from thinwire.methods.session import Session
from thinwire.optim.checks import (
    require_group,
    require_inner,
    require_kind,
    require_params,
    require_text,
)
from thinwire.wire.account import Account
from thinwire.wire.ranks import Group
from thinwire.wire.wire import Wire

Closure = Callable[[], float]
T = TypeVar("T")


class Shown(Generic[T]):
    """An attribute of a method that a part of its engine keeps: read here, kept there.

    `Shown("progress.steps", "Steps taken.")` is `optimizer.engine.progress.steps`.
    """

    def __init__(self, where: str, doc: str, *, settable: bool = False) -> None:
        self.__doc__ = doc
        self._holder, _, self._attribute = f"engine.{where}".rpartition(".")
        self._settable = settable

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, optimizer: None, owner: type) -> "Shown[T]": ...
    @overload
    def __get__(self, optimizer: "WireOptimizer", owner: type) -> T: ...
    def __get__(self, optimizer: "WireOptimizer | None", owner: type) -> "Shown[T] | T":
        if optimizer is None:
            return self
        found: T = getattr(attrgetter(self._holder)(optimizer), self._attribute)
        return found

    def __set__(self, optimizer: "WireOptimizer", value: T) -> None:
        if not self._settable:
            name = f"{type(optimizer).__name__}.{self._name}"
            raise AttributeError(f"{name} cannot be set; give it when the optimizer is built")
        setattr(attrgetter(self._holder)(optimizer), self._attribute, value)


class WireOptimizer(torch.optim.Optimizer):
    """Base of all methods. A method's `__init__` calls this one and then sets `engine`."""

    _step_supports_amp_scaling = True
    engine: Engine
    inner: torch.optim.Optimizer
    """The optimizer that a method wraps, if it does."""

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        inner: torch.optim.Optimizer | None = None,
        group: Group = None,
        name: str | None = None,
    ) -> None:
        own = type(self).__name__
        name = own if name is None else require_text(own, "name", name)
        require_group(own, "group", group)
        require_kind(own, "defaults", defaults, dict, "a dict of settings")
        if inner is not None:
            require_inner(own, inner)
        super().__init__(require_params(own, params), defaults)
        self.group = group
        self.session = Session(self, group, Wire(group, name=name), inner)
        if inner is not None:
            self.inner = inner
            # The same lists and dicts as the inner optimizer's: a scheduler that writes an lr here
            # writes it there.
            self.defaults = inner.defaults
            self.adopt_inner()

    @property
    def wire(self) -> Wire:
        return self.session.wire

    @property
    def account(self) -> Account:
        """Bytes sent, seconds exposed and hidden, so far."""
        return self.session.wire.account

    def step(self, closure: Closure | None = None) -> Any:
        """One inner step of this replica, and whatever the method sends or lands with it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.session.resolve_conjugates()
        self.engine.require_same_start()
        self.engine.step()
        self.account.tick()
        return loss

    def accumulating(self) -> AbstractContextManager[None]:
        """Around forward and backward of all micro-batches of a step but the last one."""
        return self.engine.accumulating()

    def consensus(self) -> AbstractContextManager[None]:
        """Inside, the model holds the mean of the replicas: evaluate and save there."""
        return self.engine.consensus()

    def finish(self) -> None:
        """Lands every flight and makes the replicas equal. Call it once, at the end of training."""
        self.engine.finish()

    def state_dict(self) -> dict[str, Any]:
        """This replica's state: it goes on bit for bit on as many ranks."""
        return self.engine.state_dict()

    def portable_state_dict(self) -> dict[str, Any]:
        """The same on every rank, for any number of ranks. A collective: all ranks call it."""
        return self.engine.portable_state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a state of either kind, and refuses one of other parameters."""
        self.engine.load_state_dict(state_dict)

    def adopt_inner(self) -> None:
        """Shares the inner optimizer's containers again, which it replaces when it loads."""
        if self.session.inner is not None:
            self.param_groups = self.inner.param_groups
            self.state = self.inner.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "session" in self.__dict__:
            raise ValueError(
                "parameters cannot be added after construction: the other replicas would not send "
                "them; build the optimizer with all of them"
            )
        if not isinstance(param_group["params"], Tensor):
            param_group["params"] = list(param_group["params"])  # it may be a generator
        self._require_leaves(param_group["params"])
        super().add_param_group(param_group)

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


def require_wrapped(name: str, inner: Any) -> torch.optim.Optimizer:
    """An optimizer that a method can wrap."""
    require_inner(name, inner)
    if isinstance(inner, torch.optim.LBFGS):
        raise ValueError(
            f"{name} cannot wrap LBFGS, which takes several gradients a step; wrap an "
            "optimizer that takes one"
        )
    found: torch.optim.Optimizer = inner
    return found

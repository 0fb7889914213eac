"""Session: what a method knows of the run it takes part in.

It is made with the optimizer and handed to the engine and its parts. It holds the optimizer itself
only weakly: an optimizer that the user drops frees its memory at once.
"""

import weakref
from typing import Any

import torch
from torch import Tensor

from thinwire.flat import Unchanged, shard_of
from thinwire.methods.shared.finite import StepGuard
from thinwire.wire.account import Account
from thinwire.wire.evaluation import EvaluationWire
from thinwire.wire.ranks import Group
from thinwire.wire.wire import Wire


class Session:
    """
    name         of the method, for messages
    parameters   in the order of the groups
    wire         the method's own; `evaluation` is the one of what is no part of its cost
    inner        the optimizer that the method wraps, if it does
    checked      whether the ranks have been found to start alike
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        group: Group,
        wire: Wire,
        inner: torch.optim.Optimizer | None,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.name = type(optimizer).__name__
        self.wire, self.group, self.inner = wire, group, inner
        self.parameters: list[Tensor] = [p for g in optimizer.param_groups for p in g["params"]]
        self.unchanged = Unchanged(self.name, self.parameters)
        self.checked = False
        self._complex = [p for p in self.parameters if p.is_complex()]
        self._evaluation: Wire | None = None

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups, as schedulers change them."""
        found: list[dict[str, Any]] = self._found().param_groups
        return found

    @property
    def state(self) -> dict[Tensor, Any]:
        """`optimizer.state`, which shows what is kept for each parameter."""
        found: dict[Tensor, Any] = self._found().state
        return found

    @property
    def account(self) -> Account:
        return self.wire.account

    @property
    def evaluation(self) -> Wire:
        """The wire of `consensus()`: evaluation is no part of what the method costs, so it has an
        account of its own."""
        if self._evaluation is None:
            self._evaluation = EvaluationWire(self.group, name=f"{self.wire.name} consensus")
        return self._evaluation

    def group_of_each(self) -> list[dict[str, Any]]:
        """The group of every parameter."""
        return [group for group in self.groups for _ in group["params"]]

    # -- GradScaler, see [Note: loss scaling] in base.py ------------------------------------------

    @property
    def scale(self) -> Tensor | None:
        """The factor on the gradients, while GradScaler calls step() with them still scaled."""
        return getattr(self._found(), "grad_scale", None)

    @property
    def scaling(self) -> bool:
        """Whether it is GradScaler that calls step()."""
        return hasattr(self._found(), "found_inf")

    @property
    def overflow(self) -> bool:
        """Whether GradScaler has found gradients that are not finite."""
        found_inf = getattr(self._found(), "found_inf", None)
        return found_inf is not None and float(found_inf) > 0

    def unscaled(self, gradients: Tensor) -> Tensor:
        """Takes GradScaler's scale out of a flat buffer of gradients, in place."""
        if self.scale is not None:
            gradients.mul_(self.scale.to(gradients.device).reciprocal())
        return gradients

    @torch.no_grad()
    def inner_step(self, guard: StepGuard) -> bool:
        """A step of this replica alone, as GradScaler would have it; whether it was taken.

        One that would put a NaN into the inner optimizer's moments, which stay NaN for ever, is
        left out and counted.
        """
        assert self.inner is not None
        if self.scale is not None:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(self.scale.to(parameter.device).reciprocal())
        if not guard.allows(self.overflow):
            self.account.skipped += 1
            return False
        self.inner.step()
        return True

    @torch.no_grad()
    def resolve_conjugates(self) -> None:
        """Gradients that autograd left conjugated by a flag have no real view to write to."""
        for parameter in self._complex:
            gradient = parameter.grad
            if gradient is not None and shard_of(gradient).is_conj():
                gradient.data = gradient.resolve_conj()  # the same tensor, so hooks still know it

    def adopt_inner(self) -> None:
        """After the inner optimizer has loaded a state."""
        self._found().adopt_inner()

    def _found(self) -> Any:
        optimizer = self._optimizer()
        assert optimizer is not None, "an engine has outlived its optimizer"
        return optimizer

"""TensorwiseOptimizer: steps that are taken tensor by tensor, as LARS and LAMB take them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from thinwire.optim.checks import require_dense_gradient


class TensorwiseOptimizer(torch.optim.Optimizer):
    """A method implements `_update`, which is called for every parameter that has a gradient."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    require_dense_gradient(type(self).__name__, parameter)
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Changes one parameter, with the settings of its group."""
        raise NotImplementedError

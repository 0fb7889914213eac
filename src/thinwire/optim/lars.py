"""Lars: momentum SGD whose steps have a length in proportion to each tensor's own.

    c = trust ||x|| / (||g|| + lam ||x||)                    per tensor x of two or more dimensions
    c = 1                                 for vectors (biases, norms), or where either norm is 0
    v = mu v + lr c (g + lam x) ;   x = x - v

The learning rate stands inside the momentum, as published: after a change of it the steps in v keep
the rate they were made with. For large batches; wrap it in `GradientAverage` to train with several
replicas.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT

from thinwire.flat import local_part
from thinwire.optim.checks import (
    require_nonnegative,
    require_params,
    require_positive,
    require_share,
)
from thinwire.optim.tensorwise import TensorwiseOptimizer


class Lars(TensorwiseOptimizer):
    """LARS for large batches.

    Args:
        params: tensors or groups of them, as for any torch optimizer.
        lr: with `trust`, the relative change of a matrix in a step; of vectors, the plain learning
            rate. Grow it with the batch and warm it up; halve it when the loss jumps.
        momentum: mu.
        weight_decay: lam; 0 in groups of norms and biases.
        trust: share of a matrix' length that a step at lr 1 has. Raise it, and lower lr by as much,
            when vectors (BatchNorm's gain, say) are what diverges.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1.0,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(require_params("Lars", params), defaults)
        for group in self.param_groups:
            require_nonnegative("Lars", group, "lr", "weight_decay")
            group["momentum"] = require_share("Lars", "momentum", group["momentum"])
            group["trust"] = require_positive("Lars", "trust", group["trust"])

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, decay = self.state[parameter], group["weight_decay"]
        assert parameter.grad is not None
        x, g = local_part(parameter), local_part(parameter.grad)
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        v = local_part(state["momentum_buffer"])
        step = g.add(x, alpha=decay) if decay else g
        if parameter.dim() >= 2:
            step = step * _coefficient(parameter, decay, group["trust"]).to(step.dtype)
        v.mul_(group["momentum"]).add_(step, alpha=group["lr"])
        x.sub_(v)


def _coefficient(parameter: Tensor, decay: float, trust: float) -> Tensor:
    """c; nothing waits for a device."""
    length, slope = _norm(parameter.detach()), _norm(parameter.grad)
    zero = (length == 0) | (slope == 0)
    return torch.where(zero, 1.0, trust * length / (slope + decay * length))


def _norm(tensor: Tensor | None) -> Tensor:
    """Of the whole tensor, where this rank has a shard of it."""
    assert tensor is not None
    norm = torch.linalg.vector_norm(tensor.float())
    return norm.full_tensor() if isinstance(norm, DTensor) else norm

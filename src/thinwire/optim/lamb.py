"""Lamb: Adam's direction in every tensor, at a length in proportion to the tensor's own.

    m = b1 m + (1-b1) g ;   v = b2 v + (1-b2) g²                        per tensor x
    u = m̂ / (sqrt(v̂) + eps) + lam x           m̂ = m / (1-b1^t), v̂ = v / (1-b2^t), or m and v
    c = clip(phi(||x||) / ||u||, c_min, c_max) ;   c = 1 if either norm is 0
    x = x - lr c u

The dense baseline of `OneBitLamb`: wrap it in `GradientAverage` to train with several replicas.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from thinwire.optim.checks import (
    require_betas,
    require_bool,
    require_bounds,
    require_nonnegative,
    require_params,
)
from thinwire.optim.tensorwise import TensorwiseOptimizer

Bounds = tuple[float, float]


class Lamb(TensorwiseOptimizer):
    """LAMB for large batches.

    Args:
        params: tensors or groups of them, as for any torch optimizer.
        lr: relative change of a tensor in a step, since c u has the tensor's own length. Large
            batches take 1e-2 and a warm-up; halve it when the loss jumps.
        betas: decay of m and v.
        eps: keeps values with hardly any gradient from moving at full speed.
        weight_decay: lam; 0 in groups of norms and biases.
        bias_correction: m̂ and v̂, without which the first 1/(1-b2) steps of a tensor at the bound
            of c are too long.
        coefficient: (c_min, c_max). Lower c_max (0.3 with batches of 64K) when single tensors
            diverge.
        phi: bounds on ||x|| before the division, (0, 10) in the paper; None for ||x|| itself.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        coefficient: Bounds = (0.01, 10.0),
        phi: Bounds | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"bias_correction": bias_correction, "coefficient": coefficient, "phi": phi}
        super().__init__(require_params("Lamb", params), defaults)
        for group in self.param_groups:
            check_lamb_group("Lamb", group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch rounds the moments to the weights' type when it loads; here they stay as saved."""
        super().load_state_dict(state_dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        for index, saved in state_dict["state"].items():
            parameter = parameters[int(index)]
            for name, value in saved.items():
                device = torch.device("cpu") if name == "step" else parameter.device
                self.state[parameter][name] = value.to(device, copy=True)

    def _update(self, x: Tensor, group: dict[str, Any]) -> None:
        state, gradient = self.state[x], x.grad.float()  # type: ignore[union-attr]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(gradient)
            state["exp_avg_sq"] = torch.zeros_like(gradient)
        state["step"] += 1
        m, v, (b1, b2) = state["exp_avg"], state["exp_avg_sq"], group["betas"]
        m.lerp_(gradient, 1 - b1)
        v.mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
        first, second = corrections(int(state["step"]), group["betas"], group["bias_correction"])
        u = (v / second).sqrt_().add_(group["eps"])
        u = (m / first).div_(u).add_(x, alpha=group["weight_decay"])
        length, step = torch.linalg.vector_norm(x.float()), torch.linalg.vector_norm(u)
        c = coefficients(length, step, group["coefficient"], group["phi"])
        x.sub_((u * (group["lr"] * c)).to(x.dtype))


def corrections(step: int, betas: Sequence[float], wanted: bool) -> tuple[float, float]:
    """What m and v are divided by at this step, counted from 1."""
    if not wanted:
        return 1.0, 1.0
    return 1 - betas[0] ** step, 1 - betas[1] ** step


def coefficients(length: Tensor, step: Tensor, bounds: Bounds, phi: Bounds | None) -> Tensor:
    """c from ||x|| and ||u||; 1 where a norm is 0. Nothing waits for a device."""
    zero = (length == 0) | (step == 0)
    if phi is not None:
        length = length.clamp(*phi)
    return torch.where(zero, 1.0, (length / step).clamp(*bounds))


def check_lamb_group(name: str, group: dict[str, Any]) -> None:
    require_nonnegative(name, group, "lr", "eps", "weight_decay")
    group["betas"] = require_betas(name, group["betas"])
    group["bias_correction"] = require_bool(name, "bias_correction", group["bias_correction"])
    group["coefficient"] = require_bounds(name, "coefficient", group["coefficient"])
    if group["phi"] is not None:
        group["phi"] = require_bounds(name, "phi", group["phi"])

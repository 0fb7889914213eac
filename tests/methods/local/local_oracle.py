"""Plain, sequential local updates: all replicas in one process, one dict of tensors after another.

Nothing here is shared with the engine. A replica is a list of tensors and an inner optimizer; a
round is written out as in the module docstring of local_updates.py.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

Gradient = Callable[[int, int, Tensor], Tensor]  # (replica, step, weights) -> gradient


@dataclass
class Settings:
    every: int
    delay: int | str = 0
    own_weight: float = 0.0
    merge: float = 0.0
    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    penalty: float | str = 1.0
    clip: float | None = None
    clip_by: str = "norm"


@dataclass
class OuterOracle:
    settings: Settings
    m: Tensor | None = None
    moved: float = 0.0
    usual: float = 0.0
    trace: list[Tensor] = field(default_factory=list)

    def step(self, x: Tensor, d: Tensor) -> Tensor:
        s = self.settings
        size = float(d.norm())
        gap = 1.0
        if s.penalty == "gap":
            gap = min(8.0, 1 + self.moved / (size + 1e-12)) if size > 0 else 1.0
        else:
            gap = float(s.penalty)
        m = torch.zeros_like(x) if self.m is None else self.m
        m = s.momentum * m + d / gap
        self.usual = 0.9 * self.usual + 0.1 * size if self.usual else size
        if s.clip is not None and s.clip_by == "value":
            m = m.clamp(-s.clip, s.clip)
        if s.clip is not None and s.clip_by == "norm":
            limit = s.clip * self.usual / (1 - s.momentum)
            m = m * min(1.0, limit / float(m.norm())) if float(m.norm()) > 0 else m
        self.m = m
        self.trace.append(m)
        direction = d / gap + s.momentum * m if s.nesterov else m
        self.moved = s.lr * (
            size / gap + s.momentum * float(m.norm()) if s.nesterov else float(m.norm())
        )
        return x - s.lr * direction


def run(
    start: Tensor, gradient: Gradient, replicas: int, steps: int, inner_lr: float, s: Settings
) -> tuple[list[Tensor], list[OuterOracle]]:
    """Weights of every replica after `steps` steps of SGD with the method, before any finish."""
    x = [start.clone() for _ in range(replicas)]
    y = [start.clone() for _ in range(replicas)]
    outers = [OuterOracle(s) for _ in range(replicas)]
    in_air: list[Tensor] | None = None
    before = [torch.zeros_like(start) for _ in range(replicas)]
    for step in range(1, steps + 1):
        for i in range(replicas):
            y[i] = y[i] - inner_lr * gradient(i, step, y[i])
        since = step % s.every
        if since == 0:
            own = [x[i] - y[i] for i in range(replicas)]
        if since == 0 and s.delay == "round":
            for i in range(replicas):
                if s.own_weight == 0:
                    if in_air is not None:
                        x[i] = outers[i].step(x[i], mean(in_air))
                else:
                    arrived = torch.zeros_like(start) if in_air is None else mean(in_air)
                    x[i] = outers[i].step(x[i], arrived + s.own_weight * (own[i] - before[i]))
                y[i] = x[i].clone()
            before, in_air = own, own
        elif since == 0:
            in_air = own
        if s.delay != "round" and since == s.delay and in_air is not None:
            for i in range(replicas):
                x[i] = outers[i].step(x[i], mean(in_air))
                y[i] = s.merge * y[i] + (1 - s.merge) * x[i]
            in_air = None
    return y, outers


def mean(values: list[Tensor]) -> Tensor:
    return torch.stack(values).sum(0) / len(values)


def quadratic(replicas: int, numel: int, spread: float = 1.0) -> Gradient:
    """Gradient of a quadratic with its own minimum for each replica, and noise by step."""
    generator = torch.Generator().manual_seed(7)
    curvature = torch.rand(numel, generator=generator) + 0.2
    centres = spread * torch.randn(replicas, numel, generator=generator)

    def gradient(replica: int, step: int, weights: Tensor) -> Tensor:
        seed = torch.Generator().manual_seed(1000 * step + replica)
        noise = 0.1 * torch.randn(numel, generator=seed)
        return curvature * (weights - centres[replica]) + noise

    return gradient


def start_point(numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(3))


def finite(values: list[Tensor]) -> bool:
    return all(math.isfinite(float(v.norm())) for v in values)

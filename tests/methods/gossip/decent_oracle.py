"""DSGD, DmSGD and DecentLaM as plain sequential loops over all replicas, in float64.

Written from the papers' equations: momentum in units of gradients, rescaled by hand when the
learning rate changes; every replica's z kept, and mixed by the matrix.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import thinwire as tw

SHAPES = [(5, 4), (7,), (3, 2, 2), (1,)]
Gradient = Callable[[int, int, list[Tensor]], list[Tensor]]


def problem(size: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> tuple[list[Tensor], Gradient]:
    """A start that all share, and gradients of quadratics with another optimum on every rank."""
    generator = torch.Generator().manual_seed(7)
    start = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    goals = [
        [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
        for _ in range(size)
    ]
    curves = [
        [0.5 + torch.rand(s, generator=generator, dtype=torch.float64) for s in shapes]
        for _ in range(size)
    ]

    def gradient(rank: int, step: int, x: list[Tensor]) -> list[Tensor]:
        noise = torch.Generator().manual_seed(1000 * step + rank)
        return [
            c * (v - goal) + 0.1 * torch.randn(v.shape, generator=noise, dtype=torch.float64)
            for c, v, goal in zip(curves[rank], x, goals[rank], strict=True)
        ]

    return start, gradient


def run(
    method: str,
    matrix: Tensor,
    start: list[Tensor],
    gradient: Gradient,
    rates: Sequence[float],
    beta: float,
    decay: float = 0.0,
) -> list[list[Tensor]]:
    """Every replica's weights after a step for each of the learning rates."""
    size = matrix.shape[0]
    x = [[v.clone() for v in start] for _ in range(size)]
    m = [[torch.zeros_like(v) for v in start] for _ in range(size)]
    before = rates[0]
    for step, lr in enumerate(rates, start=1):
        g = [
            [a + decay * b for a, b in zip(gradient(i, step, x[i]), x[i], strict=True)]
            for i in range(size)
        ]
        z = [[] for _ in range(size)]  # type: list[list[Tensor]]
        for i in range(size):
            for k in range(len(start)):
                if method == "DmSGD":
                    m[i][k] = beta * m[i][k] + g[i][k]
                    z[i].append(x[i][k] - lr * m[i][k])
                else:
                    z[i].append(x[i][k] - lr * g[i][k])
        mixed = [
            [sum(float(matrix[i, j]) * z[j][k] for j in range(size)) for k in range(len(start))]
            for i in range(size)
        ]
        for i in range(size):
            for k in range(len(start)):
                if method == "DecentLaM":
                    rescaled = m[i][k] * before / lr
                    m[i][k] = beta * rescaled + (x[i][k] - mixed[i][k]) / lr
                    x[i][k] = x[i][k] - lr * m[i][k]
                else:
                    x[i][k] = mixed[i][k]  # type: ignore[assignment]
        before = lr
    return x


def build(kind: str, size: int, lr: float, beta: float, **settings: object) -> tuple:
    """The real optimizer on this rank, over the same problem."""
    tw.init()
    start, gradient = problem(size)
    weights = [nn.Parameter(v.float()) for v in start]
    if kind != "DSGD":
        settings["momentum"] = beta
    return weights, getattr(tw, kind)(weights, lr, **settings), gradient


def advance(
    weights: list[nn.Parameter],
    optimizer: tw.WireOptimizer,
    gradient: Gradient,
    rates: Sequence[float],
    first: int = 1,
) -> None:
    rank = optimizer.wire.rank
    for step, lr in enumerate(rates, start=first):
        for group in optimizer.param_groups:
            group["lr"] = lr
        values = gradient(rank, step, [w.detach().double() for w in weights])
        for weight, value in zip(weights, values, strict=True):
            weight.grad = value.to(weight.dtype)
        optimizer.step()
        optimizer.zero_grad()

"""The whole asynchronous pipeline, one micro-batch after the other, on plain copies of modules.

Micro-batch i meets the weights that stage s had after `version(s, i)` updates; its gradient goes to
the update i // accumulate of every stage. Nothing of thinwire is used.
"""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
Optimize = Callable[[nn.Module], torch.optim.Optimizer]
Version = Callable[[int, int], int]


def one_f_one_b(stages: int, accumulate: int = 1, lead: int = 0) -> Version:
    """The newest weights of a stage when it runs that forward: K_s backwards behind."""
    return lambda s, i: max(0, i - (stages - 1 - s) * (1 + lead)) // accumulate


def two_buffers(accumulate: int) -> Version:
    """The weights of one update ago, on all stages."""
    return lambda s, i: max(0, i // accumulate - 1)


def synchronous(accumulate: int = 1) -> Version:
    return lambda s, i: i // accumulate


def train(
    stages: Sequence[nn.Module],
    optimize: Optimize,
    loss: Callable[[Tensor, Tensor], Tensor],
    batches: Sequence[Batch],
    version: Version,
    *,
    accumulate: int = 1,
    clip: float = 1.0,
    stash: bool = True,
    horizons: Sequence[float] | None = None,
    passed: Callable[[Tensor], Tensor] = lambda t: t,
) -> tuple[list[nn.Module], list[float]]:
    """The trained stages and each micro-batch's loss; `stages` are left as they are.

    `passed` is what becomes of activations and gradients on their way; `horizons` are the updates
    by which each stage's versions look ahead.
    """
    newest = [copy.deepcopy(stage) for stage in stages]
    optimizers = [optimize(stage) for stage in newest]
    history = [[copy.deepcopy(stage)] for stage in newest]  # history[s][t]: after t updates
    losses = []
    for i, (x, y) in enumerate(batches):
        used = [history[s][version(s, i)] for s in range(len(stages))]
        if horizons is not None:
            used = [ahead(history[s], version(s, i), h) for s, h in enumerate(horizons)]
        back = used if stash else newest
        inputs = [x]
        with torch.no_grad():
            for stage in used[:-1]:
                inputs.append(passed(stage(inputs[-1])))
        gradient = None
        for s in reversed(range(len(stages))):
            module = used[s] if s == len(stages) - 1 else back[s]
            entered = inputs[s].detach().clone()
            if s > 0:
                entered.requires_grad_()
            out = module(entered)
            if gradient is None:
                out = loss(out, y)
                losses.append(out.item())
                out = out / accumulate
            given = torch.autograd.grad(
                out, [*module.parameters(), *([entered] if s else [])], gradient
            )
            for parameter, grad in zip(newest[s].parameters(), given, strict=False):
                parameter.grad = grad if parameter.grad is None else parameter.grad + grad
            gradient = passed(given[-1]) if s else None
        if (i + 1) % accumulate == 0:
            for s, optimizer in enumerate(optimizers):
                torch.nn.utils.clip_grad_norm_(newest[s].parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
                history[s].append(copy.deepcopy(newest[s]))
    return newest, losses


def ahead(history: Sequence[nn.Module], version: int, horizon: float) -> nn.Module:
    """That version, moved on by `horizon` times its last update."""
    moved = copy.deepcopy(history[version])
    with torch.no_grad():
        for weight, before in zip(
            moved.parameters(), history[max(0, version - 1)].parameters(), strict=True
        ):
            weight.add_(weight - before, alpha=horizon)
    return moved


# -- a small job for all tests ------------------------------------------------------------------

WIDTH, BATCH = 6, 3


def small_stages(count: int, seed: int = 0) -> list[nn.Module]:
    """Stages of different sizes; all of them learn."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return [
            nn.Sequential(nn.Linear(WIDTH, WIDTH + s), nn.GELU(), nn.Linear(WIDTH + s, WIDTH))
            for s in range(count)
        ]


def small_batches(count: int, seed: int = 1) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        tuple(torch.randn(BATCH, WIDTH, generator=generator) for _ in range(2))  # type: ignore
        for _ in range(count)
    ]


def small_loss(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).square().mean()


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.02)


def weights(module: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def same(a: nn.Module, b: nn.Module) -> bool:
    """Bit for bit."""
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def close(a: nn.Module, b: nn.Module) -> bool:
    """But for the order of a sum."""
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return all(torch.allclose(x, y, rtol=1e-3, atol=1e-4) for x, y in pairs)

"""Plain, sequential one-bit methods: all ranks in one process, in doubles, one tensor per bucket
entry. Nothing here is shared with the optimizers."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Gradient = Callable[[int, int, list[Tensor]], list[Tensor]]  # (rank, step, weights) -> gradients


def sign(z: Tensor) -> Tensor:
    return torch.where(z >= 0, 1.0, -1.0).to(z.dtype)


def one_bit(z: Tensor) -> Tensor:
    return sign(z) * z.norm() / math.sqrt(max(1, z.numel()))


@dataclass
class Exchange:
    """The compressed mean with the errors of both sides, for one bucket."""

    size: int
    worker: list[Tensor] = field(default_factory=list)
    owner: list[Tensor] = field(default_factory=list)

    def mean(self, payloads: list[Tensor]) -> Tensor:
        if self.size == 1:
            return payloads[0].clone()
        numel = payloads[0].numel()
        part = math.ceil(numel / (8 * self.size)) * 8
        if not self.worker:
            self.worker = [torch.zeros_like(p) for p in payloads]
            self.owner = [torch.zeros_like(c) for c in payloads[0].split(part)]
        sent = []
        for rank, payload in enumerate(payloads):
            z = payload + self.worker[rank]
            sent.append(one_bit(z))
            self.worker[rank] = z - sent[-1]
        parts = []
        for index, chunk in enumerate(torch.stack(sent).mean(0).split(part)):
            a = chunk + self.owner[index]
            parts.append(one_bit(a))
            self.owner[index] = a - parts[-1]
        return torch.cat(parts)


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def split(values: Tensor, like: list[Tensor]) -> list[Tensor]:
    pieces = values.split([t.numel() for t in like])
    return [p.view(t.shape) for p, t in zip(pieces, like, strict=True)]


def floored(v: Tensor, like: list[Tensor] | None = None, share: float = 0.01) -> Tensor:
    """A flat variance, lifted to a share of the mean of each tensor, or of all of them."""
    tensors = [v] if like is None else split(v, like)
    return flat([w.clamp(min=share * float(w.mean())) for w in tensors])


def forgotten(squares: list[float], t: int, b2: float) -> float:
    """v at step t over v at the freeze, if gradients stay as in the last quarter before it."""
    quarter = squares[-max(1, len(squares) // 4) :]
    level = sum(quarter) / len(quarter)

    def hat(stream: list[float]) -> float:
        s = 0.0
        for square in stream:
            s = b2 * s + (1 - b2) * square
        return s / (1 - b2 ** len(stream))

    level = min(level, hat(squares))
    return min(1.0, hat(squares + [level] * (t - len(squares))) / hat(squares))


def adam(
    start: list[Tensor],
    gradient: Gradient,
    size: int,
    steps: int,
    lr: float,
    freeze_at: int,
    *,
    lam: float = 0.0,
    correct: bool = True,
    whiten: bool = False,
    delayed_step: bool = False,
    forget: bool = False,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
) -> list[Tensor]:
    """1-bit Adam with all tensors in one bucket, in the given order. If `delayed_step`, a step
    after the freeze uses the momentum of the step before and goes b1 of it ahead; in the end the
    last one is used, and nothing is ahead."""
    x = [t.double() for t in start]
    m, v = torch.zeros_like(flat(x)), torch.zeros_like(flat(x))
    exchange = Exchange(size)
    waiting = torch.zeros_like(m)
    squares: list[float] = []
    for t in range(1, steps + 1):
        gradients = [flat(gradient(rank, t, x)) for rank in range(size)]
        if t <= freeze_at:
            g = torch.stack(gradients).mean(0)
            squares.append(float(g.square().sum()))
            m = b1 * m + (1 - b1) * g
            v = b2 * v + (1 - b2) * g * g
            hat = v / (1 - b2**t) if correct else v
            if t == freeze_at:
                frozen = floored(hat, x if whiten else None)
                if delayed_step:
                    waiting = b1 * m / (1 - b1**t if correct else 1.0) / (frozen.sqrt() + eps)
        else:
            before = m
            size_of = frozen.sqrt() + eps if whiten else torch.ones_like(frozen)
            m = size_of * exchange.mean([(b1 * m + (1 - b1) * g) / size_of for g in gradients])
            hat = frozen
            if forget and correct:
                hat = frozen * forgotten(squares, t, b2)
        unit = 1 / (hat.sqrt() + eps) / (1 - b1**t if correct else 1.0)
        u = m * unit
        if delayed_step and t > freeze_at:
            waiting, u = ((1 + b1) * m - b1 * before) * unit, waiting
        x = [w - lr * (d + lam * w) for w, d in zip(x, split(u, x), strict=True)]
    if delayed_step:
        last = waiting - b1 * m * unit
        x = [w - lr * (d + lam * w) for w, d in zip(x, split(last, x), strict=True)]
    return x


def factor(
    u0: Tensor,
    u: Tensor,
    ratio: float,
    lam: float,
    before: float,
    bounds: tuple[float, float],
    threshold: float,
) -> float:
    """1-bit LAMB's r of a tensor, from the ratio of its variances and the r of the step before."""
    r = ratio
    if lam > 0:
        rho = min(1.0, float(u0.norm() / u.norm()))
        r = r * rho + 1 - rho
    r = min(max(r, bounds[0]), bounds[1])
    return min(max(r, before * (1 - threshold)), before * (1 + threshold))


def lamb(
    start: list[Tensor],
    gradient: Gradient,
    size: int,
    steps: int,
    lr: float,
    freeze_at: int,
    *,
    lam: float = 0.0,
    correct: bool = True,
    c_bounds: tuple[float, float] = (0.01, 10.0),
    b1: float = 0.9,
    b2: float = 0.999,
    b3: float = 0.9,
    eps: float = 1e-8,
    r_bounds: tuple[float, float] = (0.5, 4.0),
    r_threshold: float = 0.1,
    delayed_step: bool = False,
) -> list[Tensor]:
    """1-bit LAMB with all tensors in one bucket, in this order; `delayed_step` as in `adam`."""
    x = [t.double() for t in start]
    m = [torch.zeros_like(t) for t in x]
    v = [torch.zeros_like(t) for t in x]
    count = len(x)
    c_avg, r_prev, k = [0.0] * count, [1.0] * count, [1.0] * count
    fresh: list[Tensor] = []
    exchange = Exchange(size)
    waiting: list[tuple[Tensor, float]] = []

    def move(landed: list[tuple[Tensor, float]]) -> None:
        for i, (u0, ratio) in enumerate(landed):
            u = u0 + lam * x[i]
            r_prev[i] = factor(u0, u, ratio, lam, r_prev[i], r_bounds, r_threshold)
            x[i] = x[i] - lr * r_prev[i] * c_avg[i] * u

    for t in range(1, steps + 1):
        gradients = [gradient(rank, t, x) for rank in range(size)]
        first = 1 - b1**t if correct else 1.0
        if t <= freeze_at:
            second = 1 - b2**t if correct else 1.0
            for i in range(count):
                g = sum(each[i] for each in gradients) / size
                m[i] = b1 * m[i] + (1 - b1) * g
                v[i] = b2 * v[i] + (1 - b2) * g * g
                u = m[i] / first / ((v[i] / second).sqrt() + eps) + lam * x[i]
                c = 1.0
                if float(x[i].norm()) > 0 and float(u.norm()) > 0:
                    c = min(max(float(x[i].norm() / u.norm()), c_bounds[0]), c_bounds[1])
                c_avg[i] = b3 * c_avg[i] + (1 - b3) * c
                x[i] = x[i] - lr * c * u
            if t == freeze_at:
                hats = [w / second for w in v]
                v = [h.clamp(min=0.01 * float(h.mean())) for h in hats]
                fresh = [h.clone() for h in v]
                sizes = [float(w.norm()) / math.sqrt(w.numel()) for w in m]
                moving = [s for s in sizes if s > 0]
                k = [sum(moving) / len(moving) / s if s > 0 else 1.0 for s in sizes]
                c_avg = [c / (1 - b3**t) for c in c_avg]
                if delayed_step:
                    roots = [w.sqrt() + eps for w in v]
                    waiting = [
                        (b1 * mm / first / root, 1.0) for mm, root in zip(m, roots, strict=True)
                    ]
            continue
        payloads = [
            flat([kk * (b1 * mm + (1 - b1) * g) for kk, mm, g in zip(k, m, each, strict=True)])
            for each in gradients
        ]
        arrived = split(exchange.mean(payloads), x)
        landed = []
        for i in range(count):
            new = arrived[i] / k[i]
            g = (new - b1 * m[i]) / (1 - b1)
            fresh[i] = b2 * fresh[i] + (1 - b2) * g * g
            used = (1 + b1) * new - b1 * m[i] if delayed_step else new
            m[i] = new
            ratio = float(((v[i].sqrt() + eps) / (fresh[i].sqrt() + eps)).max())
            landed.append((used / first / (v[i].sqrt() + eps), ratio))
        if delayed_step:
            waiting, landed = landed, waiting
        move(landed)
    ahead = [b1 * mm / first / (w.sqrt() + eps) for mm, w in zip(m, v, strict=True)]
    move(
        [(u - a, ratio) for (u, ratio), a in zip(waiting, ahead, strict=True)]
        if delayed_step
        else []
    )
    return x


def sharded(
    kind: str,
    start: list[Tensor],
    gradient: Gradient,
    size: int,
    steps: int,
    lr: float,
    freeze_at: int,
    *,
    lam: float = 0.0,
    correct: bool = True,
    c_bounds: tuple[float, float] = (0.01, 10.0),
    b1: float = 0.9,
    b2: float = 0.999,
    b3: float = 0.9,
    eps: float = 1e-8,
    r_bounds: tuple[float, float] = (0.5, 4.0),
    r_threshold: float = 0.1,
) -> list[Tensor]:
    """Adam or LAMB with m and v at the owners, all tensors in one bucket: gradients to the owners
    in one bit, directions back in one bit. In one process the owners' parts are one buffer."""
    x = [t.double() for t in start]
    m, v = torch.zeros_like(flat(x)), torch.zeros_like(flat(x))
    part = math.ceil(m.numel() / (8 * size)) * 8
    workers = [torch.zeros_like(m) for _ in range(size)]
    owners = [torch.zeros_like(chunk) for chunk in m.split(part)]
    k, fresh = torch.ones_like(m), v
    c_avg, r_prev = [0.0] * len(x), [1.0] * len(x)
    squares: list[float] = []
    for t in range(1, steps + 1):
        gradients = [flat(gradient(rank, t, x)) for rank in range(size)]
        first, second = (1 - b1**t, 1 - b2**t) if correct else (1.0, 1.0)
        if t <= freeze_at:
            g = torch.stack(gradients).mean(0)
            squares.append(float(g.square().sum()))
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            d = m / first / ((v / second).sqrt() + eps)
        else:
            sent = []
            for rank in range(size):
                z = k * gradients[rank] + workers[rank]
                sent.append(z if size == 1 else one_bit(z))
                workers[rank] = z - sent[-1]
            g = torch.stack(sent).mean(0) / k
            m, fresh = b1 * m + (1 - b1) * g, b2 * fresh + (1 - b2) * g * g
            made = []
            forget = kind == "adam" and correct
            phi = forgotten(squares, t, b2) if forget else 1.0
            for index, chunk in enumerate((m / first / ((phi * v).sqrt() + eps)).split(part)):
                a = chunk + owners[index]
                made.append(a if size == 1 else one_bit(a))
                owners[index] = a - made[-1]
            d = torch.cat(made)
        tensors = zip(x, split(d, x), strict=True)
        if kind == "adam":
            x = [w - lr * (u + lam * w) for w, u in tensors]
        elif t <= freeze_at:
            for i, (w, u) in enumerate(list(tensors)):
                u = u + lam * w
                c = min(max(float(w.norm() / u.norm()), c_bounds[0]), c_bounds[1])
                c_avg[i] = b3 * c_avg[i] + (1 - b3) * c
                x[i] = w - lr * c * u
        else:
            ratios = split((v.sqrt() + eps) / (fresh.sqrt() + eps), x)
            for i, (w, u0) in enumerate(list(tensors)):
                u, ratio = u0 + lam * w, float(ratios[i].max())
                r_prev[i] = factor(u0, u, ratio, lam, r_prev[i], r_bounds, r_threshold)
                x[i] = w - lr * r_prev[i] * c_avg[i] * u
        if t == freeze_at:
            v = v / second
            sizes = [float(w.mean()) ** 0.5 for w in split(v, x)]
            k = flat(
                [torch.full_like(w, sum(sizes) / len(x) / s) for w, s in zip(x, sizes, strict=True)]
            )
            v = floored(v, x)
            fresh, c_avg = v.clone(), [c / (1 - b3**t) for c in c_avg]
    return x


def zero_one(
    start: list[Tensor],
    gradient: Gradient,
    size: int,
    steps: int,
    lr: float,
    freeze_at: int,
    double_after: int,
    local_double_after: int,
    longest: int,
    *,
    lam: float = 0.0,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
) -> list[list[Tensor]]:
    """0/1 Adam with all tensors in one bucket; the weights of every rank, before any finish."""
    like = [t.double() for t in start]
    x = [flat(like) for _ in range(size)]
    m = [torch.zeros_like(x[0]) for _ in range(size)]
    v = torch.zeros_like(x[0])
    exchange, refreshes, next_refresh = Exchange(size), 0, 1
    since = 0
    for t in range(1, steps + 1):
        g = [flat(gradient(rank, t, split(x[rank], like))) for rank in range(size)]
        first = 1 - b1**t
        if t <= freeze_at:
            if t >= next_refresh:
                mean = torch.stack(g).mean(0)
                v = b2 * v + (1 - b2) * mean * mean
                refreshes += 1
                next_refresh = t + 2 ** (refreshes // double_after)
            else:
                mean = exchange.mean(g)
            hat = v / (1 - b2**refreshes)
            if t > double_after:
                hat = floored(hat)
            common = b1 * m[0] + (1 - b1) * mean
            after = x[0] - lr * (common / first / (hat.sqrt() + eps) + lam * x[0])
            x, m = [after.clone() for _ in range(size)], [common.clone() for _ in range(size)]
            if t == freeze_at:
                frozen = v / (1 - b2**refreshes)
                frozen = floored(frozen).sqrt() + eps
                exchange = Exchange(size)
                anchor, weight = after.clone(), 0.0
                update = [torch.zeros_like(after) for _ in range(size)]
            continue
        keep = 1 - lr * lam
        for i in range(size):
            m[i] = b1 * m[i] + (1 - b1) * g[i]
            x[i] = keep * x[i] - lr * m[i] / first / frozen
            update[i] = keep * update[i] + lr * m[i] / first
        anchor, weight, since = keep * anchor, keep * weight + lr / first, since + 1
        begun = t - since - freeze_at  # local steps before this round
        if since >= min(longest, 2 ** (begun // local_double_after)):
            mean = exchange.mean(update)
            anchor = anchor - mean / frozen
            x = [anchor.clone() for _ in range(size)]
            m = [mean / weight for _ in range(size)]
            update = [torch.zeros_like(mean) for _ in range(size)]
            weight, since = 0.0, 0
    return [split(each, like) for each in x]


def problem(size: int, shapes: list[tuple[int, ...]]) -> tuple[list[Tensor], Gradient]:
    """A quadratic with a minimum of its own for each rank, and noise by step."""
    generator = torch.Generator().manual_seed(5)
    start = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    centres = [
        [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
        for _ in range(size)
    ]
    scales = [10.0**-k for k in range(len(shapes))]  # tensors whose gradients differ in size

    def gradient(rank: int, step: int, weights: list[Tensor]) -> list[Tensor]:
        seed = torch.Generator().manual_seed(1000 * step + rank)
        return [
            scale
            * (w.double() - c + 0.1 * torch.randn(w.shape, generator=seed, dtype=torch.float64))
            for w, c, scale in zip(weights, centres[rank], scales, strict=True)
        ]

    return start, gradient


SHAPES: list[tuple[int, ...]] = [(4, 5), (7,), (3, 2, 2)]


def run(
    build: Callable[..., torch.optim.Optimizer],
    size: int,
    steps: int,
    dtype: torch.dtype = torch.float32,
    shapes: list[tuple[int, ...]] = SHAPES,
    **settings: Any,
) -> tuple[list[nn.Parameter], Any]:
    """This rank's weights after `steps` steps of an optimizer on the problem."""
    import thinwire as tw

    rank = tw.init().rank
    start, gradient = problem(size, shapes)
    weights = [nn.Parameter(t.to(dtype)) for t in start]
    optimizer = build(weights, **settings)
    advance(optimizer, weights, gradient, rank, 1, steps)
    return weights, optimizer


def advance(
    optimizer: Any, weights: list[nn.Parameter], gradient: Gradient, rank: int, a: int, b: int
) -> None:
    for step in range(a, b + 1):
        given = gradient(rank, step, [w.detach() for w in weights])
        for w, g in zip(weights, given, strict=True):
            w.grad = g.to(w.dtype)
        optimizer.step()

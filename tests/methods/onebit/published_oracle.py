"""1-bit Adam, 1-bit LAMB and 0/1 Adam as they were published, and no more: no bias correction, no
floor, no de-biased average. All ranks in one process, in doubles; one scale for all tensors.

Papers: arXiv 2102.02888 (Algorithm 1), 2104.06069 (Algorithm 1), 2202.06009 (with the schedules of
its released code: refreshes of the variance, then local steps).
"""

import math

import torch
from torch import Tensor

from tests.methods.onebit.one_bit_oracle import Exchange, Gradient, flat, split

EPS = 1e-8


def adam(
    start: list[Tensor], gradient: Gradient, size: int, steps: int, lr: float, freeze_at: int
) -> list[Tensor]:
    x, like = flat(start), start
    m, v = torch.zeros_like(x), torch.zeros_like(x)
    exchange = Exchange(size)
    for t in range(1, steps + 1):
        g = [flat(gradient(rank, t, split(x, like))) for rank in range(size)]
        if t <= freeze_at:
            mean = sum(g) / size
            m = 0.9 * m + 0.1 * mean
            v = 0.999 * v + 0.001 * mean * mean
        else:
            m = exchange.mean([0.9 * m + 0.1 * each for each in g])
        x = x - lr * m / (v.sqrt() + EPS)
    return split(x, like)


def lamb(
    start: list[Tensor],
    gradient: Gradient,
    size: int,
    steps: int,
    lr: float,
    freeze_at: int,
    lam: float,
) -> list[Tensor]:
    x = [t.clone() for t in start]
    m, v = ([torch.zeros_like(t) for t in x] for _ in range(2))
    c_avg, r = [0.0] * len(x), [1.0] * len(x)
    exchange = Exchange(size)
    for t in range(1, steps + 1):
        g = [gradient(rank, t, x) for rank in range(size)]
        if t <= freeze_at:
            for i in range(len(x)):
                mean = sum(each[i] for each in g) / size
                m[i] = 0.9 * m[i] + 0.1 * mean
                v[i] = 0.999 * v[i] + 0.001 * mean * mean
                u = m[i] / (v[i].sqrt() + EPS) + lam * x[i]
                c = min(max(float(x[i].norm() / u.norm()), 0.01), 10.0)
                c_avg[i] = 0.9 * c_avg[i] + 0.1 * c
                x[i] = x[i] - lr * c * u
            fresh = [w.clone() for w in v]
            sizes = [float(w.norm()) / math.sqrt(w.numel()) for w in m]
            k = [sum(sizes) / len(sizes) / s for s in sizes]
            continue
        sent = [flat([k[i] * (0.9 * m[i] + 0.1 * each[i]) for i in range(len(x))]) for each in g]
        arrived = split(exchange.mean(sent), x)
        for i in range(len(x)):
            new = arrived[i] / k[i]
            rebuilt = (new - 0.9 * m[i]) / 0.1
            fresh[i] = 0.999 * fresh[i] + 0.001 * rebuilt * rebuilt
            m[i] = new
            u0 = m[i] / (v[i].sqrt() + EPS)
            u = u0 + lam * x[i]
            ratio = float(((v[i].sqrt() + EPS) / (fresh[i].sqrt() + EPS)).max())
            rho = min(1.0, float(u0.norm() / u.norm())) if lam > 0 else 1.0
            now = min(max(ratio * rho + 1 - rho, 0.5), 4.0)
            r[i] = min(max(now, 0.9 * r[i]), 1.1 * r[i])
            x[i] = x[i] - lr * r[i] * c_avg[i] * u
    return x


def zero_one(
    start: list[Tensor],
    gradient: Gradient,
    size: int,
    steps: int,
    lr: float,
    freeze_at: int,
    var_update_scaler: int,
    local_step_scaler: int,
    local_step_clipper: int,
) -> list[list[Tensor]]:
    """The weights of every rank."""
    like = start
    x = [flat(start) for _ in range(size)]
    m = [torch.zeros_like(x[0]) for _ in range(size)]
    v = torch.zeros_like(x[0])
    exchange, refreshes, next_refresh = Exchange(size), 0, 1
    interval, since = 1, 0
    for t in range(1, steps + 1):
        g = [flat(gradient(rank, t, split(x[rank], like))) for rank in range(size)]
        if t <= freeze_at:
            if t == next_refresh:
                mean = sum(g) / size
                v = 0.999 * v + 0.001 * mean * mean
                refreshes += 1
                next_refresh += 2 ** (refreshes // var_update_scaler)
            else:
                mean = exchange.mean(g)
            m = [0.9 * m[0] + 0.1 * mean] * size
            x = [x[0] - lr * m[0] / (v.sqrt() + EPS)] * size
            anchor, sums, total = x[0], [torch.zeros_like(v)] * size, 0.0
            if t == freeze_at:
                exchange = Exchange(size)
            continue
        m = [0.9 * mm + 0.1 * each for mm, each in zip(m, g, strict=True)]
        x = [xx - lr * mm / (v.sqrt() + EPS) for xx, mm in zip(x, m, strict=True)]
        sums = [s + lr * mm for s, mm in zip(sums, m, strict=True)]
        total, since = total + lr, since + 1
        if since == interval:
            mean = exchange.mean(sums)
            anchor = anchor - mean / (v.sqrt() + EPS)
            x, m = [anchor] * size, [mean / total] * size
            sums, total, since = [torch.zeros_like(v)] * size, 0.0, 0
            interval = min(local_step_clipper, 2 ** ((t - freeze_at) // local_step_scaler))
    return [split(each, like) for each in x]

"""Plain, sequential sparse averaging: all replicas in one process, one flat vector each.

Written from the rules of sparse_average.py, with nothing shared with it but which coordinates a
round has: those are given as masks, and tests of the partition say what must hold for them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

Gradient = Callable[[int, int, Tensor], Tensor]  # (replica, step, weights) -> gradient
Mask = Callable[[int], Tensor]  # round -> which coordinates take part
Lag = Callable[[int, int], int]  # (replica, round) -> steps until it lands


@dataclass
class Rules:
    delay: int
    correction: str = "ema"
    every: int = 1
    steps: int | None = None
    ema: tuple[float, float] = (0.5, 0.5)


@dataclass
class InAir:
    number: int
    step: int
    mask: Tensor
    own: Tensor
    mean: Tensor


@dataclass
class Replica:
    weights: Tensor
    rate: Tensor  # average drift per step
    in_air: list[InAir] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)

    def land(self, step: int, rules: Rules) -> None:
        flight = self.in_air.pop(0)
        lag, mask = step - flight.step, flight.mask
        self.lags.append(lag)
        drift = self.weights[mask] - flight.own
        if rules.correction == "overwrite" or lag == 0:
            drift = torch.zeros_like(drift)
        elif rules.correction == "ema":
            lam = weight(step, rules)
            self.rate[mask] = (1 - lam) * self.rate[mask] + lam * drift / lag
            drift = lag * self.rate[mask]
        self.weights[mask] = flight.mean + drift


def weight(step: int, rules: Rules) -> float:
    start, end = rules.ema
    if rules.steps is None or step / rules.steps <= 1 / 30:
        return start
    share = (step / rules.steps - 1 / 30) / (29 / 30)
    return end + (start - end) * (1 + math.cos(math.pi * min(1.0, share))) / 2


def run(
    start: Tensor,
    gradient: Gradient,
    masks: Mask,
    replicas: int,
    steps: int,
    lr: float,
    rules: Rules,
    lag: Lag | None = None,
) -> list[Replica]:
    """Every replica after `steps` steps of SGD with the method, before any finish."""
    wanted = lag or (lambda replica, number: rules.delay)
    everyone = [Replica(start.clone(), torch.zeros_like(start)) for _ in range(replicas)]
    for step in range(1, steps + 1):
        for index, replica in enumerate(everyone):
            replica.weights -= lr * gradient(index, step, replica.weights)
        for index, replica in enumerate(everyone):
            while replica.in_air and step - replica.in_air[0].step >= min(
                rules.delay, wanted(index, replica.in_air[0].number)
            ):
                replica.land(step, rules)
        if step % rules.every == 0:
            _launch(everyone, step, step // rules.every - 1, masks)
        if rules.delay == 0:
            for replica in everyone:
                while replica.in_air:
                    replica.land(step, rules)
    return everyone


def _launch(everyone: list[Replica], step: int, number: int, masks: Mask) -> None:
    mask = masks(number)
    sent = [replica.weights[mask].clone() for replica in everyone]
    mean = sum(sent[1:], sent[0]) / len(sent)
    for replica, own in zip(everyone, sent, strict=True):
        replica.in_air.append(InAir(number, step, mask, own, mean))


def mean(everyone: list[Replica]) -> Tensor:
    return torch.stack([replica.weights for replica in everyone]).mean(0)

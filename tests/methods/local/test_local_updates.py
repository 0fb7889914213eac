"""The engine on real ranks against the sequential oracle, and the identities between methods."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.methods.local import local_oracle as oracle
from tests.methods.local.local_oracle import Settings
from thinwire.methods.local.outer import largest_stable_lr
from thinwire.wire.codecs import ErrorFeedback, Int4

NUMEL, LR = 50, 0.05


def engine(settings: Settings, steps: int, replicas: int, **more: Any) -> tuple[Tensor, dict]:
    """One rank's weights after `steps`, before any finish, and what its account says."""
    tw.init()
    weights = nn.Parameter(oracle.start_point(NUMEL))
    inner = torch.optim.SGD([weights], lr=LR)
    outer = tw.Outer(
        lr=settings.lr,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        penalty=settings.penalty,  # type: ignore[arg-type]
        clip=settings.clip,
        clip_by=settings.clip_by,  # type: ignore[arg-type]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = tw.LocalUpdates(
            inner,
            every=settings.every,
            delay=settings.delay,  # type: ignore[arg-type]
            own_weight=settings.own_weight,
            merge=settings.merge,
            outer=outer,
            **more,
        )
    gradient = oracle.quadratic(replicas, NUMEL)
    rank = optimizer.wire.rank
    for step in range(1, steps + 1):
        weights.grad = gradient(rank, step, weights.detach())
        optimizer.step()
    return weights.detach().clone(), optimizer.account.snapshot()


CASES = {
    "averaging": Settings(every=5),
    "slowmo": Settings(every=4, momentum=0.5),
    "diloco": Settings(every=6, lr=0.7, momentum=0.9, nesterov=True),
    "streaming": Settings(every=6, delay=2, merge=0.5, lr=0.4, momentum=0.9, nesterov=True),
    "delayed, no merge": Settings(every=6, delay=5),
    "co2": Settings(every=4, delay="round", momentum=0.2, penalty="gap", clip=2.0),
    "co2 clipped by value": Settings(
        every=4, delay="round", momentum=0.2, clip=0.05, clip_by="value"
    ),
    "co2 constant": Settings(every=4, delay="round", momentum=0.5, penalty=2.0),
    "co2 without momentum": Settings(every=4, delay="round", lr=0.5),
    "late nesterov": Settings(every=4, delay="round", lr=0.2, momentum=0.5, nesterov=True),
    "eager": Settings(
        every=4, delay="round", own_weight=1 / 3, lr=0.4, momentum=0.9, nesterov=True
    ),
    "overlapped": Settings(every=4, delay="round", own_weight=1.0, momentum=0.5),
    "cocod": Settings(every=4, delay="round", own_weight=1.0),
}


@pytest.mark.parametrize("name", CASES)
def test_the_engine_equals_the_oracle(ranks, name: str) -> None:
    settings, steps, replicas = CASES[name], 31, 3
    answers = ranks(replicas, engine, settings, steps, replicas)
    expected, _ = oracle.run(
        oracle.start_point(NUMEL), oracle.quadratic(replicas, NUMEL), replicas, steps, LR, settings
    )
    for (weights, _), wanted in zip(answers, expected, strict=True):
        torch.testing.assert_close(weights, wanted, rtol=1e-5, atol=1e-6)
    transfers = [account["transfers"] for _, account in answers]
    assert len(set(transfers)) == 1, "ranks disagree on how often they sent"
    # one for each round, and one small reduction for the check of the start
    assert transfers[0] >= steps // settings.every > 0


def outer_momentum_bound(clip_by: str, clip: float) -> tuple[float, float]:
    tw.init()
    weights = nn.Parameter(torch.zeros(10))
    optimizer = tw.CO2(
        torch.optim.SGD([weights], lr=1.0),
        every=1,
        clip=clip,
        clip_by=clip_by,  # type: ignore[arg-type]
        penalty=2.0,
    )
    largest = norm = 0.0
    for step in range(12):
        # A burst: one round is a hundred times larger than the others.
        weights.grad = torch.full((10,), 100.0 if step == 6 else 1.0)
        optimizer.step()
        momentum = optimizer.fragments[0].outer.momentum
        assert momentum is not None
        largest = max(largest, float(momentum.abs().max()))
        norm = max(norm, float(momentum.norm()))
    return largest, norm


def test_clipping_changes_the_momentum_when_it_must(ranks) -> None:
    """CO2's released code drops the result of its clamp: here the bound must hold and bind."""
    for largest, _ in ranks(2, outer_momentum_bound, "value", 0.3):
        assert largest == pytest.approx(0.3)
    for _, norm in ranks(2, outer_momentum_bound, "norm", 2.0):
        # |d| is about 3.2 but for the burst of 316, whose own share of the average is a tenth
        assert norm <= 2.0 * (0.9 * 3.3 + 0.1 * 320) / 0.8


def test_own_weight_1_follows_the_blocking_method_on_average() -> None:
    """Gradients linear in the weights: the mean over replicas obeys SlowMo's recursion exactly."""
    replicas, every, rounds = 4, 3, 8
    gradient = oracle.quadratic(replicas, NUMEL)
    start = oracle.start_point(NUMEL)
    late = Settings(every=every, delay="round", own_weight=1.0, momentum=0.5)
    blocking = Settings(every=every, momentum=0.5)
    for count in range(1, rounds + 1):
        fresh, _ = oracle.run(start, gradient, replicas, every * count, LR, late)
        slowmo, _ = oracle.run(start, gradient, replicas, every * count, LR, blocking)
        torch.testing.assert_close(
            oracle.mean(fresh), slowmo[0], rtol=1e-4, atol=1e-5, msg=f"round {count}"
        )


def test_cocod_is_own_weight_1_without_momentum() -> None:
    """x_i <- mean_j x_j,t + (y_i - x_i,t), written out."""
    replicas, every = 3, 4
    gradient = oracle.quadratic(replicas, NUMEL)
    start = oracle.start_point(NUMEL)
    x = [start.clone() for _ in range(replicas)]
    for step in range(1, 25, every):
        y = list(x)
        for inner in range(step, step + every):
            y = [y[i] - LR * gradient(i, inner, y[i]) for i in range(replicas)]
        centre = oracle.mean(x)
        x = [centre + (y[i] - x[i]) for i in range(replicas)]
    settings = Settings(every=every, delay="round", own_weight=1.0)
    expected, _ = oracle.run(start, gradient, replicas, 24, LR, settings)
    for ours, wanted in zip(x, expected, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("share", "converges"), [(0.9, True), (1.1, False)])
@pytest.mark.parametrize("momentum", [0.0, 0.2, 0.5])
def test_the_stability_limit_of_a_stale_mean(share: float, converges: bool, momentum: float):
    """On a quadratic whose round removes the whole error the limit is 1 - momentum, no more."""
    limit = largest_stable_lr(momentum, False, 0.0)
    assert limit == pytest.approx(1 - momentum, abs=1e-6)
    settings = Settings(every=1, delay="round", lr=share * limit, momentum=momentum)

    def gradient(replica: int, step: int, weights: Tensor) -> Tensor:
        return weights  # with an inner lr of 1, one step removes everything

    last, _ = oracle.run(torch.ones(3), gradient, 2, 400, 1.0, settings)
    assert (float(last[0].norm()) < 1e-2) == converges


def test_known_limits_of_stability() -> None:
    assert largest_stable_lr(0.5, False, 1.0) == pytest.approx(2 * 1.5, abs=1e-6)  # synchronous
    assert largest_stable_lr(0.9, True, 0.0) < 0.7, "a late DiLoCo is known to be unstable"


def test_unstable_settings_are_warned_of_once_with_values_that_work() -> None:
    inner = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"outer_lr <= 0\.64") as caught:
        tw.CO2(inner, penalty=1.0)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tw.CO2(inner)
        tw.CO2(inner, penalty=1.0, outer_lr=0.64)
        tw.Overlapped(inner)


def coded(settings: Settings, steps: int, replicas: int) -> tuple[Tensor, dict]:
    return engine(settings, steps, replicas, codec=ErrorFeedback(Int4()))


def test_a_coarse_codec_with_error_feedback_stays_near_the_dense_run(ranks) -> None:
    settings = CASES["overlapped"]
    expected, _ = oracle.run(
        oracle.start_point(NUMEL), oracle.quadratic(2, NUMEL), 2, 40, LR, settings
    )
    for (weights, _), wanted in zip(ranks(2, coded, settings, 40, 2), expected, strict=True):
        assert float((weights - wanted).norm()) < 0.1 * float(wanted.norm())


BAD = [
    ({"every": 0}, r"every=...\) takes"),
    ({"every": 4, "delay": 4}, "longer than"),
    ({"every": 4, "delay": -1}, r"delay=...\) takes"),
    ({"every": 4, "fragments": 3}, r"do not divide|fragments=...\) takes"),
    ({"every": 4, "own_weight": 1.5, "delay": "round"}, r"own_weight=...\) takes"),
    ({"every": 4, "own_weight": 0.5}, "needs delay"),
    ({"every": 4, "merge": 0.5}, "needs a delay in steps"),
    ({"every": 4, "fragments": 9}, r"fragments=...\) takes 1 to"),
]


@pytest.mark.parametrize(("settings", "message"), BAD)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    inner = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ValueError, match=message):
        tw.LocalUpdates(inner, **settings)


def test_bad_outer_settings_are_refused() -> None:
    for settings in ({"lr": 0}, {"momentum": 1.0}, {"penalty": 0.5}, {"penalty": "x"}, {"clip": 0}):
        with pytest.raises(ValueError, match="takes"):
            tw.Outer(**settings)  # type: ignore[arg-type]


def different_start() -> str:
    tw.init()
    weights = nn.Parameter(torch.full((4,), float(tw.Wire().rank == 2)))
    optimizer = tw.CO2(torch.optim.SGD([weights], lr=0.1))
    weights.grad = torch.zeros(4)
    with pytest.raises(ValueError, match="the weights at the first step differ") as error:
        optimizer.step()
    return str(error.value)


def test_replicas_that_start_apart_are_named(ranks) -> None:
    for message in ranks(3, different_start):
        assert "ranks 0, 1" in message
        assert "rank 2" in message


SCHEDULES = [lambda step: 0.1 * 0.97**step, lambda step: 0.02 * (1 + step / 10)]


def slowmo_in_groups() -> list[Tensor]:
    """Two parameter groups whose rates fall and rise, tensors of both in turn."""
    tw.init()
    weights = [nn.Parameter(part.clone()) for part in oracle.start_point(NUMEL).split(10)]
    groups = [{"params": weights[0::2], "lr": 0.1}, {"params": weights[1::2], "lr": 0.1}]
    optimizer = tw.SlowMo(torch.optim.SGD(groups), every=4)
    gradient = oracle.quadratic(2, NUMEL)
    for step in range(1, 25):
        for group, schedule in zip(optimizer.param_groups, SCHEDULES, strict=True):
            group["lr"] = schedule(step)
        whole = torch.cat([w.detach() for w in weights])
        parts = gradient(optimizer.wire.rank, step, whole).split(10)
        for weight, part in zip(weights, parts, strict=True):
            weight.grad = part.clone()
        optimizer.step()
    return [w.detach().clone() for w in weights]


def slowmo_as_published(rates: Callable[[int], Tensor]) -> Tensor:
    """u = b u + (x - mean y) / lr ;  x = x - lr u, with the lr of each value's own group."""
    gradient, x = oracle.quadratic(2, NUMEL), oracle.start_point(NUMEL)
    u = torch.zeros(NUMEL)
    for first in range(1, 25, 4):
        y = [x.clone(), x.clone()]
        for step in range(first, first + 4):
            y = [y[i] - rates(step) * gradient(i, step, y[i]) for i in range(2)]
        u = 0.5 * u + (x - oracle.mean(y)) / rates(first + 3)
        x = x - rates(first + 3) * u
    return x


def test_slowmo_follows_the_schedule_of_each_group(ranks) -> None:
    group = torch.arange(NUMEL) // 10 % 2

    def rates(step: int) -> Tensor:
        return torch.tensor([schedule(step) for schedule in SCHEDULES])[group]

    wanted = slowmo_as_published(rates)
    for got in ranks(2, slowmo_in_groups):
        torch.testing.assert_close(torch.cat(got), wanted, rtol=1e-4, atol=1e-5)

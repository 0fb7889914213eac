"""Look-ahead: equation 10 is NAdam's numerator; the optimizer; the settings without a stash."""

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from thinwire.pipeline import AsyncNAdam, Schedule, SimulatedPipeline, stage_settings

STEPS, G, LR = 40, 0.9, 0.05


def gradient(x: torch.Tensor) -> torch.Tensor:
    """Of a function that is no quadratic."""
    return torch.tensor([1.0, 5.0, 0.3], dtype=torch.float64) * x + x.pow(3) - 0.2


def start() -> torch.Tensor:
    return torch.tensor([1.0, -0.7, 2.0], dtype=torch.float64)


def equation_10(delay: int) -> list[torch.Tensor]:
    """x_t = w_t + d_t, where w and d are the paper's."""
    weights = [start(), start()]  # w_{-1} = w_0
    looked = []
    for t in range(STEPS):
        d = G * (weights[-1] - weights[-2])
        looked.append(weights[-1] + d)
        at = looked[max(0, t - delay)]
        weights.append(weights[-1] + d - LR * (1 - G) * gradient(at))
    return looked


def numerator_of_nadam(delay: int) -> list[torch.Tensor]:
    x, m = start(), torch.zeros(3, dtype=torch.float64)
    seen = []
    for t in range(STEPS):
        seen.append(x)
        g = gradient(seen[max(0, t - delay)])
        m = G * m + (1 - G) * g
        x = x - LR * (G * m + (1 - G) * g)
    return seen


@pytest.mark.parametrize("delay", [0, 1, 3, 7])
def test_equation_10_is_the_numerator_of_nadam(delay: int) -> None:
    for a, b in zip(equation_10(delay), numerator_of_nadam(delay), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_the_optimizer_is_nadam_with_the_momentum_scaled_to_the_run() -> None:
    """Against the update written out."""
    updates, lr, decay, (b1, b2) = 20, 0.01, 0.1, (0.99, 0.999)
    weight = torch.nn.Parameter(start().float())
    optimizer = AsyncNAdam([weight], lr=lr, updates=updates, weight_decay=decay)
    scaled = 0.004 * 30_000 / updates
    x, m, v, product = weight.detach().double(), 0.0, 0.0, 1.0
    for t in range(1, updates + 1):
        weight.grad = gradient(weight.detach().double()).float()
        g = gradient(x)
        optimizer.step()
        mu, mu_next = (b1 * (1 - 0.5 * 0.96 ** (step * scaled)) for step in (t, t + 1))
        product *= mu
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        bar = mu_next * m / (1 - product * mu_next) + (1 - mu) * g / (1 - product)
        x = x * (1 - lr * decay) - lr * bar / ((v / (1 - b2**t)).sqrt() + 1e-8)
    torch.testing.assert_close(weight.detach().double(), x, rtol=1e-4, atol=1e-5)
    assert mu == pytest.approx(0.986, abs=0.002), "as after 30,000 of 30,000 published updates"
    with pytest.raises(ValueError, match="updates"):
        AsyncNAdam([weight], updates=0)


def test_settings_without_a_stash() -> None:
    first, last = Schedule("1f1b", 0, 4), Schedule("1f1b", 3, 4)
    assert stage_settings(first, 0).lr_scale == pytest.approx(1 / 3)
    assert stage_settings(first, 3500).lr_scale == pytest.approx(3**-0.5)
    assert stage_settings(first, 9999).lr_scale == 1.0
    assert stage_settings(last, 0).lr_scale == 1.0
    assert stage_settings(first, 0).momentum == pytest.approx(0.9 + 0.09 * 3 / 4)
    assert stage_settings(last, 0).momentum == pytest.approx(0.9)
    assert stage_settings(first, 5, correct_for=10).lr_scale == pytest.approx(3**-0.5)
    with pytest.raises(ValueError, match="correct_for"):
        stage_settings(first, 0, correct_for=0)


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_the_settings_of_a_stage_go_by_its_lag_in_updates(stages: int) -> None:
    """Published without lead and accumulation; a momentum below 1 with any of both."""
    for stage, lead, accumulate in itertools.product(range(stages), range(4), [1, 2, 3, 8, 64]):
        schedule = Schedule("1f1b", stage, stages, accumulate, lead)
        case = f"P={stages} stage={stage} lead={lead} accumulate={accumulate}"
        lag, largest = ((stages - 1 - s) * (1 + lead) / accumulate for s in (stage, 0))
        own = stage_settings(schedule, 0)
        assert own.momentum == pytest.approx(0.9 + 0.09 * lag / (largest + 1)), case
        assert 0.9 <= own.momentum < 0.99, case
        assert own.lr_scale == pytest.approx(1 / max(1.0, lag)), case
        if lead == 0 and accumulate == 1:
            published = 0.9 + 0.09 * (stages - 1 - stage) / stages
            assert own.momentum == pytest.approx(published), case
        if stage + 1 < stages:
            after = stage_settings(Schedule("1f1b", stage + 1, stages, accumulate, lead), 0)
            assert after.momentum < own.momentum, case


def test_the_settings_of_schedules_with_another_lag() -> None:
    for stage in range(4):
        flush = stage_settings(Schedule("flush", stage, 4, 4), 0)
        assert (flush.lr_scale, flush.momentum) == (1.0, 0.9), "nothing is ever late"
        double = stage_settings(Schedule("2bw", stage, 4, 4), 0)
        assert (double.lr_scale, double.momentum) == (1.0, pytest.approx(0.945)), "one update late"


@pytest.mark.parametrize(("lead", "accumulate"), [(0, 1), (1, 1), (2, 1), (1, 4)])
def test_stages_without_a_stash_learn_with_these_settings(lead: int, accumulate: int) -> None:
    """With a lead the momentum was 1.035 and more, and these runs diverged."""
    torch.manual_seed(0)
    stages = [*(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 1)]
    updates, lr = 400, 5e-3
    optimizers = [torch.optim.SGD(s.parameters(), lr=lr, momentum=0.9) for s in stages]
    pipeline = SimulatedPipeline(
        stages,
        optimizers,
        loss=nn.functional.mse_loss,
        stash=False,
        lead=lead,
        accumulate=accumulate,
        clip=0.0,
    )

    def before(stage: int, update: int) -> None:
        schedule = pipeline.runners[stage].schedule
        own = stage_settings(schedule, update, correct_for=updates // 4)
        optimizers[stage].param_groups[0].update(lr=lr * own.lr_scale, momentum=own.momentum)

    records = pipeline.train(straight_line(), updates, before=before)
    losses = [float(record.loss) for record in records if record.loss is not None]
    end = sum(losses[-20:]) / 20
    assert end < 0.05 * losses[0], f"loss {losses[0]:.3g} at first and {end:.3g} in the end"


def straight_line() -> Iterator[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(1)
    slope = torch.randn(8, 1, generator=random) / math.sqrt(8)
    while True:
        x = torch.randn(16, 8, generator=random)
        yield x, x @ slope


def stable(curvature: float, beta: float, delay: int, ahead: float, nesterov: bool) -> bool:
    """Whether lr * curvature is borne: x = x - u, u = m or NAdam's, m = EMA of the gradient at
    x + ahead (x - x_before), `delay` updates ago. Roots of the polynomial in 1/z, all outside 1."""
    polynomial = np.polynomial.polynomial
    weight = (1 - beta) * np.array([1 + beta, -beta] if nesterov else [1.0])
    late = np.array([0.0] * (delay + 1) + [curvature])
    loop = polynomial.polymul(late, polynomial.polymul([1 + ahead, -ahead], weight))
    roots = polynomial.polyroots(polynomial.polyadd(polynomial.polymul([1, -1], [1, -beta]), loop))
    return bool(min(abs(roots)) > 1 - 1e-9)


@pytest.mark.parametrize(
    ("delay", "momentum", "nadam", "ahead"),
    [
        (0, 38, 134, 134),
        (1, 1.0, 9.2, 34),
        (2, 0.51, 0.98, 14),
        (3, 0.35, 0.5, 7.0),
        (6, 0.18, 0.2, 1.6),
    ],
)
def test_what_a_delay_does_to_stability(delay, momentum, nadam, ahead) -> None:
    """The table of docs/methods/asyncmesh.md."""
    for limit, beta, horizon, nesterov in [
        (momentum, 0.9, 0, False),
        (nadam, 0.99, 0, True),
        (ahead, 0.99, delay, True),
    ]:
        assert stable(0.95 * limit, beta, delay, horizon, nesterov)
        assert not stable(1.05 * limit, beta, delay, horizon, nesterov)


@pytest.mark.parametrize("delay", [1, 3])
def test_versions_ahead_by_their_delay_bear_more(delay: int) -> None:
    """The same in a run of updates rather than by roots: a curvature that only they survive."""
    for ahead, survives in [(0.0, False), (float(delay), True)]:
        x, m, seen = 1.0, 0.0, [1.0]
        for t in range(4000):
            at = max(0, t - delay)
            version = seen[at] + ahead * (seen[at] - seen[max(0, at - 1)])
            g = 0.9 * {1: 34, 3: 7.0}[delay] * version
            m = 0.99 * m + 0.01 * g
            x = min(max(x - (0.99 * m + 0.01 * g), -1e6), 1e6)
            seen.append(x)
        assert (abs(x) < 1) == survives

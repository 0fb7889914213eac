"""The gradient noise scale where it is known, from ranks and from micro-batches."""

import gc
import math
import random
import statistics
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.conftest import Ranks
from thinwire.extras.noise_scale import Averages, split

SIZE, SPREAD, DISTANCE = 200, 0.5, 1.5
# loss = |w - sample|² / 2, samples of variance SPREAD² a value around a point DISTANCE away:
# the gradient of a sample is w - sample.
TRUE = SIZE * SPREAD**2 / DISTANCE**2


class Known(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(SIZE))

    def forward(self, samples: Tensor) -> Tensor:
        return (self.w - samples).square().sum(1).mean() / 2


def samples(count: int, generator: torch.Generator) -> Tensor:
    centre = torch.full((SIZE,), DISTANCE / math.sqrt(SIZE))
    return centre + SPREAD * torch.randn(count, SIZE, generator=generator)


def from_ranks(steps: int, batch: int, passes: int) -> dict[str, tuple[float, float]]:
    """The same gradients seen in three ways: all ranks, this rank's passes, DDP's own mean."""
    rank = tw.init().rank
    model, ddp_model = Known(), Known()
    optimizer = tw.GradientAverage(torch.optim.SGD(model.parameters(), lr=0.0))
    ddp = DistributedDataParallel(ddp_model)
    settings: dict[str, Any] = {"batch": batch, "decay": 0.999, "unit": "samples"}
    seen = {name: tw.NoiseScale(model.parameters(), **settings) for name in ("ranks", "passes")}
    seen["ddp"] = tw.NoiseScale(ddp_model.parameters(), **settings)
    generator = torch.Generator().manual_seed(100 + rank)
    size = optimizer.wire.size
    for _ in range(steps):
        for micro in range(passes):
            x = samples(batch, generator)
            (model(x) / passes).backward()
            if micro < passes - 1:
                with ddp.no_sync():
                    (ddp(x) / passes).backward()
            else:
                (ddp(x) / passes).backward()
        seen["passes"].step()
        optimizer.average()
        seen["ranks"].step(replicas=size)
        seen["ddp"].step(float(ddp_model.w.grad.norm()), replicas=size)  # type: ignore[union-attr]
        optimizer.step()
        for m in (model, ddp_model):
            m.zero_grad()
    for estimate in seen.values():
        estimate.finish()
    assert "samples (the noise scale)" in seen["ranks"].reading()
    return {name: (estimate.value, estimate.error) for name, estimate in seen.items()}


def test_ranks_and_micro_batches_find_the_true_value_and_agree(ranks: Ranks) -> None:
    answers = ranks(3, from_ranks, 150, 4, 3)
    assert all(answer == answers[0] for answer in answers), "the same on all ranks"
    for value, error in answers[0].values():
        assert value == pytest.approx(TRUE, rel=0.15)
        assert abs(value - TRUE) < 3 * error < 0.3 * TRUE
    (ranks_value, a), (passes_value, b) = answers[0]["ranks"], answers[0]["passes"]
    assert ranks_value != passes_value
    assert abs(ranks_value - passes_value) < 3 * math.hypot(a, b)
    assert answers[0]["ddp"][0] == pytest.approx(ranks_value, rel=1e-3)


def run_alone(steps: int, passes: int, factor: float = 1.0, **settings: Any) -> tw.NoiseScale:
    model = Known()
    noise = tw.NoiseScale(model.parameters(), batch=4, decay=0.999, **settings)
    advance(model, noise, 0, steps, passes, factor)
    return noise


def advance(
    model: Known, noise: tw.NoiseScale, first: int, last: int, passes: int, factor: float = 1.0
) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for _ in range(passes):
            (model(samples(4, generator)) * factor).backward()
        noise.step()
        model.zero_grad()


def test_a_factor_on_the_gradients_drops_out() -> None:
    plain, scaled = run_alone(64, 3), run_alone(64, 3, factor=1 / 3)
    assert scaled.value == pytest.approx(plain.value, rel=1e-4)
    assert scaled.noise == pytest.approx(plain.noise / 9, rel=1e-4)


def test_one_pass_of_one_rank_says_nothing() -> None:
    noise = run_alone(16, 1)
    assert math.isnan(noise.value)
    assert noise.reading() == "noise scale: not measured yet"


def test_the_formulas_on_exact_norms() -> None:
    signal, noise, b, big = 3.0, 50.0, 4.0, 64.0
    assert split(signal + noise / b, signal + noise / big, b, big) == pytest.approx((noise, signal))


def test_the_standard_error_is_one() -> None:
    """Of 300 estimates, those within one error of the truth are about 68 %."""
    draw = random.Random(0)
    within = []
    for _ in range(300):
        averages = Averages(0.97)
        for _ in range(200):
            common = draw.gauss(0, 1)  # the two estimates are correlated
            averages.add(40 + 8 * common, 2 + 0.5 * draw.gauss(0, 1) - 0.3 * common)
        within.append(abs(averages.ratio - 20) < averages.error)
    assert 0.6 < statistics.mean(within) < 0.77


def test_the_ratio_is_never_averaged() -> None:
    averages = Averages(1.0)
    for signal in (1.0, 1.0, 1.0, -0.5, 0.02):  # a noisy one may be negative, or next to nothing
        averages.add(10.0, signal)
    assert averages.ratio == pytest.approx(10 / statistics.mean([1, 1, 1, -0.5, 0.02]))


def test_a_gradient_lost_in_noise_is_told_apart() -> None:
    draw = random.Random(1)
    averages = Averages(1.0)
    for _ in range(100):
        averages.add(50.0, draw.gauss(0.0, 1.0))
    assert averages.lost
    assert 50 / 0.5 < averages.least < 50 / 0.1
    sure = run_alone(64, 4)
    assert "(the noise scale)" in sure.reading()
    assert not sure._averages.lost


class Tied(nn.Module):
    """A weight used twice, one that is not used, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.both, self.idle = nn.Linear(3, 3), nn.Linear(3, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.both(self.both(x))).square().mean()


def test_a_pass_is_counted_once_whatever_the_model_is_like() -> None:
    model = Tied()
    noise = tw.NoiseScale(model.parameters(), batch=2)
    squares, inputs = 0.0, [torch.full((2, 3), float(k)) for k in (1, 2)]
    for x in inputs:
        model(x).backward()
        squares += sum(float(p.grad.square().sum()) for p in model.both.parameters())  # type: ignore
        model.zero_grad()
    noise.forget_pass()
    for x in inputs:
        model(x).backward()
    got, passes = noise._pass.take()
    assert passes == 2
    assert got == pytest.approx(squares, rel=1e-5)


@pytest.mark.parametrize("stop", [10, 16, 21])
def test_a_loaded_estimate_goes_on_bit_for_bit(stop: int) -> None:
    straight = run_alone(40, 2)
    first = run_alone(stop, 2)
    model = Known()
    second = tw.NoiseScale(model.parameters(), batch=4, decay=0.999)
    second.load_state_dict(first.state_dict())
    advance(model, second, stop, 40, 2)
    assert second.state_dict() == straight.state_dict()
    assert second.value == straight.value


def test_a_step_that_is_not_finite_is_left_out() -> None:
    noise = run_alone(16, 2, every=1)
    model = Known()
    bad = tw.NoiseScale(model.parameters(), batch=4, decay=0.999, every=1)
    advance(model, bad, 0, 8, 2)
    model(torch.full((1, SIZE), math.inf)).backward()
    bad.step()
    model.zero_grad()
    advance(model, bad, 8, 16, 2)
    bad.finish()
    noise.finish()
    assert bad.value == pytest.approx(noise.value)


def test_hooks_go_with_the_estimate() -> None:
    model = Known()
    noise = tw.NoiseScale(model.parameters(), batch=1)
    passes = noise._pass
    model(samples(1, torch.Generator())).backward()
    assert len(passes._norms) == 1
    noise.close()
    model(samples(1, torch.Generator())).backward()
    assert len(passes._norms) == 1
    del noise, passes
    gc.collect()
    model(samples(1, torch.Generator())).backward()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 0}, r"NoiseScale\(batch=...\) takes a number > 0"),
        ({"decay": 1.0}, r"decay=...\) takes a number in \[0, 1\)"),
        ({"every": 0}, r"every=...\) takes a whole number >= 1"),
        ({"params": []}, "no parameter that is trained"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tw.NoiseScale(**{"params": Known().parameters(), "batch": 1} | settings)


def wide(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def sharded(split_in_two: bool) -> tuple[float, float]:
    """2 replicas x 2 shards with two passes a step, or the same two replicas whole."""
    world = tw.init()
    model = wide()
    group, replica, halves = None, world.rank, [0, 1]
    if split_in_two:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        group, replica, halves = mesh["replica"], world.rank // 2, [world.rank % 2]
    optimizer = tw.GradientAverage(torch.optim.SGD(model.parameters(), lr=0.0), group=group)
    noise = tw.NoiseScale(model.parameters(), batch=2 * 4, every=2)
    for step in range(4):
        for micro in range(2):
            losses = []
            for half in halves:
                seed = 1000 * step + 100 * micro + 2 * replica + half
                x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
                losses.append((model(x) - x.sum(1, keepdim=True)).square().mean())
            (torch.stack(losses).mean() / 2).backward()
        optimizer.average()
        noise.step(replicas=2)
        optimizer.zero_grad()
    noise.finish()
    dist.barrier()
    return noise.noise, noise.signal


def test_sharded_replicas_give_what_whole_ones_do(ranks: Ranks) -> None:
    whole = ranks(2, sharded, False)
    split_ones = ranks(4, sharded, True)
    for answer in split_ones:
        assert answer == pytest.approx(whole[0], rel=1e-4)

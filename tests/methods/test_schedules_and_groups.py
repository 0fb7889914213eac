"""What belongs to a parameter group, or changes during a run: betas on a schedule, corrections of
one group, the settings of a state that is loaded; and gradients changed behind a bucket's back."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.conftest import Ranks

LR = 0.02


def gradients(rank: int, step: int, sizes: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(n, generator=generator) for n in sizes]


def advance(optimizer: Any, weights: list[nn.Parameter], steps: range, rank: int) -> None:
    for step in steps:
        given = gradients(rank, step, [w.numel() for w in weights])
        for w, g in zip(weights, given, strict=True):
            w.grad = w.detach() + g.view_as(w)
        optimizer.step()


def mean_gradient(weights: list[nn.Parameter], step: int, size: int) -> None:
    sizes = [w.numel() for w in weights]
    each = zip(*(gradients(rank, step, sizes) for rank in range(size)), strict=True)
    for w, parts in zip(weights, each, strict=True):
        w.grad = w.detach() + torch.stack(parts).mean(0).view_as(w)


# -- betas -----------------------------------------------------------------------------------------


def one_cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.OneCycleLR:
    """Cycles beta1 between 0.85 and 0.95, as it does by default."""
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=LR, total_steps=20)


def cycled(method: str, settings: dict[str, Any]) -> tuple[Tensor, set[float]]:
    rank = tw.init().rank
    weights = [nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(3))]
    optimizer = getattr(tw, method)(weights, lr=LR, **settings)
    schedule = one_cycle(optimizer)
    betas = set()
    for step in range(12):
        betas.add(optimizer.param_groups[0]["betas"][0])
        advance(optimizer, weights, range(step, step + 1), rank)
        schedule.step()
    return torch.cat([w.detach() for w in weights]), betas


@pytest.mark.parametrize(("method", "plain"), [("OneBitAdam", "AdamW"), ("OneBitLamb", "Lamb")])
def test_betas_on_a_schedule_are_followed(ranks: Ranks, method: str, plain: str) -> None:
    answers = ranks(2, cycled, method, {"freeze_at": 99})
    weights = [nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(3))]
    kind: Any = tw.Lamb if plain == "Lamb" else torch.optim.AdamW
    optimizer = kind(weights, lr=LR, weight_decay=0.0)
    schedule = one_cycle(optimizer)
    for step in range(12):
        mean_gradient(weights, step, 2)
        optimizer.step()
        schedule.step()
    expected = torch.cat([w.detach() for w in weights])
    for got, betas in answers:
        assert len(betas) > 5
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


def frozen_cycle(b1_at: Callable[[int], float], late: bool) -> tuple[Tensor, Tensor]:
    """1-bit Adam alone, where nothing is rounded, against its equations with b1 of every step."""
    tw.init()
    x = nn.Parameter(torch.ones(5))
    optimizer = tw.OneBitAdam(
        [x], lr=LR, freeze_at=3, delayed_step=late, whiten=False, forget=False, floor=0.0
    )
    y, m, v = torch.ones(5).double(), torch.zeros(5).double(), torch.zeros(5).double()
    for step in range(9):
        b1 = b1_at(step)
        optimizer.param_groups[0]["betas"] = (b1, 0.999)
        g = gradients(0, step, [5])[0]
        x.grad = g.clone()
        optimizer.step()
        m = b1 * m + (1 - b1) * g
        if step < 3:
            v = 0.999 * v + 0.001 * g * g
            root = (v / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8
        y = y - LR * m / (1 - b1 ** (step + 1)) / root
    optimizer.finish()
    return x.detach().double(), y


def test_betas_on_a_schedule_are_followed_after_the_freeze(ranks: Ranks) -> None:
    got, wanted = ranks(1, frozen_cycle_falling, False)[0]
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def frozen_cycle_falling(late: bool) -> tuple[Tensor, Tensor]:
    return frozen_cycle(lambda step: 0.95 - 0.02 * (step // 2), late)


# -- bias correction -------------------------------------------------------------------------------


def two_groups(method: str, order: int, settings: dict[str, Any]) -> list[Tensor]:
    """One group with corrections and one without, in the same bucket."""
    rank = tw.init().rank
    weights = [nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6))]
    groups = [
        {"params": [weights[0]], "bias_correction": True},
        {"params": [weights[1]], "bias_correction": False},
    ]
    optimizer = getattr(tw, method)(groups[::order], lr=LR, **settings)
    advance(optimizer, weights, range(8), rank)
    return [w.detach() for w in weights]


def alone(method: str, which: int, settings: dict[str, Any]) -> Tensor:
    rank = tw.init().rank
    weights = [nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6))]
    optimizer = getattr(tw, method)(weights, lr=LR, bias_correction=which == 0, **settings)
    advance(optimizer, weights, range(8), rank)
    return weights[which].detach()


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("OneBitAdam", {"freeze_at": 99}),
        ("OneBitLamb", {"freeze_at": 99}),
        ("ZeroOneAdam", {"freeze_at": 99, "double_after": 99}),
        ("OneBitAdam", {"freeze_at": 99, "shard_state": True}),
    ],
)
def test_every_group_has_its_own_bias_correction(
    ranks: Ranks, method: str, order: int, settings: dict[str, Any]
) -> None:
    got = ranks(2, two_groups, method, order, settings)[0]
    for which in range(2):
        wanted = ranks(2, alone, method, which, settings)[0]
        torch.testing.assert_close(got[which], wanted, rtol=1e-5, atol=1e-7)


def one_rank_frozen(order: int) -> list[Tensor]:
    """With one rank nothing is rounded: both groups against their own equations."""
    tw.init()
    weights = [nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6))]
    groups = [
        {"params": [weights[0]], "bias_correction": True},
        {"params": [weights[1]], "bias_correction": False},
    ][::order]
    optimizer = tw.OneBitAdam(groups, lr=LR, freeze_at=3, forget=False)
    advance(optimizer, weights, range(8), 0)
    return [w.detach() for w in weights]


def one_rank_alone(which: int) -> Tensor:
    tw.init()
    weights = [nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6))]
    correct = which == 0
    optimizer = tw.OneBitAdam(weights, lr=LR, bias_correction=correct, freeze_at=3, forget=False)
    advance(optimizer, weights, range(8), 0)
    return weights[which].detach()


@pytest.mark.parametrize("order", [1, -1])
def test_and_keeps_it_after_the_freeze(ranks: Ranks, order: int) -> None:
    got = ranks(1, one_rank_frozen, order)[0]
    for which in range(2):
        torch.testing.assert_close(got[which], ranks(1, one_rank_alone, which)[0])


# -- a state that is loaded ------------------------------------------------------------------------


def rolled_back(method: str, settings: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """A warm-up state into an optimizer that has frozen, and clipped hard, since; with `late` it is
    loaded while a momentum is in the air."""
    rank = tw.init().rank
    results = []
    for detour in (False, True):
        weights = [nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(3))]
        optimizer = getattr(tw, method)(weights, lr=LR, freeze_at=6, clip=0.1, **settings)
        advance(optimizer, weights, range(4), rank)
        state = copy.deepcopy(optimizer.state_dict())
        if detour:
            before = [w.detach().clone() for w in weights]
            advance(optimizer, weights, range(4, 10), rank)
            with torch.no_grad():
                for w, b in zip(weights, before, strict=True):
                    w.copy_(b)
            optimizer.load_state_dict(state)
        advance(optimizer, weights, range(4, 12), rank)
        results.append([w.detach() for w in weights])
    return results[0], results[1]


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("OneBitAdam", {}),
        ("OneBitAdam", {"delayed_step": True}),
        ("OneBitLamb", {}),
        ("OneBitLamb", {"delayed_step": True}),
        ("ZeroOneAdam", {}),
    ],
)
def test_nothing_of_the_later_run_stays_after_loading(
    ranks: Ranks, method: str, settings: dict[str, Any]
) -> None:
    for straight, detour in ranks(2, rolled_back, method, settings):
        assert all(map(torch.equal, straight, detour))


def used_up(method: str) -> bool:
    """Whether a loaded dictionary is what it was, ten steps later."""
    rank = tw.init().rank
    weights = [nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(3))]
    settings: dict[str, Any] = {"lr": LR, "freeze_at": 3}
    optimizer = getattr(tw, method)(weights, **settings)
    advance(optimizer, weights, range(6), rank)
    state = copy.deepcopy(optimizer.state_dict())
    before = copy.deepcopy(state)
    other = getattr(tw, method)(weights, **settings)
    other.load_state_dict(state)
    advance(other, weights, range(6, 16), rank)
    return same(before, state)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("method", ["OneBitAdam", "OneBitLamb", "ZeroOneAdam"])
def test_a_loaded_dictionary_stays_as_it_is(ranks: Ranks, method: str) -> None:
    assert ranks(2, used_up, method) == [True, True]


# -- gradients changed behind the versions ---------------------------------------------------------


def clamped(method: str, when: int) -> int:
    """The step at which a loop that clamps `.grad.data` from some step on is refused."""
    rank = tw.init().rank
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    if method == "GradientAverage":
        inner = torch.optim.SGD(net.parameters(), lr=0.01)
        optimizer: Any = tw.GradientAverage(inner, overlap=True)
    else:
        optimizer = getattr(tw, method)(net.parameters(), lr=0.01)
    for step in range(60):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        (10 * net(x)).square().mean().backward()
        if step >= when:
            for p in net.parameters():
                p.grad.data.clamp_(-0.01, 0.01)
        try:
            optimizer.step()
        except RuntimeError as error:
            return step if "changed after they had been sent" in str(error) else -1
        optimizer.zero_grad()
    return 60


@pytest.mark.parametrize("method", ["GradientAverage", "OneBitAdam", "DecentLaM"])
def test_gradients_changed_through_data_are_noticed(ranks: Ranks, method: str) -> None:
    """Step 0 shows the order of the gradients; from step 1 on buckets leave early."""
    assert ranks(2, clamped, method, 0) == [1, 1]


def test_also_when_the_loop_begins_to_later(ranks: Ranks) -> None:
    first, second = ranks(2, clamped, "GradientAverage", 20)
    assert first == second
    assert 20 <= first < 60


def test_nan_gradients_do_not_count_as_changed(ranks: Ranks) -> None:
    assert ranks(2, not_a_number) == [1, 1]


def not_a_number() -> int:
    rank = tw.init().rank
    x = nn.Parameter(torch.ones(4))
    optimizer = tw.GradientAverage(torch.optim.SGD([x], lr=0.1), overlap=True)
    for step in range(6):
        bad = math.nan if step == 4 and rank == 1 else 1.0
        (x * bad).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert bool(x.isfinite().all())
    return int(optimizer.account.skipped)

"""The freeze rule on streams of gradients whose right answer is known."""

import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.conftest import Ranks
from thinwire.methods.onebit.freeze import LEAST, FreezeRule

Stream = Callable[[int], float]


def frozen_at(stream: Stream, steps: int, warmup: int = 1, noise: float = 0.3) -> int | None:
    """The step at which a run with this mean of ||g||² freezes; lognormal noise, linear warm-up."""
    rule, generator = FreezeRule(0.999), random.Random(0)
    for step in range(1, steps + 1):
        square = stream(step) * math.exp(generator.gauss(0, noise))
        if rule.observe(square, min(1.0, step / warmup)):
            return step
    return None


@pytest.mark.parametrize("noise", [0.0, 0.3, 0.8])
def test_a_variance_that_never_changes_is_frozen_at_once(noise: float) -> None:
    found = frozen_at(lambda step: 3.0, 500, noise=noise)
    assert found is not None
    assert LEAST <= found <= 1.2 * LEAST


def test_nothing_is_frozen_before_the_learning_rate_has_peaked_for_a_while() -> None:
    assert frozen_at(lambda step: 1.0, 1000, warmup=400, noise=0) == 600
    assert frozen_at(lambda step: 1.0, 500, warmup=400, noise=0) is None


def test_a_fall_that_is_over_by_the_first_chance_holds_nothing_up() -> None:
    """As a small language model does: level for 45 steps, then a tenth within 40 more."""

    def stream(step: int) -> float:
        return 5.0 * 0.1 ** min(1.0, max(0.0, (step - 45) / 40))

    assert frozen_at(stream, 600, warmup=20) == LEAST


def test_a_short_run_waits_for_the_early_fall() -> None:
    """The same fall, later: over at step 190. Not before, and at the latest when both windows, half
    of all steps, lie behind it."""

    def stream(step: int) -> float:
        return 5.0 * 0.1 ** min(1.0, max(0.0, (step - 110) / 80))

    found = frozen_at(stream, 600, warmup=20)
    assert found is not None
    assert 190 <= found <= 300


def test_a_level_start_is_not_taken_for_the_end() -> None:
    """LAMB, 600 steps, masked objective, as measured: level until step 80, then a third of that."""

    def stream(step: int) -> float:
        return 8.5 if step < 80 else 8.5 * 0.4 ** min(1.0, (step - 80) / 20)

    found = frozen_at(stream, 600, warmup=30)
    assert found is not None
    assert 100 < found <= 0.3 * 600


def test_a_long_run_waits_until_it_falls_by_the_published_4_percent() -> None:
    """||g||² halves every 4,000 steps, then levels off at step 40,000 of 500,000."""

    def stream(step: int) -> float:
        return 0.5 ** (min(step, 40_000) / 4_000)

    found = frozen_at(stream, 60_000, warmup=2_000)
    assert found is not None
    assert 38_000 <= found <= 44_000


def test_a_slow_drift_within_the_tolerance_does_not_hold_it_up() -> None:
    found = frozen_at(lambda step: 0.5 ** (step / 200_000), 30_000, warmup=10_000)
    assert found is not None
    assert 15_000 <= found <= 16_000


def test_single_bad_batches_do_not_matter() -> None:
    """One of a hundred times the size, now and then: means would swing by a factor."""
    found = frozen_at(lambda step: 100.0 if step % 23 == 0 else 1.0, 500)
    assert found is not None
    assert found <= 1.2 * LEAST


def test_a_saved_rule_goes_on() -> None:
    one = FreezeRule(0.99)
    for step in range(150):
        one.observe(0.9**step, 1.0)
    other = FreezeRule(0.99)
    other.load_state_dict(one.state_dict())
    for step in range(150, 300):
        square = 0.9 ** min(step, 170)
        assert one.observe(square, 1.0) == other.observe(square, 1.0)


def train(steps: int) -> tuple[int | None, int]:
    rank = tw.init().rank
    weights = nn.Parameter(torch.zeros(50))
    optimizer = tw.OneBitAdam([weights], lr=1e-3, clip=0.5)
    for step in range(steps):
        generator = torch.Generator().manual_seed(2 * step + rank)
        weights.grad = torch.randn(50, generator=generator) * (4.0 if step < 50 else 1.0)
        optimizer.step()
    return optimizer.frozen_at, optimizer.account.transfers


def test_all_ranks_freeze_at_the_same_step_without_a_message(ranks: Ranks) -> None:
    (one, sent), (other, again) = ranks(2, train, 220)
    assert one == other is not None
    assert LEAST <= one <= 200
    assert sent == again
    # the start's checks, and at every step one mean, the norm to clip by and what is used
    assert sent - 3 * 220 <= 10


def zero_one(steps: int) -> tuple[int | None, int, list[bool]]:
    """The freeze, the refreshes before it, and which of the last steps sent anything."""
    rank = tw.init().rank
    weights = nn.Parameter(torch.zeros(50))
    optimizer = tw.ZeroOneAdam([weights], lr=1e-3, local_double_after=8, longest=4)
    sent = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(2 * step + rank)
        weights.grad = torch.randn(50, generator=generator)
        before = optimizer.account.bytes
        optimizer.step()
        sent.append(optimizer.account.bytes > before)
    return optimizer.frozen_at, optimizer.refreshes, sent[-8:]


def test_zero_one_adam_counts_steps_and_not_refreshes(ranks: Ranks) -> None:
    """Spacings of 1, 2, 4 and 8 after 16 refreshes each: at step 160 there have been 54."""
    for frozen, refreshes, sent in ranks(2, zero_one, 240):
        assert frozen is not None
        assert LEAST <= frozen <= LEAST + 16
        assert 50 <= refreshes <= 60
        assert sent.count(True) == 2, "local steps, with an exchange every four"

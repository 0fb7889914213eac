"""StopConsensus: all ranks stop after the same step; a replica beyond help is named on all."""

import math

import pytest

from tests.conftest import Ranks
from thinwire.errors import NonFinite
from thinwire.train.loop.stop_consensus import MOST_BAD_STEPS, PERIOD, StopConsensus
from thinwire.wire import world
from thinwire.wire.wire import Wire


def beats(asked_at: int | None, bad: range = range(0), steps: int = 40) -> tuple[int, int]:
    """(the signal, the step) at which the loop ends; this rank is asked after step `asked_at`."""
    pulse = StopConsensus(Wire(name="control"))
    for step in range(1, steps + 1):
        if step == asked_at:
            pulse.stop_asked = 15
        loss = math.nan if step in bad else 1.0
        if signum := pulse.beat(step, loss, 1.0):
            return signum, step
    pulse.end()
    return 0, steps


@pytest.mark.parametrize("asked", [1, PERIOD, PERIOD + 1])
def test_one_worker_stops_within_two_periods(asked: int) -> None:
    signum, step = beats(asked)
    assert signum == 15
    assert asked < step <= asked + 2 * PERIOD


def test_nobody_stops_unasked() -> None:
    assert beats(None) == (0, 40)


def some_asked(at: dict[int, int]) -> tuple[int, int]:
    rank = world.init(timeout=20).rank
    return beats(at.get(rank))


def test_all_ranks_stop_after_the_same_step(ranks: Ranks) -> None:
    ends = ranks(3, some_asked, {1: 5, 2: 11})
    assert ends == [(15, 2 * PERIOD + PERIOD)] * 3


def some_bad(bad: dict[int, range]) -> str:
    rank = world.init(timeout=20).rank
    try:
        return str(beats(None, bad.get(rank, range(0))))
    except NonFinite as error:
        return str(error)


def test_a_replica_that_does_not_come_back_is_named_everywhere(ranks: Ranks) -> None:
    said = ranks(3, some_bad, {1: range(6, 41)})
    assert len(set(said)) == 1
    assert said[0].startswith("the loss of worker 1 has not been finite for 8 steps or more")


def test_a_replica_that_comes_back_is_not(ranks: Ranks) -> None:
    bad = {0: range(2, 2 + MOST_BAD_STEPS - 1), 1: range(20, 20 + MOST_BAD_STEPS - 1)}
    assert ranks(2, some_bad, bad) == ["(0, 40)"] * 2


def test_the_end_of_a_run_still_tells(ranks: Ranks) -> None:
    """The last reduction is landed even when no later beat would."""
    pulse = StopConsensus(Wire(name="control"))
    for step in range(1, MOST_BAD_STEPS + 1):
        pulse.beat(step, math.inf, 1.0)
    with pytest.raises(NonFinite, match="worker 0"):
        pulse.end()


def test_steps_that_are_all_skipped_end_the_run_though_no_loss_is_bad() -> None:
    pulse = StopConsensus(Wire(name="control"))
    for step in range(1, MOST_BAD_STEPS + PERIOD):
        assert pulse.beat(step, 1.0, math.nan) == 0
    with pytest.raises(NonFinite, match="gradients have not been finite"):
        pulse.beat(MOST_BAD_STEPS + PERIOD, 1.0, math.nan)

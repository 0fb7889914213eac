"""Schedules as data: what a stage may do when, checked without running anything."""

import pytest

from thinwire.pipeline.schedule import Backward, Forward, Schedule, Update, lead_for

CASES = [
    ("1f1b", stages, accumulate, lead)
    for stages in (1, 2, 4)
    for accumulate in (1, 3)
    for lead in (0, 1)
] + [("2bw", 1, 1, 0), ("2bw", 3, 3, 0), ("2bw", 3, 5, 1), ("flush", 3, 1, 0), ("flush", 3, 4, 0)]
UPDATES = 7


@pytest.mark.parametrize(("name", "stages", "accumulate", "lead"), CASES)
def test_a_schedule_keeps_its_promises(name, stages, accumulate, lead) -> None:
    for stage in range(stages):
        schedule = Schedule(name, stage, stages, accumulate, lead)
        flying: list[int] = []
        updates = forwards = backwards = most = 0
        for action in schedule.actions(UPDATES):
            if isinstance(action, Forward):
                assert action.micro == forwards, "forwards in order"
                assert action.version <= updates, "no weights of the future"
                if name == "1f1b":
                    assert action.version == updates, "the newest"
                if name == "2bw":
                    assert action.version == max(0, action.micro // accumulate - 1)
                if name == "flush":
                    assert action.version == action.micro // accumulate
                flying.append(action.micro)
                forwards += 1
            elif isinstance(action, Backward):
                assert action.micro == flying.pop(0), "the oldest in flight"
                backwards += 1
            else:
                assert isinstance(action, Update)
                assert action.update == updates
                assert backwards == (updates + 1) * accumulate
                updates += 1
            most = max(most, len(flying))
        assert forwards == backwards == UPDATES * accumulate
        assert updates == UPDATES
        assert most == schedule.held


@pytest.mark.parametrize(("name", "stages", "accumulate", "lead"), CASES)
@pytest.mark.parametrize("stop", [1, 3, 7])
def test_a_schedule_can_end_early_with_what_is_under_way(name, stages, accumulate, lead, stop):
    """Asked after the same update, every stage does what it would do for that many updates."""
    for stage in range(stages):
        schedule = Schedule(name, stage, stages, accumulate, lead)
        wanted, seen = [2 * UPDATES], []
        for action in schedule.actions(lambda wanted=wanted: wanted[0]):
            seen.append(action)
            if action == Update(stop - 1):
                wanted[0] = schedule.least_end(stop)
        assert seen == list(schedule.actions(schedule.least_end(stop)))
        assert schedule.least_end(stop) - stop <= stages * (1 + lead)


@pytest.mark.parametrize(("name", "stages", "accumulate", "lead"), CASES)
def test_stages_fit_together_without_a_dead_lock(name, stages, accumulate, lead) -> None:
    """Every stage as far as it can go on what has arrived: all come to the end."""
    plans = [
        list(Schedule(name, s, stages, accumulate, lead).actions(UPDATES)) for s in range(stages)
    ]
    at = [0] * stages
    forwards, backwards = [0] * stages, [0] * stages
    moved = True
    while moved:
        moved = False
        for s in range(stages):
            while at[s] < len(plans[s]):
                action = plans[s][at[s]]
                if isinstance(action, Forward):
                    if s > 0 and forwards[s - 1] <= action.micro:
                        break
                    forwards[s] += 1
                elif isinstance(action, Backward):
                    if s < stages - 1 and backwards[s + 1] <= action.micro:
                        break
                    backwards[s] += 1
                at[s] += 1
                moved = True
    assert at == [len(plan) for plan in plans]


def test_the_delay_of_the_first_stage() -> None:
    assert [Schedule("1f1b", s, 4).delay for s in range(4)] == [3, 2, 1, 0]
    assert Schedule("1f1b", 0, 4, accumulate=4).delay == 0  # floor((2 * 3 + 1) / 8)
    assert Schedule("1f1b", 0, 4, accumulate=2).delay == 1
    assert Schedule("1f1b", 0, 2, lead=2).delay == 3
    assert Schedule("2bw", 0, 8, accumulate=8).delay == 1


def test_a_lead_that_hides_the_link() -> None:
    assert lead_for(compute=0.1, transfer=0.0) == 0
    assert lead_for(compute=0.1, transfer=0.04) == 1
    assert lead_for(compute=0.1, transfer=0.11) == 3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "gpipe"}, "1f1b, 2bw, flush"),
        ({"accumulate": 0}, "accumulate"),
        ({"lead": -1}, "lead"),
        ({"stage": 3}, "of 0 to 2, got 3"),
        ({"name": "2bw", "accumulate": 2}, "accumulate >= 3"),
        ({"name": "2bw", "accumulate": 3, "lead": 1}, "accumulate >= 4"),
    ],
)
def test_bad_settings_are_refused(settings, words) -> None:
    with pytest.raises(ValueError, match=words):
        Schedule(**{"name": "1f1b", "stage": 0, "stages": 3, **settings})

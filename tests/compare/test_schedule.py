"""When cycles end and contestants are done."""

from thinwire.compare.records import BUDGET, LIMIT
from thinwire.compare.schedule import RunProgress, Schedule


def by_steps(budget: int = 1000, evals: int = 4, **settings: float) -> Schedule:
    values: dict[str, float] = {"limit": 60.0, "overtime": 1.5} | settings
    return Schedule(step=10, evals=evals, budget=budget, **values)  # type: ignore[arg-type]


def standing(
    tokens: int, loss: float = 3.0, *, name: str = "co2", seconds: float = 1
) -> RunProgress:
    return RunProgress(name, tokens, seconds, loss)


def targets(schedule: Schedule, until: int) -> list[tuple[int, int]]:
    """(number, goal) of the cycles, all contestants keeping up."""
    found, read = [], 0
    while read < until:
        schedule.begin(read, read, 0.0)
        read = schedule.target
        found.append((schedule.cycle, read))
    return found


def test_the_budget_is_cut_into_cycles_of_whole_steps() -> None:
    assert targets(by_steps(), 1000) == [(0, 250), (1, 500), (2, 750), (3, 1000)]
    assert targets(by_steps(budget=70), 70) == [(0, 20), (1, 40), (2, 60), (3, 70)]
    assert targets(by_steps(budget=20), 20) == [(0, 10), (1, 20)]  # not more cycles than steps
    assert targets(by_steps(), 1500)[-2:] == [(4, 1250), (5, 1500)]  # overtime


def test_a_cycle_that_was_interrupted_is_taken_up() -> None:
    schedule = by_steps()
    schedule.begin(500, 500, 0.0)
    assert (schedule.cycle, schedule.target) == (2, 750)
    again = by_steps(cycle=3)
    again.begin(500, 750, 0.0)  # some had had their turn in it
    assert (again.cycle, again.target) == (2, 750)


def test_all_stop_at_the_budget_unless_they_are_behind() -> None:
    schedule = by_steps()
    assert schedule.ends(standing(990), 2.0, 0) is None
    assert schedule.ends(standing(1000, 1.9), 2.0, 0) == BUDGET
    assert schedule.ends(standing(1000, 2.0), 2.0, 0) == BUDGET
    assert schedule.ends(standing(1000, 2.1), 2.0, 0) is None
    assert schedule.ends(standing(1000, float("nan")), 2.0, 0) is None
    assert schedule.ends(standing(1500, 2.1), 2.0, 0) == BUDGET
    assert schedule.ends(standing(1000, 2.1), None, 0) == BUDGET  # nobody to catch up with
    for name in ("none", "ddp"):
        assert schedule.ends(standing(1000, 2.1, name=name), 2.0, 0) == BUDGET
    assert by_steps(overtime=1.0).ends(standing(1000, 2.1), 2.0, 0) == BUDGET


def test_a_slow_one_is_cut() -> None:
    assert by_steps().ends(standing(500, seconds=60.0), None, 0) == LIMIT
    assert by_steps(timed=10.0).ends(standing(500, seconds=20.0), None, 0) is None
    known = RunProgress("co2", 500, 20.0, 3.0, known=True)
    assert by_steps(timed=10.0).ends(known, None, 0) == LIMIT
    assert by_steps(timed=30.0).ends(known, None, 0) is None


def test_by_time_the_budget_is_what_was_read_in_most_of_it() -> None:
    schedule = Schedule(step=10, evals=8, limit=600, overtime=1.5, seconds=100.0)
    schedule.begin(0, 0, 0.0)
    assert (schedule.cycle, schedule.target) == (0, 40)  # a trial
    schedule.begin(40, 40, 4.0)  # it took 4 s, and a cycle should take 80 / 8
    assert (schedule.cycle, schedule.target) == (1, 140)
    schedule.close(140, 14.0)
    assert schedule.budget == 0
    assert schedule.ends(standing(140), None, 14.0) is None
    schedule.begin(140, 140, 34.0)  # slower than it was thought
    assert (schedule.cycle, schedule.target) == (2, 180)
    schedule.close(180, 80.0)
    assert schedule.budget == 180
    assert schedule.ends(standing(180, 1.0), 2.0, 80.0) == BUDGET
    assert schedule.ends(standing(180, 3.0), 2.0, 80.0) is None
    assert schedule.ends(standing(240, 3.0), 2.0, 100.0) == BUDGET


def test_by_time_a_slower_rate_goes_to_the_budget_or_to_its_end() -> None:
    schedule = Schedule(step=10, evals=8, limit=600, overtime=1.0, seconds=100.0, budget=60)
    schedule.begin(0, 0, 0.0)
    assert schedule.target == 40
    schedule.begin(40, 40, 1.0)
    assert schedule.target == 60
    assert schedule.ends(standing(40), None, 50.0) is None
    assert schedule.ends(standing(40), None, 100.0) == LIMIT
    assert schedule.ends(standing(60), None, 60.0) == BUDGET

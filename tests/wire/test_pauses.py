"""Methods that take turns: a pause stops a method's clock, and evaluation stays off its links."""

import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

import thinwire as tw
from thinwire.wire import comm_engine as carrier
from thinwire.wire import evaluation
from thinwire.wire.account import Account, Landing
from thinwire.wire.evaluation import EvaluationWire
from thinwire.wire.flight import Flight


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock as a list of one number; sleeping moves it."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return now


def flight(account: Account, arrived: float | None = None) -> tuple[Flight, "Future[float]"]:
    flying, arrival = Flight(torch.zeros(1), account), Future()
    flying._lands_with(arrival)
    if arrived is not None:
        arrival.set_result(arrived)
    return flying, arrival


def test_what_arrives_in_a_pause_is_late_by_as_much_after_it(clock: list[float]) -> None:
    account = Account()
    flying, arrival = flight(account)
    clock[0] = 102.0
    account.pause()
    arrival.set_result(105.0)  # three seconds into the pause
    clock[0] = 160.0
    assert flying.arrived  # for a checkpoint that is written meanwhile
    account.resume()
    clock[0] = 161.0
    assert not flying.arrived
    flying.wait()
    assert clock[0] == pytest.approx(163.0)
    assert account.exposed == pytest.approx(2.0)
    assert account.hidden == pytest.approx(5.0 - 2.0)
    assert flying.arrived


def test_a_pause_costs_nothing_that_was_hidden_anyway(clock: list[float]) -> None:
    account = Account()
    flying, arrival = flight(account)
    account.pause()
    arrival.set_result(103.0)
    clock[0] = 200.0
    account.resume()
    clock[0] = 204.0
    assert flying.arrived
    flying.wait()
    assert clock[0] == 204.0
    assert (account.exposed, account.hidden) == (0.0, 3.0)


def test_flights_outside_of_a_pause_are_left_alone(clock: list[float]) -> None:
    account = Account()
    before, _ = flight(account, arrived=100.0)
    clock[0] = 101.0
    account.pause()
    clock[0] = 110.0
    account.resume()
    after, _ = flight(account, arrived=111.0)
    clock[0] = 112.0
    before.wait()
    after.wait()
    assert clock[0] == 112.0
    assert account.exposed == 0.0


def test_a_listener_hears_the_course_of_a_flight(clock: list[float]) -> None:
    account = Account()
    heard: list[Landing] = []
    account.listen(heard.append)
    flying, arrival = flight(account)
    arrival.set_result(104.0)
    clock[0] = 107.0
    flying.wait()
    Flight(torch.zeros(1), account).wait()  # never left: no course
    assert heard == [Landing(launched=100.0, arrived=104.0, asked=107.0, landed=107.0)]


def meet(folder: str) -> tuple[list[torch.Tensor], int, bool]:
    tw.init()
    wire = EvaluationWire(name="evaluation")
    values = torch.arange(1000.0) * (wire.rank + 1)
    plain = wire.mean(values.clone()).wait()
    counted = wire.account.bytes
    evaluation.share_memory(Path(folder))
    beside = [wire.mean(values.clone()).wait() for _ in range(2)]
    evaluation.share_memory(None)
    carrier.settle()
    return [plain, *beside], wire.account.bytes - counted, any(Path(folder).iterdir())


def test_a_meeting_through_a_folder_gives_the_mean_and_sends_next_to_nothing(
    ranks, tmp_path: Path
) -> None:
    answers = ranks(3, meet, str(tmp_path))
    for means, sent, _ in answers:
        for mean in means:
            torch.testing.assert_close(mean, torch.arange(1000.0) * 2)
        assert torch.equal(means[1], answers[0][0][1])  # the same bits everywhere
        assert sent < 200
    assert not list(tmp_path.iterdir())


def in_the_air() -> tuple[bool, bool]:
    tw.init()
    wire = tw.Wire()
    means = [wire.mean(torch.randn(300_000)) for _ in range(4)]
    expected = wire.recv(torch.empty(4), 1 - wire.rank)  # which the peer has not sent yet
    carrier.settle()
    landed = all(flying.arrived for flying in means)
    waiting = not expected.arrived
    wire.barrier()
    wire.send(torch.ones(4), 1 - wire.rank).wait()
    expected.wait()
    return landed, waiting


def test_settle_waits_for_what_was_sent_and_not_for_what_was_not(ranks) -> None:
    assert ranks(2, in_the_air) == [(True, True)] * 2

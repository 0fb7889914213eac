"""Flight, Account and CommThread: the arithmetic of waiting, under a clock that the test moves."""

import threading
import time
from concurrent.futures import Future

import pytest
import torch

import thinwire as tw
from thinwire.text import format_bytes
from thinwire.wire.account import Account
from thinwire.wire.codecs import Dense, Int8
from thinwire.wire.comm_thread import CommThread
from thinwire.wire.flight import Flight, all_finite


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Arrival(Future):  # type: ignore[type-arg]
    """A result for which the caller waits until the clock shows `at`."""

    def __init__(self, clock: Clock, at: float) -> None:
        super().__init__()
        self._clock, self._at = clock, at

    def result(self, timeout: float | None = None) -> float:
        self._clock.now = max(self._clock.now, self._at)
        return self._at


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def flight(clock: Clock, account: Account, at: float) -> Flight:
    flight = Flight(torch.zeros(3), account)
    flight._lands_with(Arrival(clock, at))
    return flight


def test_what_is_waited_for_is_exposed_and_the_rest_hidden(clock: Clock) -> None:
    account = Account()
    flying = flight(clock, account, at=110.0)
    clock.now = 107.0  # seven seconds of compute
    flying.wait()
    assert (account.exposed, account.hidden, flying.seconds) == (3.0, 7.0, 10.0)


def test_a_flight_that_arrived_before_is_hidden_altogether(clock: Clock) -> None:
    account = Account()
    flying = flight(clock, account, at=104.0)
    clock.now = 150.0
    flying.wait()
    assert (account.exposed, account.hidden, flying.seconds) == (0.0, 4.0, 4.0)


def test_waiting_at_once_exposes_everything(clock: Clock) -> None:
    account = Account()
    flight(clock, account, at=105.0).wait()
    assert (account.exposed, account.hidden) == (5.0, 0.0)


def test_waiting_again_costs_nothing_and_gives_the_same(clock: Clock) -> None:
    account = Account()
    flying = flight(clock, account, at=105.0)
    first = flying.wait()
    before = account.snapshot()
    clock.now = 200.0
    assert flying.wait() is first
    assert account.snapshot() == before


def test_lag_is_told_in_steps(clock: Clock) -> None:
    account = Account()
    early, late = flight(clock, account, 101.0), flight(clock, account, 101.0)
    account.tick()
    account.tick()
    early.wait()
    assert account.lag == 2
    fresh = flight(clock, account, 101.0)
    account.tick()
    fresh.wait()
    assert account.lag == 2, "the largest so far"
    late.wait()
    assert account.lag == 3


def test_a_world_of_one_is_never_in_the_air(clock: Clock) -> None:
    wire = tw.Wire()
    flying = wire.mean(torch.ones(4))
    clock.now += 50
    flying.wait()
    assert (wire.account.exposed, wire.account.hidden, flying.seconds) == (0.0, 0.0, 0.0)


def test_an_error_comes_out_of_every_wait_and_is_not_accounted() -> None:
    account = Account()
    flying = Flight(torch.zeros(1), account)
    failed: Future[float] = Future()
    failed.set_exception(KeyError("lost"))
    flying._lands_with(failed)
    for _ in range(2):
        with pytest.raises(KeyError, match="lost"):
            flying.wait()
    assert account.exposed == account.hidden == 0.0
    with pytest.raises(RuntimeError, match="only after wait"):
        _ = flying.finite


def test_arrived_tells_without_waiting() -> None:
    account = Account()
    flying = Flight(torch.zeros(1), account)
    arrival: Future[float] = Future()
    flying._lands_with(arrival)
    assert not flying.arrived
    arrival.set_result(time.perf_counter())
    assert flying.arrived
    flying.wait()
    assert flying.arrived


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_all_finite(bad: float) -> None:
    x = torch.randn(1000)
    assert all_finite(x)
    assert all_finite(torch.empty(0))
    x[997] = bad
    assert not all_finite(x)


def test_account_snapshot_and_restore() -> None:
    account = Account()
    account.launched()
    account.sent(1000)
    account.landed(flown=3.0, waited=1.0, lag=2)
    account.tick()
    account.skipped += 1
    saved = account.snapshot()
    assert saved == {
        "bytes": 1000,
        "transfers": 1,
        "exposed": 1.0,
        "hidden": 2.0,
        "lag": 2,
        "skipped": 1,
        "steps": 1,
    }
    other = Account()
    other.restore(saved)
    assert other == account
    assert isinstance(other.bytes, int)


def test_account_in_words() -> None:
    account = Account(bytes=312_000_000, transfers=7, exposed=0.42, hidden=41.68)
    assert str(account) == "312 MB sent in 7 transfers, 0.4 s exposed, 41.7 s hidden"
    account.skipped = 2
    assert str(account).endswith("hidden, 2 steps skipped")
    assert [format_bytes(n) for n in (0, 999, 1000, 1_234_567, 5e9, 2e12, 3e15)] == [
        "0 B",
        "999 B",
        "1 kB",
        "1.23 MB",
        "5 GB",
        "2 TB",
        "3e+03 TB",
    ]


def test_an_account_is_counted_by_many_threads() -> None:
    account = Account()
    threads = [
        threading.Thread(target=lambda: [account.sent(1) for _ in range(5000)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert account.bytes == 20_000


def test_a_lane_keeps_the_order_and_hands_errors_to_who_waits() -> None:
    lane = CommThread("test")
    done: list[int] = []
    first = lane.submit(lambda: done.append(0))
    broken = lane.submit(lambda: 1 / 0)
    futures = [lane.submit(lambda i=i: done.append(i)) for i in range(1, 50)]
    assert first.result(30) is None
    with pytest.raises(ZeroDivisionError):
        broken.result(30)
    for future in futures:
        future.result(30)
    assert done == list(range(50))
    lane.close()
    assert lane.join(30)


def untouched(seed: int) -> None:
    """The wire reads the payload only; neighbours of it in memory stay as they are."""
    tw.init()
    wire = tw.Wire()
    for codec in (Dense(), Dense(torch.bfloat16), Int8()):
        whole = torch.full((3000,), 7.0)
        payload = whole[1000:2000]
        payload.copy_(torch.arange(1000.0) + wire.rank)
        flying = wire.mean(payload, codec)
        assert flying.wait() is payload
        assert (whole[:1000] == 7).all()
        assert (whole[2000:] == 7).all()
        torch.testing.assert_close(payload, torch.arange(1000.0) + 0.5, rtol=0.02, atol=4.0)
    own = torch.full((1000,), float(wire.rank))
    sent = own.clone()
    if wire.rank == 0:
        wire.send(sent, 1, codec=Int8()).wait()
        assert torch.equal(sent, own), "sending changes nothing"
    else:
        wire.recv(sent, 0, codec=Int8()).wait()
        assert (sent == 0).all()
    # Nothing lands in a payload before the peer has sent its own.
    store = torch.distributed.distributed_c10d._get_default_store()
    late = torch.full((100,), float(wire.rank))
    if wire.rank == 1:
        store.get("looked")
        wire.mean(late).wait()
    else:
        flying = wire.mean(late)
        assert not flying.arrived
        assert (late == 0).all()
        store.set("looked", "")
        assert (flying.wait() == 0.5).all()


def test_a_payload_is_written_when_it_lands_and_nothing_else_is(ranks) -> None:
    ranks(2, untouched, 0)

"""The one-bit methods as the trainer's loop uses them."""

from typing import Any

import pytest
import torch
from tests.conftest import Ranks
from torch import Tensor, nn

from thinwire.errors import UsageError
from thinwire.train import checkpoint
from thinwire.train.config import parse
from thinwire.train.methods import find_method
from thinwire.train.replica import Replica
from thinwire.wire import world

NAMES = ["one-bit-adam", "one-bit-lamb", "zero-one-adam"]


def build(name: str, **settings: Any) -> Replica:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 1))
    inner = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    method = find_method(name)
    return method.build(model, inner, method.settings(**settings), None)


def steps(replica: Replica, first: int, last: int, clip: float = 1.0, micro: int = 2) -> float:
    norm = 0.0
    for step in range(first, last):
        for part in range(micro):
            seed = 100 * step + 10 * part + world.current().rank
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
            with replica.accumulating(last=part == micro - 1):
                (replica.module(x) - x.sum(1, keepdim=True)).square().mean().backward()
        norm = replica.step(clip)
        replica.optimizer.zero_grad(set_to_none=True)
    return norm


def weights(replica: Replica) -> list[Tensor]:
    return [p.detach().clone() for p in replica.model.parameters()]


def saved(name: str, stop: int, end: int) -> tuple[Any, Any, list[Tensor]]:
    world.init()
    replica = build(name, freeze_at=4)
    steps(replica, 0, stop)
    shared, private = (
        checkpoint.unflatten({k: v.clone() for k, v in checkpoint.flatten(s).items()})
        for s in replica.state()
    )
    before = replica.account.bytes
    steps(replica, stop, end)
    assert replica.account.bytes > before
    return shared, private, weights(replica)


def resumed(name: str, states: list[Any], stop: int, end: int) -> list[Tensor]:
    place = world.init()
    replica = build(name, freeze_at=4)
    shared, private, _ = states[place.rank % len(states)]
    replica.load_state(shared, private, same_replicas=place.size == len(states))
    steps(replica, stop, end)
    return weights(replica)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stop", [2, 6])
def test_a_resumed_run_goes_on_bit_for_bit(ranks: Ranks, name: str, stop: int) -> None:
    states = ranks(2, saved, name, stop, 9)
    for got, (_, _, straight) in zip(ranks(2, resumed, name, states, stop, 9), states, strict=True):
        assert all(map(torch.equal, got, straight))


@pytest.mark.parametrize("size", [1, 3])
def test_a_run_is_resumed_on_another_number_of_replicas(ranks: Ranks, size: int) -> None:
    states = ranks(2, saved, "one-bit-lamb", 6, 9)
    answers = ranks(size, resumed, "one-bit-lamb", states, 6, 9)
    for got in answers:
        assert all(map(torch.equal, got, answers[0]))
        assert all(bool(w.isfinite().all()) for w in got)


def test_0_1_adam_is_resumed_by_as_many_replicas() -> None:
    replica = build("zero-one-adam")
    steps(replica, 0, 2)
    with pytest.raises(UsageError, match="resume it on as many workers"):
        replica.load_state(*replica.state(), same_replicas=False)


@pytest.mark.parametrize("name", ["lamb", *NAMES])
def test_a_bad_gradient_is_skipped_and_told(name: str) -> None:
    replica = build(name)
    steps(replica, 0, 2)
    before = weights(replica)
    (replica.module(torch.ones(1, 3)) * float("nan")).sum().backward()
    assert not replica.step(1.0) < float("inf")
    assert all(map(torch.equal, before, weights(replica)))
    assert replica.account.skipped == 1


def test_settings_are_checked_before_anything_starts() -> None:
    for flags, message in (
        (["--freeze-at", "-1"], "--freeze-at takes a number of steps >= 0, got -1"),
        (["--freeze-at", "200"], "--freeze-at 200: a run of --steps 200 would be dense throughout"),
        (["--dense", "int8+ef"], "--dense takes a codec without error feedback"),
        (["--dense", "int3"], "unknown codec 'int3'"),
        (["--bucket-mb", "-2"], "--bucket-mb takes a number >= 0"),
        (["--max-coefficient", "0.001"], r"coefficient=...\) takes two numbers"),
        (["--shards", "2"], "keeps each replica whole on one rank"),
    ):
        with pytest.raises(UsageError, match=message):
            parse(["--method", "one-bit-lamb", *flags])
    with pytest.raises(UsageError, match="unknown codec"):
        parse(["--method", "lamb", "--codec", "int3"])


def test_another_optimizer_is_refused() -> None:
    model = nn.Linear(2, 2)
    method = find_method("one-bit-adam")
    with pytest.raises(UsageError, match="--optimizer SGD: one-bit-adam is an optimizer of its"):
        method.build(model, torch.optim.SGD(model.parameters(), lr=0.1), method.settings(), None)

"""The one-bit methods as the trainer's loop uses them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import Ranks
from thinwire.errors import UsageError
from thinwire.methods.onebit.zero_one_adam import ZeroOneAdam
from thinwire.train.checkpoints import checkpoint
from thinwire.train.config import parse
from thinwire.train.methods.registry import find_method
from thinwire.train.methods.replica import Replica
from thinwire.wire import world

NAMES = ["one-bit-adam", "one-bit-lamb", "zero-one-adam"]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sharded": {"shard_state": True},
    "late": {"delayed_step": True},
}


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


def saved(name: str, stop: int, end: int, kind: str) -> tuple[Any, Any, list[Tensor]]:
    world.init()
    replica = build(name, freeze_at=4, **KINDS[kind])
    steps(replica, 0, stop)
    shared, private = (
        checkpoint.unflatten({k: v.clone() for k, v in checkpoint.flatten(s).items()})
        for s in replica.state()
    )
    before = replica.account.bytes
    steps(replica, stop, end)
    assert replica.account.bytes > before
    return shared, private, weights(replica)


def resumed(name: str, states: list[Any], stop: int, end: int, kind: str) -> list[Tensor]:
    place = world.init()
    replica = build(name, freeze_at=4, **KINDS[kind])
    shared, private, _ = states[place.rank % len(states)]
    replica.load_state(shared, private, same_replicas=place.size == len(states))
    steps(replica, stop, end)
    return weights(replica)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((n, "plain") for n in NAMES),
        ("one-bit-lamb", "sharded"),
        ("one-bit-adam", "late"),
        ("one-bit-lamb", "late"),
    ],
)
@pytest.mark.parametrize("stop", [2, 6])
def test_a_resumed_run_goes_on_bit_for_bit(ranks: Ranks, name: str, kind: str, stop: int) -> None:
    states = ranks(2, saved, name, stop, 9, kind)
    for got, (_, _, straight) in zip(
        ranks(2, resumed, name, states, stop, 9, kind), states, strict=True
    ):
        assert all(map(torch.equal, got, straight))


@pytest.mark.parametrize(
    ("name", "kind"),
    [("one-bit-lamb", "plain"), ("one-bit-adam", "sharded"), ("one-bit-adam", "late")],
)
def test_a_run_is_resumed_on_another_number_of_replicas(ranks: Ranks, name: str, kind: str) -> None:
    states = ranks(2, saved, name, 6, 9, kind)
    for size in (1, 3):
        answers = ranks(size, resumed, name, states, 6, 9, kind)
        for got in answers:
            assert all(map(torch.equal, got, answers[0]))
            assert all(bool(w.isfinite().all()) for w in got)


def apart(stop: int) -> tuple[Any, Any, list[Tensor], bool]:
    world.init()
    replica = build("zero-one-adam", freeze_at=2, double_after=1, local_double_after=1, longest=4)
    steps(replica, 0, stop)
    shared, private = replica.state()
    optimizer = replica.optimizer
    assert isinstance(optimizer, ZeroOneAdam)
    return shared, private, weights(replica), optimizer.apart


def joined(states: list[Any], stop: int) -> list[Tensor]:
    world.init()
    replica = build("zero-one-adam", freeze_at=2, double_after=1, local_double_after=1, longest=4)
    replica.load_state(states[0][0], states[0][1], same_replicas=False)
    return weights(replica)


@pytest.mark.parametrize(("stop", "differ"), [(3, False), (7, True)])
def test_0_1_adam_goes_on_from_the_mean_on_another_number_of_replicas(
    ranks: Ranks, stop: int, differ: bool
) -> None:
    """Exchanges at steps 3, 5 and 9: between them each replica has weights of its own."""
    states = ranks(2, apart, stop)
    assert [s[3] for s in states] == [differ] * 2
    assert ("model" in states[0][1]) == differ
    for got in ranks(3, joined, states, stop):
        for now, one, other in zip(got, states[0][2], states[1][2], strict=True):
            torch.testing.assert_close(now, (one + other) / 2)


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
        (["--max-coefficient", "0.001"], "^--min-coefficient and --max-coefficient takes two"),
        (["--shards", "2"], "keeps each replica whole on one rank"),
        (["--shard-state", "--dense", "int8"], r"shard_state=True\) sends directions in the form"),
        (["--shard-state", "--delayed-step"], "leave one of the two out"),
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

"""Replicas under each method of the registry, as the loop uses them."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import Ranks
from thinwire.errors import UsageError
from thinwire.train.methods.registry import METHODS, find_method
from thinwire.train.methods.replica import Replica
from thinwire.wire import world
from thinwire.wire.agreement import digest

NAMES = ["none", "ddp", "average"]
REPLICATED = ["ddp", "average"]  # replicas with the same weights after every step


def build(name: str, **settings: Any) -> Replica:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.LayerNorm(4))
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    method = find_method(name)
    return method.build(model, inner, method.settings(**settings), None)


def one_step(replica: Replica, scale: float, clip: float = 0.0) -> float:
    x = torch.arange(6.0).view(2, 3) + scale
    with replica.accumulating(last=True):
        (replica.module(x).square().sum() * scale).backward()
    norm = replica.step(clip)
    replica.optimizer.zero_grad(set_to_none=True)
    return norm


def weights(replica: Replica) -> list[torch.Tensor]:
    return [p.detach().clone() for p in replica.model.parameters()]


def test_these_are_all_the_methods() -> None:
    assert set(NAMES) <= set(METHODS)
    for name, method in METHODS.items():
        assert method.name == name
        assert method.summary
    with pytest.raises(UsageError, match=r"--method takes one of none, ddp, .*; got 'best'"):
        find_method("best")


@pytest.mark.parametrize("name", NAMES)
def test_alone_every_method_is_the_inner_optimizer(name: str) -> None:
    replica, plain = build(name), build("none")
    for scale in (1.0, 2.0):
        assert one_step(replica, scale, clip=0.5) == one_step(plain, scale, clip=0.5)
    assert all(map(torch.equal, weights(replica), weights(plain)))
    assert replica.account.bytes == 0
    assert replica.account.steps == 2


@pytest.mark.parametrize("name", NAMES)
def test_the_norm_is_of_before_the_clipping(name: str) -> None:
    assert one_step(build(name), 4.0, clip=0.0) == one_step(build(name), 4.0, clip=1e-3) > 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_is_skipped_and_counted(name: str, bad: float) -> None:
    replica = build(name)
    one_step(replica, 1.0)
    before = weights(replica)
    norm = one_step(replica, bad, clip=1.0)
    assert not norm < float("inf")
    assert all(map(torch.equal, before, weights(replica)))
    assert replica.account.skipped == 1
    one_step(replica, 1.0)
    assert not all(map(torch.equal, before, weights(replica)))
    assert all(bool(w.isfinite().all()) for w in weights(replica))


@pytest.mark.parametrize("name", NAMES)
def test_a_loaded_replica_goes_on_with_the_same_bits(name: str) -> None:
    one, other = build(name), build(name)
    one_step(one, 1.0)
    shared, private = copy.deepcopy(one.state())
    assert ("model" in shared) == (name in REPLICATED)
    other.load_state(shared, private, same_replicas=True)
    for replica in (one, other):
        one_step(replica, 2.0)
    assert all(map(torch.equal, weights(one), weights(other)))


def steps_apart(name: str, settings: dict[str, Any]) -> tuple[bytes, bytes, int]:
    """Digests after two steps on different data, in the consensus, and after it."""
    rank = world.init(timeout=20).rank
    replica = build(name, **settings)
    for scale in (1.0, 2.0):
        one_step(replica, scale + rank)
    after = digest(weights(replica))
    sent = replica.account.bytes
    with replica.consensus():
        inside = weights(replica)
    assert digest(weights(replica)) == after
    assert replica.account.bytes == sent, "an evaluation is no part of what a method costs"
    return after, digest(inside), sent


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("ddp", {}),
        ("ddp", {"bucket_mb": 0.001}),
        ("average", {}),
        ("average", {"codec": "int4+ef"}),
    ],
)
def test_replicated_means_the_same_bits(ranks: Ranks, name: str, settings: dict[str, Any]) -> None:
    (after, inside, sent), *others = ranks(2, steps_apart, name, settings)
    assert {other[0] for other in others} == {after}
    assert inside == after
    assert sent > 0


def test_replicas_that_never_talk_are_evaluated_at_their_mean(ranks: Ranks) -> None:
    mine = torch.tensor(ranks(2, one_step_of_none))
    own, inside = mine[:, 0], mine[:, 1]
    assert not torch.equal(own[0], own[1])
    assert torch.equal(inside[0], inside[1])
    assert torch.allclose(inside[0], own.mean(0), atol=1e-7)


def one_step_of_none() -> list[list[float]]:
    rank = world.init(timeout=20).rank
    replica = build("none")
    one_step(replica, 1.0 + rank)
    own = torch.cat([w.flatten() for w in weights(replica)]).tolist()
    with replica.consensus():
        inside = torch.cat([w.flatten() for w in weights(replica)]).tolist()
    assert replica.account.bytes == 0
    assert torch.cat([w.flatten() for w in weights(replica)]).tolist() == own
    return [own, inside]


@pytest.mark.parametrize("name", REPLICATED)
def test_micro_batches_travel_once(ranks: Ranks, name: str) -> None:
    once, twice = ranks(2, bytes_of_two_micro_batches, name)[0]
    assert once == twice > 0


def bytes_of_two_micro_batches(name: str) -> tuple[int, int]:
    world.init(timeout=20)
    replica = build(name)
    one_step(replica, 1.0)  # the first one also agrees on which parameters are trained
    start = replica.account.bytes
    one_step(replica, 1.0)
    once = replica.account.bytes - start
    for last in (False, True):
        with replica.accumulating(last=last):
            replica.module(torch.ones(2, 3)).sum().backward()
    replica.step(0.0)
    return once, replica.account.bytes - start - once

"""Parameters that have a gradient at some steps, or on some ranks, only: frozen and unfrozen
layers, branches, experts, a second head. The measure is what data parallelism does with the plain
optimizer: a gradient that is missing on some ranks is zeros there, one missing on all is none."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.conftest import Ranks

STEPS = 12
Schedule = Callable[[int, int], bool]  # (rank, step) -> whether the branch is used

SCHEDULES: dict[str, Schedule] = {
    "dropped at step 5": lambda rank, step: step < 5,
    "first used at step 4": lambda rank, step: step >= 4,
    "first used at step 4 by rank 1": lambda rank, step: step >= 4 and rank == 1,
    "every other step": lambda rank, step: step % 2 == 0,
    "in turn": lambda rank, step: step % 2 == rank,
    "by one rank": lambda rank, step: rank == 0,
}


class Net(nn.Module):
    """Two layers that are always used, and a branch between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.branch, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def loss(self, rank: int, step: int, branch: bool) -> Tensor:
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank))
        h = torch.tanh(self.first(x))
        if branch:
            h = h + torch.tanh(self.branch(h))
        return (self.last(h) - x.sum(1, keepdim=True)).square().mean()


def inner(name: str, net: Net) -> torch.optim.Optimizer:
    settings = {"lr": 1e-2, "weight_decay": 0.1}
    if name == "Lamb":
        return tw.Lamb(net.parameters(), **settings)
    if name == "SGD":
        return torch.optim.SGD(net.parameters(), momentum=0.9, **settings)
    return torch.optim.AdamW(net.parameters(), **settings)


def build(method: str, net: Net, **settings: Any) -> Any:
    if method == "GradientAverage":
        return tw.GradientAverage(inner("AdamW", net), bucket_mb=0.0002, **settings)
    common = {"lr": 1e-2, "weight_decay": 0.1, "bucket_mb": 0.0002}
    return getattr(tw, method)(net.parameters(), **common, **settings)


def train(
    net: Net, optimizer: Any, schedule: Schedule, begin: int = 0, end: int = STEPS, **how: Any
) -> None:
    rank = tw.init().rank if not how else how["rank"]
    for step in range(begin, end):
        net.loss(rank, step, schedule(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(method: str, schedule: str, settings: dict[str, Any]) -> list[Tensor]:
    tw.init()
    net = Net()
    train(net, build(method, net, **settings), SCHEDULES[schedule])
    return [p.detach() for p in net.parameters()]


def data_parallel(name: str, schedule: Schedule, size: int, steps: int = STEPS) -> list[Tensor]:
    """All ranks in one process; what DDP with find_unused_parameters=True does."""
    net = Net()
    optimizer = inner(name, net)
    for step in range(steps):
        gradients = []
        for rank in range(size):
            net.zero_grad()
            net.loss(rank, step, schedule(rank, step)).backward()
            gradients.append([p.grad for p in net.parameters()])
        for p, each in zip(net.parameters(), zip(*gradients, strict=True), strict=True):
            there = [g for g in each if g is not None]
            p.grad = sum(there) / size if there else None  # type: ignore[assignment]
        optimizer.step()
    return [p.detach() for p in net.parameters()]


CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "GradientAverage": ("GradientAverage", "AdamW", {}),
    "GradientAverage, overlap": ("GradientAverage", "AdamW", {"overlap": True}),
    "OneBitAdam": ("OneBitAdam", "AdamW", {"freeze_at": 99}),
    "OneBitAdam, sharded": ("OneBitAdam", "AdamW", {"freeze_at": 99, "shard_state": True}),
    "OneBitLamb": ("OneBitLamb", "Lamb", {"freeze_at": 99}),
    "ZeroOneAdam": ("ZeroOneAdam", "AdamW", {"freeze_at": 99, "double_after": 99}),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", CASES)
def test_dense_steps_are_those_of_data_parallelism(ranks: Ranks, case: str, schedule: str) -> None:
    method, plain, settings = CASES[case]
    answers = ranks(2, trained, method, schedule, settings)
    expected = data_parallel(plain, SCHEDULES[schedule], 2)
    torch.testing.assert_close(answers[0], expected, rtol=1e-4, atol=1e-6)
    assert all(map(torch.equal, answers[0], answers[1])), "replicas hold the same bits"


# -- requires_grad ---------------------------------------------------------------------------------


def unfrozen_later(method: str, settings: dict[str, Any]) -> list[Tensor]:
    tw.init()
    net = Net()
    net.branch.requires_grad_(False)
    optimizer = build(method, net, **settings)
    train(net, optimizer, lambda rank, step: True, 0, 4)
    net.branch.requires_grad_(True)
    net.last.requires_grad_(False)
    train(net, optimizer, lambda rank, step: True, 4, STEPS)
    return [p.detach() for p in net.parameters()]


def reference_unfrozen(name: str, size: int) -> list[Tensor]:
    net = Net()
    optimizer = inner(name, net)
    for step in range(STEPS):
        net.branch.requires_grad_(step >= 4)
        net.last.requires_grad_(step < 4)
        optimizer.zero_grad()
        sum(net.loss(rank, step, True) / size for rank in range(size)).backward()  # type: ignore
        optimizer.step()
    return [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("case", CASES)
def test_layers_may_be_frozen_and_unfrozen(ranks: Ranks, case: str) -> None:
    method, plain, settings = CASES[case]
    answers = ranks(2, unfrozen_later, method, settings)
    expected = reference_unfrozen(plain, 2)
    torch.testing.assert_close(answers[0], expected, rtol=1e-4, atol=1e-6)
    assert all(map(torch.equal, answers[0], answers[1]))


@pytest.mark.parametrize("method", ["DSGD", "DmSGD", "DecentLaM"])
def test_decentralized_replicas_unfreeze_a_layer(ranks: Ranks, method: str) -> None:
    """On a complete graph they are data parallelism with (momentum) SGD."""
    answers = ranks(2, unfrozen_decentralized, method)
    momentum = 0.0 if method == "DSGD" else 0.9
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=momentum, weight_decay=0.1)
    for step in range(STEPS):
        net.branch.requires_grad_(step >= 4)
        net.last.requires_grad_(step < 4)
        optimizer.zero_grad()
        sum(net.loss(rank, step, True) / 2 for rank in range(2)).backward()  # type: ignore
        optimizer.step()
    expected = [p.detach() for p in net.parameters()]
    torch.testing.assert_close(answers[0], expected, rtol=1e-4, atol=1e-6)


def unfrozen_decentralized(method: str) -> list[Tensor]:
    return unfrozen_later(method, {"topology": "complete"})


# -- after the freeze ------------------------------------------------------------------------------

COMPRESSED: dict[str, tuple[str, dict[str, Any]]] = {
    "OneBitAdam": ("OneBitAdam", {}),
    "OneBitAdam as published": ("OneBitAdam", {"whiten": False, "forget": False, "floor": 0.0}),
    "OneBitAdam, clipped": ("OneBitAdam", {"clip": 0.5}),
    "OneBitAdam, sharded": ("OneBitAdam", {"shard_state": True}),
    "OneBitLamb": ("OneBitLamb", {}),
    "OneBitLamb, sharded": ("OneBitLamb", {"shard_state": True}),
    "ZeroOneAdam, local": ("ZeroOneAdam", {"local_double_after": 4}),
    "ZeroOneAdam, learning": ("ZeroOneAdam", {"freeze_at": 99, "double_after": 3}),
}


def at_rest(method: str, settings: dict[str, Any], how: str) -> tuple[float, float]:
    """How far the branch goes in 20 steps in which nobody uses it, and the first layer."""
    tw.init()
    net = Net()
    optimizer = build(method, net, **({"freeze_at": 6} | settings))
    train(net, optimizer, lambda rank, step: True, 0, 10)
    optimizer.finish()
    before = [p.detach().clone() for p in net.parameters()]
    if how == "frozen":
        net.branch.requires_grad_(False)
    train(net, optimizer, lambda rank, step: how == "frozen", 10, 30)
    optimizer.finish()
    moved = [float((p.detach() - b).norm()) for p, b in zip(net.parameters(), before, strict=True)]
    return max(moved[2:4]), moved[0]


@pytest.mark.parametrize("how", ["frozen", "branch"])
@pytest.mark.parametrize("case", COMPRESSED)
def test_what_nobody_uses_stays_where_it_is_after_the_freeze(
    ranks: Ranks, case: str, how: str
) -> None:
    for branch, first in ranks(2, at_rest, *COMPRESSED[case], how):
        assert branch == 0.0
        assert first > 0.0


def late_at_rest() -> tuple[float, float]:
    tw.init()
    net = Net()
    optimizer = build("OneBitAdam", net, freeze_at=6, delayed_step=True)
    train(net, optimizer, lambda rank, step: True, 0, 10)
    train(net, optimizer, lambda rank, step: False, 10, 12)
    before = [p.detach().clone() for p in net.parameters()]
    train(net, optimizer, lambda rank, step: False, 12, 30)
    moved = [float((p.detach() - b).norm()) for p, b in zip(net.parameters(), before, strict=True)]
    return max(moved[2:4]), moved[0]


def test_late_steps_leave_alone_what_nobody_uses(ranks: Ranks) -> None:
    for branch, first in ranks(2, late_at_rest):
        assert branch == 0.0
        assert first > 0.0


def used_again(method: str, settings: dict[str, Any]) -> tuple[float, list[Tensor]]:
    """The branch has a pause; the loss goes on falling when it is used again."""
    tw.init()
    net = Net()
    optimizer = build(method, net, **({"freeze_at": 6} | settings))
    train(net, optimizer, lambda rank, step: not 10 <= step < 16, 0, 60)
    optimizer.finish()
    with torch.no_grad():
        losses = [float(net.loss(rank, 999, True)) for rank in range(2)]
    return sum(losses) / 2, [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("case", COMPRESSED)
def test_a_branch_that_had_a_pause_is_trained_again(ranks: Ranks, case: str) -> None:
    (loss, weights), (_, others) = ranks(2, used_again, *COMPRESSED[case])
    with torch.no_grad():
        start = sum(float(Net().loss(rank, 999, True)) for rank in range(2)) / 2
    assert loss < 0.7 * start
    assert all(map(torch.equal, weights, others))


def first_used_after_the_freeze(method: str, settings: dict[str, Any]) -> Any:
    tw.init()
    net = Net()
    optimizer = build(method, net, freeze_at=4, **settings)
    train(net, optimizer, lambda rank, step: False, 0, 8)
    before = net.branch.weight.detach().clone()
    with pytest.warns(UserWarning, match="compress=False"):
        train(net, optimizer, lambda rank, step: rank == 1, 8, 11)
    saved = optimizer.state_dict()
    train(net, optimizer, lambda rank, step: rank == 1, 11, 20)
    optimizer.finish()
    moved = float((net.branch.weight.detach() - before).norm())
    return moved, [p.detach() for p in net.parameters()], saved["method"]["latecomers"]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("method", ["OneBitAdam", "OneBitLamb"])
def test_a_branch_first_used_after_the_freeze_is_trained_densely(
    ranks: Ranks, method: str, late: bool
) -> None:
    answers = ranks(2, first_used_after_the_freeze, method, {"late": late})
    for moved, weights, latecomers in answers:
        assert moved > 0.01
        assert latecomers == [2, 3]
        assert all(map(torch.equal, weights, answers[0][1]))


def too_late_for_local_steps() -> str:
    tw.init()
    net = Net()
    optimizer = build("ZeroOneAdam", net, freeze_at=4)
    train(net, optimizer, lambda rank, step: False, 0, 8)
    with pytest.raises(RuntimeError, match="freeze_at") as raised:
        train(net, optimizer, lambda rank, step: rank == 1, 8, 11)
    return str(raised.value)


def test_zero_one_adam_refuses_what_it_has_no_variance_for_on_all_ranks(ranks: Ranks) -> None:
    for text in ranks(2, too_late_for_local_steps):
        assert "[2, 3]" in text
        assert "OneBitAdam" in text


# -- states ----------------------------------------------------------------------------------------


def resumed(method: str, settings: dict[str, Any], cut: int) -> tuple[list[Tensor], list[Tensor]]:
    """A branch that joins at step 4 and pauses: whole, and saved and loaded in the middle."""
    tw.init()

    def schedule(rank: int, step: int) -> bool:
        return step in (4, 5, 8, 9) and rank == 0

    whole = Net()
    train(whole, build(method, whole, **settings), schedule)
    first = Net()
    optimizer = build(method, first, **settings)
    train(first, optimizer, schedule, 0, cut)
    second = Net()
    second.load_state_dict(first.state_dict())
    again = build(method, second, **settings)
    again.load_state_dict(optimizer.state_dict())
    train(second, again, schedule, cut, STEPS)
    return [p.detach() for p in whole.parameters()], [p.detach() for p in second.parameters()]


@pytest.mark.parametrize("cut", [3, 7])
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("GradientAverage", {"codec": tw.codecs.ErrorFeedback(tw.codecs.Int4())}),
        ("OneBitAdam", {"freeze_at": 2}),
        ("OneBitAdam", {"freeze_at": 2, "delayed_step": True}),
        ("OneBitAdam", {"freeze_at": 6}),
        ("OneBitLamb", {"freeze_at": 6}),
    ],
)
@pytest.mark.filterwarnings("ignore:.*compress=False")
def test_states_know_who_joined_and_who_rests(
    ranks: Ranks, method: str, settings: dict[str, Any], cut: int
) -> None:
    for whole, cut_in_two in ranks(2, resumed, method, settings, cut):
        assert all(map(torch.equal, whole, cut_in_two))


# -- codecs with memory ----------------------------------------------------------------------------


def errors_at_rest(codec: Any) -> tuple[list[Tensor], list[Tensor], float]:
    tw.init()
    net = Net()
    optimizer = tw.GradientAverage(inner("SGD", net), codec=codec, bucket_mb=1.0)
    train(net, optimizer, lambda rank, step: True, 0, 5)
    memory = optimizer.buckets[0].memory
    spans = optimizer.buckets[0].spans()
    where = [spans[optimizer.buckets[0].indices.index(i)] for i in (2, 3)]
    side = memory.worker if hasattr(memory, "worker") else memory
    before = [side.error[span].clone() for span in where]
    weights = net.branch.weight.detach().clone()
    train(net, optimizer, lambda rank, step: False, 5, 9)
    after = [side.error[span].clone() for span in where]
    return before, after, float((net.branch.weight.detach() - weights).norm())


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "codec", [tw.codecs.ErrorFeedback(tw.codecs.Int4()), tw.codecs.Threshold(0.1)], ids=str
)
def test_what_a_codec_remembers_of_unused_parameters_waits_for_them(
    ranks: Ranks, codec: Any, size: int
) -> None:
    for before, after, moved in ranks(size, errors_at_rest, codec):
        assert all(map(torch.equal, before, after))
        assert any(bool(b.any()) for b in before)
        assert moved == 0.0

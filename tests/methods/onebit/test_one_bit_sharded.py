"""FSDP2 inside a replica, every-step methods between replicas: one bit, and plain averages."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import thinwire as tw
from tests.conftest import Ranks

STEPS = 9
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "OneBitAdam": ("OneBitAdam", {"clip": 0.5}),
    "OneBitAdam as published": ("OneBitAdam", {"whiten": False, "forget": False}),
    "OneBitAdam, late": ("OneBitAdam", {"delayed_step": True}),
    "OneBitLamb": ("OneBitLamb", {"weight_decay": 0.1}),
    "ZeroOneAdam": ("ZeroOneAdam", {"double_after": 2, "local_double_after": 1, "longest": 2}),
}
DENSE = METHODS | {"ZeroOneAdam": ("ZeroOneAdam", {"double_after": 99})}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5), nn.Linear(5, 2))


def loss_of(model: nn.Module, worker: int, step: int) -> Tensor:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + worker))
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def shard(replicas: int, shards: int) -> tuple[nn.Module, Any]:
    tw.init()
    mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replica", "shard"))
    model = net()
    for layer in model:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    return model, mesh


def sharded(case: str, replicas: int, freeze_at: int, steps: int) -> tuple[list[Tensor], float]:
    method, settings = (METHODS if freeze_at < steps else DENSE)[case]
    model, mesh = shard(replicas, 2)
    optimizer = getattr(tw, method)(
        model.parameters(), lr=1e-2, freeze_at=freeze_at, group=mesh["replica"], **settings
    )
    for step in range(steps):
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.finish()
    loss = float(loss_of(model, 0, 10_000).detach())
    return [p.full_tensor().detach().clone() for p in model.parameters()], loss  # type: ignore


def unsharded(case: str, freeze_at: int) -> list[Tensor]:
    """The same replicas, each whole on one rank: its batch is that of the two shards."""
    method, settings = (METHODS if freeze_at < STEPS else DENSE)[case]
    rank = tw.init().rank
    model = net()
    optimizer = getattr(tw, method)(model.parameters(), lr=1e-2, freeze_at=freeze_at, **settings)
    for step in range(STEPS):
        halves = [loss_of(model, 2 * rank + half, step) for half in range(2)]
        (sum(halves) / 2).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    optimizer.finish()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("case", METHODS)
def test_one_replica_in_two_shards_is_the_replica_in_one(ranks: Ranks, case: str) -> None:
    """Alone it rounds nothing: norms, floors and corrections of both stages are those of the whole
    tensors."""
    expected = ranks(1, unsharded, case, 4)[0]
    for weights, _ in ranks(2, sharded, case, 1, 4, STEPS):
        torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", METHODS)
@pytest.mark.filterwarnings("ignore:.*all of them dense")
def test_dense_steps_of_two_sharded_replicas_are_those_of_two_whole_ones(
    ranks: Ranks, case: str
) -> None:
    expected = ranks(2, unsharded, case, 99)[0]
    for weights, _ in ranks(4, sharded, case, 2, 99, STEPS):
        torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", METHODS)
def test_two_sharded_replicas_learn_in_one_bit_and_stay_equal(ranks: Ranks, case: str) -> None:
    steps = 61 if case == "ZeroOneAdam" else 60
    answers = ranks(4, sharded, case, 2, 10, steps)
    for weights, loss in answers:
        assert all(map(torch.equal, weights, answers[0][0]))
        assert loss < 0.7 * float(loss_of(net(), 0, 10_000).detach())


def refused(settings: dict[str, Any]) -> str:
    model, mesh = shard(1, 2)
    if "inside" in settings:
        settings = {"inside": mesh["shard"]}
    with pytest.raises(ValueError, match="FSDP2") as raised:
        tw.OneBitAdam(model.parameters(), group=mesh["replica"], **settings)
    return str(raised.value)


@pytest.mark.parametrize("settings", [{"shard_state": True}, {"inside": None}], ids=str)
def test_what_shards_a_second_time_is_refused(ranks: Ranks, settings: dict[str, Any]) -> None:
    for text in ranks(2, refused, settings):
        assert next(iter(settings)) in text


def overflow(method: str) -> tuple[list[bool], list[int]]:
    """An infinity in one shard of one replica; what moved at that step, and at the next."""
    model, mesh = shard(2, 2)
    if method == "GradientAverage":
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer: Any = tw.GradientAverage(inner, group=mesh["replica"], overlap=False)
    else:
        optimizer = getattr(tw, method)(
            model.parameters(), lr=1e-2, freeze_at=2, overlap=False, group=mesh["replica"]
        )
    moved, skipped = [], []
    for step in range(6):
        loss_of(model, dist.get_rank(), step).backward()
        before = [p.to_local().detach().clone() for p in model.parameters()]  # type: ignore
        if step in (1, 4) and dist.get_rank() == 3:
            next(iter(model.parameters())).grad.to_local()[0] = math.inf  # type: ignore
        optimizer.step()
        optimizer.zero_grad()
        now = [p.to_local().detach() for p in model.parameters()]  # type: ignore
        moved.append(not all(map(torch.equal, before, now)))
        skipped.append(optimizer.account.skipped)
    return moved, skipped


@pytest.mark.parametrize("method", ["GradientAverage", "OneBitAdam", "OneBitLamb"])
def test_an_overflow_in_one_shard_skips_the_step_of_all(ranks: Ranks, method: str) -> None:
    for moved, skipped in ranks(4, overflow, method):
        assert moved == [True, False, True, True, False, True]
        assert skipped == [0, 1, 1, 1, 2, 2]


# -- complex parameters ----------------------------------------------------------------------------


def complex_net(method: str, settings: dict[str, Any]) -> Tensor:
    rank = tw.init().rank
    x = nn.Parameter(torch.full((5,), 1 + 2j))
    if method == "GradientAverage":
        optimizer: Any = tw.GradientAverage(torch.optim.AdamW([x], lr=0.05))
    else:
        optimizer = getattr(tw, method)([x], lr=0.05, **settings)
    for _ in range(30):
        target = torch.full((5,), complex(rank, -3.0 * rank))
        (x - target).abs().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.finish()
    return x.detach()


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("GradientAverage", {}),
        ("OneBitAdam", {"freeze_at": 99}),
        ("ZeroOneAdam", {"freeze_at": 99, "double_after": 99}),
    ],
)
@pytest.mark.filterwarnings("ignore:.*all of them dense")
def test_complex_parameters_are_trained_as_adam_trains_them(
    ranks: Ranks, method: str, settings: dict[str, Any]
) -> None:
    x = nn.Parameter(torch.full((5,), 1 + 2j))
    decay = 0.01 if method == "GradientAverage" else 0.0
    optimizer = torch.optim.AdamW([x], lr=0.05, weight_decay=decay)
    for _ in range(30):
        optimizer.zero_grad()
        for target in (0j, 1 - 3j):
            ((x - target).abs().square().sum() / 2).backward()
        optimizer.step()
    for got in ranks(2, complex_net, method, settings):
        torch.testing.assert_close(got, x.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("OneBitAdam", {"freeze_at": 5}),
        ("OneBitLamb", {"freeze_at": 5}),
        ("ZeroOneAdam", {"freeze_at": 5}),
        ("DecentLaM", {}),
        ("DmSGD", {}),
    ],
)
def test_and_move_in_both_parts_with_every_method(
    ranks: Ranks, method: str, settings: dict[str, Any]
) -> None:
    one, other = ranks(2, complex_net, method, settings)
    assert torch.equal(one, other)
    assert bool((one.real < 1).all())
    assert bool((one.imag < 2).all())

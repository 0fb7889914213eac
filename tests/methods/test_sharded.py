"""ZeRO inside a group, the method between groups: FSDP2 and ZeroRedundancyOptimizer."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

import thinwire as tw

STEPS = 14


def net(width: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, width), nn.Linear(width, 2))


def batch(worker: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + worker)
    x = torch.randn(8, 6, generator=generator)
    return x, x.sum(1, keepdim=True)


def loss_of(model: nn.Module, worker: int, step: int) -> Tensor:
    x, y = batch(worker, step)
    return (model(x) - y).square().mean()


def sharded(kind: str, width: int) -> tuple[list[Tensor], int]:
    """2 replicas x 2 shards; each rank reads its own data, as in any FSDP run."""
    tw.init()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model = net(width)
    for layer in model:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = getattr(tw, kind)(inner, every=4, group=mesh["replica"])
    for step in range(STEPS):
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.finish()
    weights = [p.full_tensor().detach().clone() for p in model.parameters()]  # type: ignore
    return weights, optimizer.outer_bytes


def unsharded(kind: str, width: int) -> tuple[list[Tensor], int]:
    """The same two replicas, each whole on one rank: its batch is that of the two shards."""
    tw.init()
    model = net(width)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = getattr(tw, kind)(inner, every=4)
    replica = dist.get_rank()
    for step in range(STEPS):
        halves = [loss_of(model, 2 * replica + shard, step) for shard in range(2)]
        (sum(halves) / 2).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    optimizer.finish()
    return [p.detach().clone() for p in model.parameters()], optimizer.outer_bytes


@pytest.mark.parametrize(
    ("kind", "width"), [("CO2", 4), ("Overlapped", 4), ("DiLoCo", 4), ("Overlapped", 5)]
)
def test_2_by_2_equals_the_unsharded_run_with_half_the_outer_state(
    ranks, kind: str, width: int
) -> None:
    split = ranks(4, sharded, kind, width)
    whole = ranks(2, unsharded, kind, width)
    for weights, _ in split:
        for got, wanted in zip(weights, whole[0][0], strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    if width == 4:
        assert [2 * size for _, size in split] == [whole[0][1]] * 4
    else:  # five rows on two ranks are three and two
        assert split[0][1] + split[1][1] == whole[0][1]
        assert split[0][1] > split[1][1]


def redundancy() -> tuple[list[Tensor], list[Tensor]]:
    """ZeroRedundancyOptimizer inside each replica against a plain AdamW."""
    tw.init()
    results = []
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    for zero in (True, False):
        model = net()
        if zero:
            inner: torch.optim.Optimizer = ZeroRedundancyOptimizer(
                model.parameters(),
                optimizer_class=torch.optim.AdamW,
                process_group=mesh["shard"].get_group(),
                lr=1e-2,
            )
        else:
            inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer = tw.Overlapped(inner, every=4, group=mesh["replica"])
        replica = dist.get_rank() // 2
        for step in range(STEPS):
            # Both ranks of a replica hold the same gradient, as after DDP inside the group.
            loss_of(model, replica, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.finish()
        results.append([p.detach().clone() for p in model.parameters()])
    return results[0], results[1]


def test_zero_redundancy_optimizer_as_inner(ranks) -> None:
    for zero, plain in ranks(4, redundancy):
        for got, wanted in zip(zero, plain, strict=True):
            torch.testing.assert_close(got, wanted)

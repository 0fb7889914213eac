"""From DistributedDataParallel to thinwire: one training loop, before and after.

    torchrun --nproc-per-node 2 examples/ddp_to_thinwire.py

`with_ddp` is a usual DDP loop. `with_thinwire` is the same loop; each changed line says what it
replaces. Both train on the same data from the same weights, and rank 0 prints the held-out loss and
the bytes that each rank sent.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw

STEPS = 240


def batches(seed: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.randn(32, 64, generator=generator)
        yield x, x[:, :8].sin().sum(1, keepdim=True)


def new_model() -> nn.Module:
    torch.manual_seed(0)  # the same weights on every rank
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))


def with_ddp() -> float:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(new_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in batches(rank, STEPS):
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return held_out(model)


def with_thinwire() -> tuple[float, tw.Account]:
    rank = tw.init().rank  # was: init_process_group; one that exists is used as it is
    model = new_model()  # was: DistributedDataParallel(new_model())
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = tw.Overlapped(inner, every=8)  # new: it sends, instead of DDP
    for x, y in batches(rank, STEPS):
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.finish()  # new: the replicas differ between rounds; from here on they are equal
    return held_out(model), optimizer.account


@torch.no_grad()
def held_out(model: nn.Module) -> float:
    losses = [(model(x) - y).square().mean() for x, y in batches(-1, 20)]
    return float(torch.stack(losses).mean())


def ddp_bytes(model: nn.Module, size: int) -> int:
    """What a ring all-reduce of every gradient sends from each rank, in float32."""
    values = sum(p.numel() for p in model.parameters())
    return STEPS * 4 * values * 2 * (size - 1) // size


def main() -> None:
    world = tw.init()
    before = with_ddp()
    after, account = with_thinwire()
    if world.rank == 0:
        print(f"DDP       held-out loss {before:.3f}, {ddp_bytes(new_model(), world.size):,} bytes")
        print(f"thinwire  held-out loss {after:.3f}, {account.bytes:,} bytes")
    tw.shutdown()


if __name__ == "__main__":
    main()

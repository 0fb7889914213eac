"""FSDP2 inside a node, thinwire between the nodes: a (replica, shard) mesh.

    torchrun --nproc-per-node 4 examples/fsdp2_inside_a_node.py

The ranks of a node share one replica: `fully_shard` divides weights, gradients and optimizer state
among them, over the node's fast links. thinwire works between the replicas, over the slow network:
each rank averages its own shard with its counterparts on the other nodes.

On real nodes take (nodes, GPUs of a node) as the mesh. torchrun numbers the ranks node by node, so
that the ranks of a replica are on one node.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import thinwire as tw

SHARDS = 2  # ranks of a node


def batches(seed: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.randn(32, 64, generator=generator)
        yield x, x[:, :8].sin().sum(1, keepdim=True)


def main() -> dict[str, float]:
    world = tw.init()
    shape = (world.size // SHARDS, SHARDS)
    mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=("replica", "shard"))

    torch.manual_seed(0)  # the same weights on every replica
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)).to(world.device)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["shard"])

    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)  # after fully_shard: it holds the shards
    optimizer = tw.Overlapped(inner, every=8, group=mesh["replica"])
    for x, y in batches(seed=world.rank, count=160):  # every rank reads its own data, as with FSDP
        loss = (model(x.to(world.device)) - y.to(world.device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.finish()

    with torch.no_grad():
        losses = [
            (model(x.to(world.device)) - y.to(world.device)).square().mean()
            for x, y in batches(seed=-1, count=20)
        ]
    result = {
        "loss": float(torch.stack(losses).mean()),
        "outer_bytes": float(optimizer.outer_bytes),  # of this rank: its shard's share
        "parameters": float(sum(p.numel() for p in model.parameters())),  # of the whole model
    }
    if world.rank == 0:
        print(f"{shape[0]} replicas of {SHARDS} shards, held-out loss {result['loss']:.3f}")
        print(f"outer state of a rank: {optimizer.outer_bytes:,} bytes")
        print(optimizer.account)
    tw.shutdown()
    return result


if __name__ == "__main__":
    main()

"""One replica spread over several ranks (FSDP2): ZeRO inside a group, the method between groups.

The ranks form a mesh (replica, shard): rank = replica * shards + shard. FSDP2 shards every weight's
first dimension over the shard axis and averages gradients there; the method works on the replica
axis, each rank with its own shard. A checkpoint keeps the local shards, rank by rank.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from thinwire.errors import UsageError
from thinwire.optim.flat import shard_of
from thinwire.train.models import Stack
from thinwire.wire.world import World


def make_mesh(world: World, shards: int) -> DeviceMesh:
    """The (replica, shard) mesh of all ranks."""
    if world.size % shards:
        raise UsageError(
            f"--shards {shards}: {world.size} workers do not divide into groups of {shards}"
        )
    return init_device_mesh(
        world.device.type, (world.size // shards, shards), mesh_dim_names=("replica", "shard")
    )


def shard_model(model: Stack, mesh: DeviceMesh) -> None:
    """In place. Blocks are gathered one at a time; embedding and head share a weight, so they are
    gathered with the root."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])


def local_state(tree: Any) -> Any:
    """A state dict with every DTensor replaced by this rank's shard."""
    if isinstance(tree, Tensor):
        return shard_of(tree)
    if isinstance(tree, dict):
        return {key: local_state(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(local_state(value) for value in tree)
    return tree


@torch.no_grad()
def load_model_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    """The inverse of local_state for a model's state_dict."""
    for name, tensor in model.state_dict().items():
        shard_of(tensor).copy_(state[name])


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """The inverse of local_state for an optimizer's state_dict."""
    parameters = [p for g in optimizer.param_groups for p in g["params"]]
    for index, entries in state["state"].items():
        parameter = parameters[int(index)]
        for name, value in entries.items():
            if isinstance(value, Tensor) and value.shape == shard_of(parameter).shape:
                entries[name] = _like(parameter, value)
    optimizer.load_state_dict(state)


def _like(parameter: Tensor, local: Tensor) -> Tensor:
    """A shard placed as the parameter is."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local.to(shard_of(parameter).device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )

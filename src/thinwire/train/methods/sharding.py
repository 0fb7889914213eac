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
from thinwire.flat import shard_of
from thinwire.train.tasks.models import Stack
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
    own = model.state_dict()
    for name in [*own, *state]:
        if name not in own or name not in state:
            raise UsageError(f"the model's {name} is {'here' if name in own else 'there'} only")
    for name, tensor in own.items():
        local, saved = shard_of(tensor), state[name]
        _require_like(f"the model's {name}", saved, local)
        local.copy_(saved)  # which would spread a smaller one, and round one of another type


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """The inverse of local_state for an optimizer's state_dict."""
    parameters = [p for g in optimizer.param_groups for p in g["params"]]
    _require_all(state["state"], len(parameters))
    for index, entries in state["state"].items():
        parameter = parameters[int(index)]
        for name, value in entries.items():
            _require_state_of(f"{name} of parameter {index}", value, shard_of(parameter))
            if isinstance(value, Tensor) and value.shape == shard_of(parameter).shape:
                entries[name] = _like(parameter, value)
    optimizer.load_state_dict(state)


def _require_all(state: dict[Any, Any], count: int) -> None:
    """Of the parameters all have been stepped, or none: one without moments would start anew."""
    keys = {frozenset(entries) for entries in state.values()}
    if len(keys) > 1 or (state and len(state) != count):
        raise UsageError(
            f"the optimizer's state is of {len(state)} parameters of {count}, and not the same for "
            "all: it is of another run, or was changed"
        )


def _require_like(what: str, saved: Any, local: Tensor) -> None:
    if not isinstance(saved, Tensor):
        raise UsageError(f"{what} is no tensor in the checkpoint")
    if saved.shape != local.shape or saved.dtype != local.dtype:
        raise UsageError(
            f"{what} is {_form(saved)} in the checkpoint, and {_form(local)} here: it is of "
            "another run, or was changed"
        )


def _require_state_of(what: str, value: Any, local: Tensor) -> None:
    """A number, a tensor like the parameter, or one over some of its dimensions (Adafactor's)."""
    if value is None or isinstance(value, bool | int | float):
        return
    if not isinstance(value, Tensor):
        raise UsageError(f"{what} is a {type(value).__name__}, which no optimizer keeps")
    over = value.dim() == local.dim() and all(
        mine in (1, theirs) for mine, theirs in zip(value.shape, local.shape, strict=True)
    )
    precise = not value.is_floating_point() or value.dtype in (torch.float32, local.dtype)
    if (value.numel() != 1 and not over) or not precise:
        raise UsageError(
            f"{what} is {_form(value)} in the checkpoint, and the parameter {_form(local)} here: "
            "it is of another run, or was changed"
        )


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"


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

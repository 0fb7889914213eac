"""The ranks of a group, in whatever form a user names it."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from thinwire.wire import world

Group = dist.ProcessGroup | DeviceMesh | None
"""A ProcessGroup, one dimension of a DeviceMesh, or None for all ranks."""


def ranks_of(group: Group, world_size: int) -> list[int]:
    if group is None:
        return list(range(world_size))
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group takes one dimension of a DeviceMesh, got a mesh of {group.ndim}; "
                f"name one, as in mesh[{(group.mesh_dim_names or ('replica',))[0]!r}]"
            )
        group = group.get_group()
    return sorted(dist.get_process_group_ranks(group))


def group_size(group: Group) -> int:
    """Ranks in a group as `Wire` takes it, known before a wire is made."""
    return len(ranks_of(group, world.current().size))

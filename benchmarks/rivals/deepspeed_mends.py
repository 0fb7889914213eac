"""What DeepSpeed 0.19.6's one-bit optimizers lack on a CPU with gloo, mended from outside.

DeepSpeed has no packing of bits for a CPU, and hands gloo scalars where it wants vectors. Its
`PackbitsBuilder` is replaced by numpy's packbits, and a scalar given to all_gather becomes a vector
of one. The rest is its own: its engine, its "compressed" backend.
"""

import os
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


class Packer:
    """What DeepSpeed's own op does on the devices that have it."""

    def packbits(self, values: torch.Tensor, count: int, rank: int) -> torch.Tensor:
        return torch.from_numpy(np.packbits(values.numpy() >= 0))

    def unpackbits(self, packed: torch.Tensor, count: int, rank: int) -> torch.Tensor:
        bits = np.unpackbits(packed.numpy())
        return torch.from_numpy(bits).float().mul_(2).sub_(1)


class PackerBuilder:
    def load(self) -> Packer:
        return Packer()


def mended_deepspeed() -> Any:
    """The module, ready to run here."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.ops import op_builder

    op_builder.PackbitsBuilder = PackerBuilder
    _gather_scalars()
    return deepspeed


def _gather_scalars() -> None:
    """Lets all_gather take a tensor without dimensions, which gloo refuses."""
    original = dist.all_gather
    if getattr(original, "takes_scalars", False):
        return

    def all_gather(tensor_list: list[torch.Tensor], tensor: torch.Tensor, **rest: Any) -> Any:
        return original(tensor_list, tensor.view(-1) if tensor.dim() == 0 else tensor, **rest)

    all_gather.takes_scalars = True  # type: ignore[attr-defined]
    dist.all_gather = all_gather  # type: ignore[assignment]

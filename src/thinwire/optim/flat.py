"""Flat: many tensors as one buffer, the shape in which everything travels.

The buffer is float32, and float64 if any of the tensors is: nothing is rounded by being packed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local_part(tensor: Tensor) -> Tensor:
    """The rank's own shard of a DTensor (an FSDP2 parameter, say); other tensors as they are.

    It shares the tensor's memory: what is written to it is written to the tensor.
    """
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Flat:
    """The layout of a list of tensors in one flat buffer, and copies in both directions.

    Of a DTensor only this rank's shard takes part.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        tensors = [local_part(t) for t in tensors]
        self.shapes = [t.shape for t in tensors]
        self.sizes = [t.numel() for t in tensors]
        self.numel = sum(self.sizes)
        double = any(t.dtype == torch.float64 for t in tensors)
        self.dtype = torch.float64 if double else torch.float32
        self.device = tensors[0].device if tensors else torch.device("cpu")

    def new(self) -> Tensor:
        return torch.empty(self.numel, dtype=self.dtype, device=self.device)

    def pack(self, tensors: Sequence[Tensor | None], out: Tensor) -> Tensor:
        """Copies the tensors into `out`; None counts as zeros."""
        for view, tensor in zip(out.split(self.sizes), tensors, strict=True):
            if tensor is None:
                view.zero_()
            else:
                view.copy_(local_part(tensor).reshape(-1))
        return out

    def unpack(self, flat: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copies the buffer back into the tensors, in their own dtype."""
        for view, tensor in zip(self.views(flat), tensors, strict=True):
            local_part(tensor).copy_(view)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The buffer seen as the tensors."""
        pairs = zip(flat.split(self.sizes), self.shapes, strict=True)
        return [view.view(shape) for view, shape in pairs]

"""Flat: many tensors as one float32 buffer, the shape in which everything travels."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Flat:
    """The layout of a list of tensors in one flat buffer, and copies in both directions."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.shapes = [t.shape for t in tensors]
        self.sizes = [t.numel() for t in tensors]
        self.numel = sum(self.sizes)
        self.device = tensors[0].device if tensors else torch.device("cpu")

    def new(self) -> Tensor:
        return torch.empty(self.numel, dtype=torch.float32, device=self.device)

    def pack(self, tensors: Sequence[Tensor | None], out: Tensor) -> Tensor:
        """Copies the tensors into `out`, as float32; None counts as zeros."""
        for view, tensor in zip(out.split(self.sizes), tensors, strict=True):
            if tensor is None:
                view.zero_()
            else:
                view.copy_(tensor.detach().reshape(-1))
        return out

    def unpack(self, flat: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copies the buffer back into the tensors, in their own dtype."""
        for view, tensor in zip(self.views(flat), tensors, strict=True):
            tensor.detach().copy_(view)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The buffer seen as the tensors."""
        pairs = zip(flat.split(self.sizes), self.shapes, strict=True)
        return [view.view(shape) for view, shape in pairs]

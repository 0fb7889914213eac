"""Flat: many tensors as one buffer, the shape in which everything travels.

The buffer is float32, and float64 if any of the tensors is: nothing is rounded by being packed. A
complex value is two real ones in it, its real and its imaginary part.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from thinwire.errors import UsageError

_DOUBLE = (torch.float64, torch.complex128)


def shard_of(tensor: Tensor) -> Tensor:
    """The rank's own shard of a DTensor (an FSDP2 parameter, say); other tensors as they are."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: Tensor) -> Tensor:
    """The rank's own shard, with a last dimension of two where it is complex.

    It shares the tensor's memory: what is written to it is written to the tensor. Autograd may
    leave a complex gradient conjugated only by a flag; of that one it is a copy, and `step()`
    settles the flag before anything is written (base.py).
    """
    tensor = shard_of(tensor)
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def is_double(tensor: Tensor) -> bool:
    """Whether it needs 64 bits a value."""
    return tensor.dtype in _DOUBLE


class Flat:
    """The layout of a list of tensors in one flat buffer, and copies in both directions.

    Of a DTensor only this rank's shard takes part.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        tensors = [local_part(t) for t in tensors]
        self.shapes = [t.shape for t in tensors]
        self.sizes = [t.numel() for t in tensors]
        self.numel = sum(self.sizes)
        self.dtype = torch.float64 if any(map(is_double, tensors)) else torch.float32
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


class Unchanged:
    """Parameters that must stay what they were when their buffers were made.

    `p.data = ...`, an EMA swap or `model.to()` with the same type give a parameter other memory:
    that is why its local part is taken anew at each use. Another dtype, device or shape fits no
    buffer any more, and is refused here before anything is averaged.
    """

    def __init__(self, name: str, parameters: Sequence[Tensor]) -> None:
        self._name, self._parameters = name, parameters
        self._kinds = [_kind(p) for p in parameters]

    def require(self) -> None:
        for index, (parameter, kind) in enumerate(zip(self._parameters, self._kinds, strict=True)):
            if _kind(parameter) != kind:
                raise UsageError(
                    f"{self._name}: parameter {index} was {_named(kind)} when the optimizer was "
                    f"built and is {_named(_kind(parameter))} now; convert or move the model "
                    "first, then build the optimizer"
                )


_Kind = tuple[torch.dtype, torch.device, torch.Size]


def _kind(tensor: Tensor) -> _Kind:
    return tensor.dtype, tensor.device, tensor.shape


def _named(kind: _Kind) -> str:
    dtype, device, shape = kind
    return f"{str(dtype).removeprefix('torch.')} of shape {tuple(shape)} on {device}"

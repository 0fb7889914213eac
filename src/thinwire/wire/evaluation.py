"""EvaluationWire: what is no part of a method's cost, such as the mean that is evaluated.

Emulated hosts share one machine. Where methods are compared there, `share_memory(folder)` lets a
mean go through files in that folder (memory, if it is one of tmpfs) and not over the slow links.
Then evaluating a model costs the same at 10 Mbit/s as at 1 Gbit/s, and the links stay free.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from thinwire.wire.compressed_mean import Owner
from thinwire.wire.flight import Flight
from thinwire.wire.wire import AnyCodec, Wire

_folder: Path | None = None


def share_memory(folder: Path | None) -> None:
    """Where the evaluation wires of this process leave their values; None: on the network."""
    global _folder
    _folder = folder


class EvaluationWire(Wire):
    """A wire whose plain means go through shared memory where `share_memory` has named some."""

    _means = 0

    def mean(
        self,
        flat: Tensor,
        codec: AnyCodec | None = None,
        *,
        owner: Owner | None = None,
        prepare: Callable[[], None] | None = None,
    ) -> Flight:
        plain = codec is None and owner is None and prepare is None
        if _folder is None or not plain or self.group is None:
            return super().mean(flat, codec, owner=owner, prepare=prepare)
        self._means += 1
        name = f"{self.group.group_name[:16]}-{self._means}"
        files = [_folder / f"{name}-{rank}" for rank in range(self.size)]
        flat.detach().cpu().contiguous().view(torch.uint8).numpy().tofile(files[self.rank])
        self.barrier()
        total = torch.zeros_like(flat)
        for file in files:  # in rank order: the same bits everywhere
            values = torch.from_file(str(file), size=flat.numel(), dtype=flat.dtype)
            total.add_(values.to(flat.device))
        flat.copy_(total.div_(self.size))
        self.barrier()
        files[self.rank].unlink()
        return Flight(flat, self.account)

"""TopK: the largest few values of every chunk, in two bits each. SparseLoCo's payload, 2508.15706.

Of each chunk of 4096 values the 64 of largest magnitude are sent (1.6 %), as sparse.py lays them
out: 80 bytes for their places, 16 for the values, 4 for the range, 0.2 bits a value in all. Use it
with `ErrorFeedback(TopK(), decay=0.95)`: what is not sent this round is sent in a later one, and
what waits for long fades.

Unlike `Threshold` it keeps no state and searches every time: it is meant for payloads that are sent
once in many steps.

[Note: which mean] As published every payload goes to everybody, who adds them up: what one rank
sends reaches the mean whole, and a round moves up to n times as many values as a rank may send. A
rank then sends n - 1 payloads. In two phases it sends 2 (n-1)/n of one, but the mean is cut down to
its own 64 largest values a chunk again, and the rest waits in the owner's memory. With n = 4, 8, 32
ranks that is 0.6, 1.4, 6.1 bits a value against 0.29, 0.34, 0.38; float32 takes 48 to 62.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from thinwire.checks import require_bool, require_count, require_multiple
from thinwire.wire.codecs.base import Codec, as_rows
from thinwire.wire.codecs.sparse import Segment, SparseRow, require_bits


@dataclass(frozen=True)
class TopK(Codec):
    chunk: int = 4096
    """Values among which the largest are searched. Smaller chunks spread what is sent more evenly
    over the tensors; each costs 4 bytes."""
    k: int = 64
    """Values sent of a chunk. Raise it when the loss falls behind that of a dense payload."""
    value_bits: int = 2
    """Of a value: 1, 2, 4, 8, 16 or 32."""
    gather: bool = True
    """Send every payload to every rank, as published; see [Note: which mean]. Turn it off where
    n - 1 payloads a round are exposed, beyond some 16 ranks, and expect a higher loss."""

    def __post_init__(self) -> None:
        chunk = require_multiple("TopK", "chunk", self.chunk, 256)
        k = require_count("TopK", "k", self.k, most=chunk)
        bits = require_bits("TopK", self.value_bits)
        require_bool("TopK", "gather", self.gather)
        for key, value in (("chunk", chunk), ("k", k), ("value_bits", bits)):
            object.__setattr__(self, key, value)

    def gathers(self, size: int) -> bool:
        """Two ranks send no more by exchanging payloads than in two phases."""
        return self.gather or size <= 2

    def alignment(self, numel: int, rows: int) -> int:
        # Whole chunks, except for buffers so small that a row is less than one.
        return self.chunk if numel >= rows * self.chunk else 8

    def payload_bytes(self, part: int) -> int:
        return _form(self, part).nbytes

    def encode(self, x: Tensor, rows: int, part: int) -> Tensor:
        form = _form(self, part)
        payload = torch.zeros(rows, form.nbytes, dtype=torch.uint8, device=x.device)
        for row, values in enumerate(as_rows(x, rows, part) if part else []):
            form.pack(values, form.admit(self._largest(values, form)), payload[row])
        return payload

    def decode(self, payload: Tensor, part: int, out: Tensor) -> Tensor:
        rows, form = payload.shape[0], _form(self, part)
        exact = out.numel() == rows * part
        target = out if exact else out.new_empty(rows * part)
        for row, values in enumerate(target.view(rows, part) if part else []):
            form.unpack(payload[row], values)
        return out if exact else out.copy_(target[: out.numel()])

    def _largest(self, values: Tensor, form: SparseRow) -> Tensor:
        """Ascending places; all chunks have the length and the number of the first."""
        first = form.segments[0]
        size = values.abs().view(len(form.segments), first.stop)
        # A NaN counts as larger than anything, and so reaches everybody.
        if size.device.type == "cpu":
            at = first.stop - first.keep
            inside = torch.from_numpy(np.argpartition(size.numpy(), at, axis=1)[:, at:])
        else:
            inside = size.topk(first.keep, dim=1, sorted=False).indices
        starts = torch.arange(0, values.numel(), first.stop, device=values.device)
        return (inside + starts.unsqueeze(1)).view(-1).sort().values


@lru_cache(maxsize=64)
def _form(codec: TopK, part: int) -> SparseRow:
    width = min(codec.chunk, max(part, 1))
    keep = max(1, round(codec.k * width / codec.chunk))
    segments = [Segment(start, start + width, keep) for start in range(0, part, width)]
    return SparseRow(part, segments, [], codec.value_bits)

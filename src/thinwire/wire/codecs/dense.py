"""Dense: every value, in float32, float64, bfloat16 or float16.

float32 and float64 are summed by the network's own all-reduce. The 16-bit types go through the
two-phase mean instead: an all-reduce in bfloat16 would round at every hop, here a value is rounded
once when it is sent and the mean, taken in float32, once when it is returned.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.checks import refusal
from thinwire.wire.codecs.base import Codec, as_rows

_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Dense(Codec):
    dtype: torch.dtype = torch.float32
    """float16 overflows above 65504: prefer bfloat16 unless the values are known to be small."""

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, torch.dtype) or self.dtype not in _TYPES:
            names = ", ".join(map(str, _TYPES))
            raise refusal("Dense", "dtype", f"one of {names}", self.dtype)

    @property
    def summable(self) -> bool:
        """Whether the network may add payloads on the way."""
        return self.dtype in (torch.float32, torch.float64)

    def payload_bytes(self, part: int) -> int:
        return part * self.dtype.itemsize

    def encode(self, x: Tensor, rows: int, part: int) -> Tensor:
        return as_rows(x, rows, part).to(self.dtype).view(torch.uint8)

    def decode(self, payload: Tensor, part: int, out: Tensor) -> Tensor:
        return out.copy_(payload.view(self.dtype).view(-1)[: out.numel()])

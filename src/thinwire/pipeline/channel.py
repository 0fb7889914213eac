"""Channel: tensors of one form between two neighbouring stages, in one direction.

[Note: one wire per direction] Activations and gradients have a wire each. Messages of a wire are
issued in order, and nccl runs those of a pair of ranks in order too: a receive that is posted ahead
would hold up a send behind it that the peer is waiting for. With a wire per direction a pair's
messages all go the same way, and no such wait exists.

[Note: bounded] Receives are posted before they are needed, so that a message travels without first
asking whether it may, and never more than `ahead` of them. A send is never waited for while less
than `limit` are in the air; what waits then is this stage, and through it those before it.
"""

import math
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.wire.codecs import Codec, Dense
from thinwire.wire.flight import Flight
from thinwire.wire.wire import Wire

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_DIMENSIONS = 8
_MOST_BYTES = 2 << 30  # of a tensor that a neighbour announces, and room is made for


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor between two stages."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> "TensorSpec":
        return TensorSpec(tuple(tensor.shape), tensor.dtype)

    def refusal(self) -> str | None:
        """Why a stage cannot send such a tensor; None if it can."""
        if self.dtype not in _DTYPES:
            return f"of {self.dtype}, but gradients need a floating-point tensor between stages"
        if len(self.shape) > _DIMENSIONS or not all(self.shape):
            return f"of shape {self.shape}, but between stages go 1 to {_DIMENSIONS} dimensions > 0"
        size = math.prod(self.shape) * self.dtype.itemsize
        if size > _MOST_BYTES:
            return (
                f"of {size} bytes (shape {self.shape}), but between stages go at most "
                f"{_MOST_BYTES}: make the micro-batches smaller"
            )
        return None

    def header(self) -> Tensor:
        """The form as a message of fixed length."""
        padding = [0] * (_DIMENSIONS - len(self.shape))
        numbers = [_DTYPES.index(self.dtype), len(self.shape), *self.shape, *padding]
        return torch.tensor(numbers, dtype=torch.float64)

    @staticmethod
    def blank() -> Tensor:
        """The message of a stage that has no form to tell, and a buffer to receive one."""
        return torch.full((2 + _DIMENSIONS,), -1.0, dtype=torch.float64)

    @staticmethod
    def read(header: Tensor) -> "TensorSpec | None":
        """ValueError for what no stage can have meant."""
        numbers = header.tolist()
        if not all(math.isfinite(value) and value.is_integer() for value in numbers):
            raise ValueError(f"a form of the numbers {numbers}")
        kind, count, *shape = map(int, numbers)
        if kind == -1:
            return None
        if not (0 <= kind < len(_DTYPES) and 0 <= count <= _DIMENSIONS and min(shape) >= 0):
            raise ValueError(f"a form of the numbers {numbers}")
        form = TensorSpec(tuple(shape[:count]), _DTYPES[kind])
        if refusal := form.refusal():
            raise ValueError(f"a tensor {refusal}")
        return form

    def __str__(self) -> str:
        return f"{tuple(self.shape)} {str(self.dtype).removeprefix('torch.')}"


class Channel:
    """Sends to and receives from one neighbour, over one wire, in one form and codec."""

    def __init__(
        self,
        wire: Wire,
        peer: int,
        form: TensorSpec,
        device: torch.device,
        *,
        codec: Codec | None = None,
    ) -> None:
        self._wire, self._peer, self._form, self._device = wire, peer, form, device
        self._codec = codec or Dense(form.dtype)
        double = self._codec == Dense(torch.float64)
        self._carried = torch.float64 if double else torch.float32  # what a wire takes

    def send(self, tensor: Tensor) -> Flight:
        flat = tensor.detach().to(self._carried).contiguous().view(-1)
        return self._wire.send(flat, self._peer, codec=self._codec)

    def receive(self) -> Flight:
        count = torch.Size(self._form.shape).numel()
        buffer = torch.empty(count, dtype=self._carried, device=self._device)
        return self._wire.recv(buffer, self._peer, codec=self._codec)

    def land(self, flight: Flight) -> Tensor:
        return flight.wait().to(self._form.dtype).view(self._form.shape)


class SendQueue:
    """Sends on a channel, at most `limit` in the air."""

    def __init__(self, channel: Channel, limit: int) -> None:
        self._channel, self._limit = channel, limit
        self._flights: deque[Flight] = deque()

    def send(self, tensor: Tensor) -> None:
        while self._flights and (self._flights[0].arrived or len(self._flights) >= self._limit):
            self._flights.popleft().wait()
        self._flights.append(self._channel.send(tensor))

    def drain(self) -> None:
        while self._flights:
            self._flights.popleft().wait()


class ReceiveQueue:
    """Receives on a channel, in the order in which they were posted."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._flights: deque[Flight] = deque()
        self.posted = 0

    def post(self) -> None:
        self._flights.append(self._channel.receive())
        self.posted += 1

    def take(self) -> Tensor:
        return self._channel.land(self._flights.popleft())

"""Hooks for those who keep their DistributedDataParallel and their optimizer.

`one_bit(ddp)` replaces DDP's all-reduce by the compressed mean of the gradients, one bit a value
with error feedback on both sides: 1-bit SGD. DDP keeps its buckets and its overlap with the
backward pass; every bucket has its own scale and errors.

[Note: rebuilt buckets] DDP arranges its buckets anew after the first backward pass, so errors
belong to the set of parameters in a bucket, not to its number. Adam's variance must see gradients
that are not yet signs: the first `dense_steps` steps are DDP's own.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from thinwire.optim.checks import require_count, require_kind
from thinwire.wire.account import Account
from thinwire.wire.codecs import Codec, Dense, ErrorFeedback, OneBit
from thinwire.wire.flight import Flight
from thinwire.wire.wire import Wire

_FutureTensor = torch.futures.Future[Tensor]
_MODULE = "a torch DistributedDataParallel (without DDP use OneBitAdam or GradientAverage)"


class GradientHook:
    """What `one_bit` returns: the account of the traffic, and the errors it keeps."""

    def __init__(self, module: DistributedDataParallel, codec: Codec, dense_steps: int) -> None:
        require_kind("GradientHook", "module", module, DistributedDataParallel, _MODULE)
        require_kind("GradientHook", "codec", codec, Codec, "a codec such as OneBit()")
        dense_steps = require_count("GradientHook", "dense_steps", dense_steps)
        self.wire = Wire(module.process_group, name="gradients")
        self._codec, self._dense_steps = codec, dense_steps
        self._errors: dict[tuple[int, ...], ErrorFeedback] = {}
        self.steps = 0
        """Backward passes seen."""
        self._numbers = {id(p): number for number, p in enumerate(module.parameters())}
        module.register_comm_hook(self, _launch)

    @property
    def account(self) -> Account:
        """Bytes sent so far. DDP waits for the flights itself, so all of their time counts as
        hidden here: measure the step to see what is not."""
        return self.wire.account

    def launch(self, bucket: dist.GradBucket) -> _FutureTensor:
        buffer = bucket.buffer()
        codec: Codec | ErrorFeedback = Dense()
        if self.steps >= self._dense_steps:
            members = tuple(self._numbers[id(p)] for p in bucket.parameters())
            codec = self._errors.setdefault(members, ErrorFeedback(self._codec))
        if bucket.is_last():
            self.steps += 1
            self.account.tick()
        flight = self.wire.mean(buffer.float().contiguous(), codec)
        return _as_future(flight, buffer)


def one_bit(module: DistributedDataParallel, *, dense_steps: int = 100) -> GradientHook:
    """Sends the gradients of a DDP module in one bit a value.

    Args:
        module: your DistributedDataParallel; it takes one hook in its life.
        dense_steps: backward passes before that. Raise it when the loss falls behind at the switch:
            an Adam wants about 15 % of the run, SGD a few steps.
    """
    require_kind("hooks.one_bit", "module", module, DistributedDataParallel, _MODULE)
    require_count("hooks.one_bit", "dense_steps", dense_steps, least=1)
    return GradientHook(module, OneBit(), dense_steps)


def _launch(hook: GradientHook, bucket: dist.GradBucket) -> _FutureTensor:
    return hook.launch(bucket)


def _as_future(flight: Flight, buffer: Tensor) -> _FutureTensor:
    """DDP's kind of promise: fulfilled by the thread that lands the flight."""
    devices: list[Any] = [buffer.device] if buffer.is_cuda else []
    future: _FutureTensor = torch.futures.Future(devices=devices)

    def arrived(error: BaseException | None) -> None:
        if error is not None:
            future.set_exception(error)  # type: ignore[arg-type]
            return
        result = flight.wait()
        future.set_result(
            buffer.copy_(result) if result.data_ptr() != buffer.data_ptr() else buffer
        )

    flight.when_arrived(arrived)
    return future

"""Hooks for those who keep their DistributedDataParallel and their optimizer.

`one_bit(ddp)` replaces DDP's all-reduce by the compressed mean of the gradients, one bit a value
with error feedback on both sides: 1-bit SGD. DDP keeps its buckets and its overlap with the
backward pass; every bucket has its own scale and errors.

[Note: rebuilt buckets] DDP arranges its buckets anew after the first backward pass, so errors
belong to the set of parameters in a bucket, not to its number. Adam's variance must see gradients
that are not yet signs: the first `dense_steps` steps are DDP's own.

[Note: loss scale] DDP's gradients still have GradScaler's scale in them. Errors that are kept from
one step to the next must not: the scale may have changed in between. Give the scaler to `one_bit`,
and gradients are unscaled before they are encoded and scaled again when they have come.
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

    def __init__(
        self,
        module: DistributedDataParallel,
        codec: Codec,
        dense_steps: int,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        require_kind("GradientHook", "module", module, DistributedDataParallel, _MODULE)
        require_kind("GradientHook", "codec", codec, Codec, "a codec such as OneBit()")
        dense_steps = require_count("GradientHook", "dense_steps", dense_steps)
        _require_scaler("GradientHook", scaler)
        self.wire = Wire(module.process_group, name="gradients")
        self._codec, self._dense_steps, self._scaler = codec, dense_steps, scaler
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
        scale = 1.0 if self._scaler is None else float(self._scaler.get_scale())
        payload = buffer.float().contiguous()
        if scale != 1.0:
            payload = payload / scale
        return _as_future(self.wire.mean(payload, codec), buffer, scale)


def one_bit(
    module: DistributedDataParallel,
    *,
    dense_steps: int = 100,
    scaler: torch.amp.GradScaler | None = None,
) -> GradientHook:
    """Sends the gradients of a DDP module in one bit a value.

    Args:
        module: your DistributedDataParallel; it takes one hook in its life.
        dense_steps: backward passes before that. Raise it when the loss falls behind at the switch:
            an Adam wants about 15 % of the run, SGD a few steps.
        scaler: the GradScaler of the loop, if it has one: see [Note: loss scale]. Without it the
            errors are in units of the scale of the step that made them.
    """
    require_kind("hooks.one_bit", "module", module, DistributedDataParallel, _MODULE)
    require_count("hooks.one_bit", "dense_steps", dense_steps, least=1)
    _require_scaler("hooks.one_bit", scaler)
    return GradientHook(module, OneBit(), dense_steps, scaler)


def _require_scaler(name: str, scaler: Any) -> None:
    if scaler is not None:
        wants = "the loop's torch.amp.GradScaler, or None"
        require_kind(name, "scaler", scaler, torch.amp.GradScaler, wants)


def _launch(hook: GradientHook, bucket: dist.GradBucket) -> _FutureTensor:
    return hook.launch(bucket)


def _as_future(flight: Flight, buffer: Tensor, scale: float) -> _FutureTensor:
    """DDP's kind of promise: fulfilled by the thread that lands the flight, at this loss scale."""
    devices: list[Any] = [buffer.device] if buffer.is_cuda else []
    future: _FutureTensor = torch.futures.Future(devices=devices)

    def arrived(error: BaseException | None) -> None:
        if error is not None:
            future.set_exception(error)  # type: ignore[arg-type]
            return
        result = flight.wait()
        if scale != 1.0:
            result.mul_(scale)
        future.set_result(
            buffer.copy_(result) if result.data_ptr() != buffer.data_ptr() else buffer
        )

    flight.when_arrived(arrived)
    return future

"""PyTorch's own DistributedDataParallel, on the books.

DDP keeps its buckets, its overlap with the backward pass and its all-reduce; these hooks only count
what it sends and how long the step waits for it. The wait of a backward pass begins when its last
bucket is handed over - all gradients exist then - and ends when the last all-reduce has arrived.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from thinwire.wire import collectives
from thinwire.wire.wire import Wire

_FutureTensor = torch.futures.Future[Tensor]


Hook = Callable[[Any, dist.GradBucket], _FutureTensor]


class _Meter:
    """Notes the time of one DDP module's backward passes in the account of a wire."""

    def __init__(self, wire: Wire) -> None:
        if wire.group is None:
            raise ValueError("a DDP module needs a group of at least two ranks to be metered")
        self._wire = wire
        self._lock = threading.Lock()
        self._first = self._last = 0.0  # clock at the first and the newest bucket of this pass
        self._open = 0  # buckets in the air
        self._all_launched = False

    def launch(self, bucket: dist.GradBucket) -> _FutureTensor:
        raise NotImplementedError

    def _note_launch(self, last: bool) -> None:
        now = time.perf_counter()
        with self._lock:
            if self._open == 0 and not self._all_launched:
                self._first = now
            self._open += 1
            self._last, self._all_launched = now, last

    def _note_arrival(self, buffer: Tensor) -> Tensor:
        now = time.perf_counter()
        with self._lock:
            self._open -= 1
            if self._open == 0 and self._all_launched:
                self._all_launched = False
                self._wire.account.landed(
                    flown=now - self._first,
                    waited=max(0.0, now - self._last),
                    lag=0,
                    launched=self._first,
                )
        return buffer


class DdpMeter(_Meter):
    """Counts one DDP module's traffic in the account of the wire whose group it uses."""

    def __init__(self, module: DistributedDataParallel, wire: Wire) -> None:
        super().__init__(wire)
        module.register_comm_hook(self, _launch)

    def launch(self, bucket: dist.GradBucket) -> _FutureTensor:
        assert self._wire.group is not None
        buffer = bucket.buffer().div_(self._wire.size)
        self._note_launch(bucket.is_last())
        parts, sent = collectives.all_reduce(buffer, self._wire.group, dist.ReduceOp.SUM)
        self._wire.account.launched(sent)
        if buffer.is_cuda:  # the future carries the stream's event; nothing may block here
            (part,) = parts
            assert isinstance(part, collectives.DevicePart)
            done: _FutureTensor = part.work.get_future().then(
                lambda f: self._note_arrival(f.value()[0])
            )
            return done
        return self._wire.watch(parts, buffer, self._note_arrival)


class HookMeter(_Meter):
    """Counts what one of PyTorch's own communication hooks sends on the group of a wire.

    Args:
        hook, state: as for `register_comm_hook`.
        sent: bytes of the buffers that the hook has just begun to reduce for a bucket.
    """

    def __init__(
        self,
        module: DistributedDataParallel,
        wire: Wire,
        hook: Hook,
        state: Any,
        sent: Callable[[dist.GradBucket], int],
    ) -> None:
        super().__init__(wire)
        self._hook, self._state, self._sent = hook, state, sent
        module.register_comm_hook(self, _launch)

    def launch(self, bucket: dist.GradBucket) -> _FutureTensor:
        self._note_launch(bucket.is_last())
        done = self._hook(self._state, bucket)
        nbytes = self._sent(bucket)
        if nbytes:
            self._wire.account.launched(collectives.all_reduce_bytes(nbytes, self._wire.size))
        return done.then(lambda future: self._note_arrival(future.value()))


def _launch(meter: _Meter, bucket: dist.GradBucket) -> _FutureTensor:
    return meter.launch(bucket)

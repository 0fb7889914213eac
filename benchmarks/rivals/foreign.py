"""ForeignReplica: a replica under somebody else's method, of which we see only the outside.

Its bytes are the kernel's count on the host's interface. Of its waits the base takes what a step of
the optimizer lasts beyond its usual time, when the method says that it has synchronised.
"""

import math
import os
import socket
import statistics
import time
from collections import deque
from typing import Any

from torch import nn

from thinwire.train.methods.replica import SeparateReplica


class ForeignReplica(SeparateReplica):
    counted = False
    resumable = False  # what the method keeps to itself is not ours to save

    def __init__(self, module: nn.Module, optimizer: Any) -> None:
        super().__init__(module, optimizer, None)
        self._usual: deque[float] = deque(maxlen=50)  # seconds of steps without communication

    def step(self, clip: float) -> float:
        norm = self._clip(clip)
        if not math.isfinite(norm):
            # The others count on this replica: it takes part, with no gradient.
            self.account.skipped += 1
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()
        began = time.perf_counter()
        synchronised = self.optimize()
        taken = time.perf_counter() - began
        if synchronised:
            usual = statistics.median(self._usual) if self._usual else 0.0
            waited = max(0.0, taken - usual)
            launched = time.perf_counter() - waited
            self.account.landed(flown=waited, waited=waited, lag=0, launched=launched)
        else:
            self._usual.append(taken)
        self.account.tick()
        return norm

    def optimize(self) -> bool:
        """One step of the method; whether it talked to the others."""
        raise NotImplementedError


class Countdown:
    """Tells every n-th step."""

    def __init__(self, every: int) -> None:
        self._every, self._count = every, 0

    def due(self) -> bool:
        self._count += 1
        return self._count % self._every == 0


def own_address() -> str:
    """This host's on the emulated network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))
        return str(probe.getsockname()[0])

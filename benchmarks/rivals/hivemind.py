"""hivemind.Optimizer: workers find each other in a DHT and average when all have done their part.

With local updates every worker steps on its own and averages its weights once a target number of
samples has been seen by all of them; here the samples of `every` steps.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.rivals.foreign import Countdown, ForeignReplica, own_address
from thinwire.train.methods.method import Method
from thinwire.wire.wire import Wire
from thinwire.wire.world import current


@dataclass
class HivemindSettings:
    """hivemind.Optimizer with local updates."""

    every: int = 8
    """Steps of every worker between two averages."""
    matchmaking: float = 1.0
    """Seconds in which the workers find each other before an average."""


class HivemindReplica(ForeignReplica):
    def __init__(
        self, module: nn.Module, inner: torch.optim.Optimizer, settings: HivemindSettings
    ) -> None:
        import hivemind

        super().__init__(module, inner)
        world = current()
        meeting = Wire(name="hivemind")
        maddr = f"/ip4/{own_address()}/tcp/0"
        first = ""
        if world.rank == 0:
            self._dht = hivemind.DHT(host_maddrs=[maddr], start=True, use_ipfs=False)
            first = str(self._dht.get_visible_maddrs()[0])
        peer = meeting.gather_bytes(first.encode())[0].decode()
        if world.rank != 0:
            self._dht = hivemind.DHT(host_maddrs=[maddr], initial_peers=[peer], start=True)
        self.hivemind = hivemind.Optimizer(
            dht=self._dht,
            run_id="thinwire",
            batch_size_per_step=1,
            target_batch_size=settings.every * world.size,
            optimizer=inner,
            use_local_updates=True,
            matchmaking_time=settings.matchmaking,
            averaging_timeout=10.0,
            delay_state_averaging=False,
            # Its clocks are set for rounds of minutes; these are for rounds of seconds.
            averager_opts={"request_timeout": settings.matchmaking / 2},
            tracker_opts={
                "min_refresh_period": 0.05,
                "default_refresh_period": 0.1,
                "max_refresh_period": 0.5,
            },
        )
        meeting.barrier()
        self._countdown = Countdown(settings.every)

    def optimize(self) -> bool:
        self.hivemind.step()
        return self._countdown.due()


def _build(module: nn.Module, inner: torch.optim.Optimizer, settings: Any, group: Any) -> Any:
    return HivemindReplica(module, inner, settings)


HIVEMIND = Method("hivemind", "hivemind.Optimizer", HivemindSettings, _build, shardable=False)

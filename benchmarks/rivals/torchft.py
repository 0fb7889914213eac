"""torchft's LocalSGD and DiLoCo: each worker is a replica group of one, rank 0 has the lighthouse.

Set up as its README says for replicas that start from equal weights: quorums are synchronous and
include everybody, weights are not transferred at the start.
"""

import logging
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from benchmarks.rivals.foreign import Countdown, ForeignReplica, own_address
from thinwire.train.methods.method import Method
from thinwire.wire.world import current

_LIGHTHOUSE_PORT = 29610
_WAIT = timedelta(seconds=300)


@dataclass
class TorchftSettings:
    """torchft's LocalSGD."""

    every: int = 8
    """Steps between two averages."""


@dataclass
class TorchftDiLoCoSettings(TorchftSettings):
    """torchft's DiLoCo."""

    outer_lr: float = 0.7
    """Of its outer Nesterov SGD."""
    outer_momentum: float = 0.9
    """Of the same."""


_made = 0
_lighthouses: list[Any] = []  # a server lives as long as something refers to it


def _manager() -> Any:
    """A manager and a lighthouse of its own for every method."""
    global _made
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer

    logging.getLogger("torchft").setLevel(logging.ERROR)
    world = current()
    port = _LIGHTHOUSE_PORT + _made
    _made += 1
    if world.rank == 0:
        _lighthouses.append(
            LighthouseServer(bind=f"0.0.0.0:{port}", min_replicas=world.size, join_timeout_ms=60000)
        )
    # A replica group of one still wants a store of its own.
    here = own_address()
    store = torch.distributed.TCPStore(here, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=_WAIT),
        load_state_dict=lambda state: None,
        state_dict=lambda: {},
        min_replica_size=world.size,
        use_async_quorum=False,
        timeout=_WAIT,
        quorum_timeout=_WAIT,
        connect_timeout=_WAIT,
        rank=0,
        world_size=1,
        store_addr=here,
        store_port=store.port,
        lighthouse_addr=f"http://{os.environ['MASTER_ADDR']}:{port}",
        replica_id=f"replica_{world.rank}",
        hostname=here,
        init_sync=False,
    )
    manager.kept_store = store
    return manager


class TorchftReplica(ForeignReplica):
    def __init__(
        self, module: nn.Module, inner: torch.optim.Optimizer, settings: TorchftSettings
    ) -> None:
        from torchft.local_sgd import DiLoCo, LocalSGD

        super().__init__(module, inner)
        self._manager = _manager()
        if isinstance(settings, TorchftDiLoCoSettings):
            outer = torch.optim.SGD(
                module.parameters(),
                lr=settings.outer_lr,
                momentum=settings.outer_momentum,
                nesterov=True,
            )
            self._method: Any = DiLoCo(
                self._manager, [module], inner, outer, sync_every=settings.every
            )
        else:
            self._method = LocalSGD(self._manager, module, inner, sync_every=settings.every)
        self._method.__enter__()
        self._countdown = Countdown(settings.every)

    def optimize(self) -> bool:
        self.optimizer.step()
        return self._countdown.due()


def _build(module: nn.Module, inner: torch.optim.Optimizer, settings: Any, group: Any) -> Any:
    return TorchftReplica(module, inner, settings)


TORCHFT_LOCAL_SGD = Method(
    "torchft-local-sgd", "torchft's LocalSGD", TorchftSettings, _build, shardable=False
)
TORCHFT_DILOCO = Method(
    "torchft-diloco", "torchft's DiLoCo", TorchftDiLoCoSettings, _build, shardable=False
)

"""thinwire: train PyTorch models across machines joined by slow networks.

The names below are the library. They are imported on first use, so that `thinwire --help` and the
lab, which need no torch, start at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire import extras, methods, optim, pipeline, wire
    from thinwire.errors import NonFinite, PeerLost
    from thinwire.extras import ConcurrentAdversarial, NoiseScale, dual_batch_norm
    from thinwire.methods.base import WireOptimizer
    from thinwire.methods.dense.gradient_average import GradientAverage
    from thinwire.methods.gossip.decentlam import DecentLaM
    from thinwire.methods.gossip.dsgd import DSGD, DmSGD
    from thinwire.methods.local.des_loc import DesLoc
    from thinwire.methods.local.local_updates import LocalUpdates
    from thinwire.methods.local.outer import Outer
    from thinwire.methods.local.overlapped import CO2, Eager, Overlapped
    from thinwire.methods.local.presets import DiLoCo, LocalSGD, SlowMo, SparseLoCo, StreamingDiLoCo
    from thinwire.methods.onebit import ddp_hook as hooks
    from thinwire.methods.onebit.one_bit_adam import OneBitAdam
    from thinwire.methods.onebit.one_bit_lamb import OneBitLamb
    from thinwire.methods.onebit.zero_one_adam import ZeroOneAdam
    from thinwire.methods.sparse.sparse_average import SparseAverage
    from thinwire.optim import AsyncNAdam, Lamb, Lars
    from thinwire.pipeline import AsyncPipeline, Cut
    from thinwire.wire import Account, Flight, Wire, World, codecs, init, shutdown, topology

__version__ = "0.1.0"

__all__ = [
    "CO2",
    "DSGD",
    "Account",
    "AsyncNAdam",
    "AsyncPipeline",
    "ConcurrentAdversarial",
    "Cut",
    "DecentLaM",
    "DesLoc",
    "DiLoCo",
    "DmSGD",
    "Eager",
    "Flight",
    "GradientAverage",
    "Lamb",
    "Lars",
    "LocalSGD",
    "LocalUpdates",
    "NoiseScale",
    "NonFinite",
    "OneBitAdam",
    "OneBitLamb",
    "Outer",
    "Overlapped",
    "PeerLost",
    "SlowMo",
    "SparseAverage",
    "SparseLoCo",
    "StreamingDiLoCo",
    "Wire",
    "WireOptimizer",
    "World",
    "ZeroOneAdam",
    "codecs",
    "dual_batch_norm",
    "extras",
    "hooks",
    "init",
    "methods",
    "optim",
    "pipeline",
    "shutdown",
    "topology",
    "wire",
]

_ROOMS = ("extras", "methods", "optim", "pipeline", "wire")
_HOMES = {  # of every name: the module that defines it
    "errors": "NonFinite PeerLost",
    "extras": "ConcurrentAdversarial NoiseScale dual_batch_norm",
    "methods.base": "WireOptimizer",
    "methods.dense.gradient_average": "GradientAverage",
    "methods.gossip.decentlam": "DecentLaM",
    "methods.gossip.dsgd": "DSGD DmSGD",
    "methods.local.des_loc": "DesLoc",
    "methods.local.local_updates": "LocalUpdates",
    "methods.local.outer": "Outer",
    "methods.local.overlapped": "CO2 Eager Overlapped",
    "methods.local.presets": "DiLoCo LocalSGD SlowMo SparseLoCo StreamingDiLoCo",
    "methods.onebit.one_bit_adam": "OneBitAdam",
    "methods.onebit.one_bit_lamb": "OneBitLamb",
    "methods.onebit.zero_one_adam": "ZeroOneAdam",
    "methods.sparse.sparse_average": "SparseAverage",
    "optim": "AsyncNAdam Lamb Lars",
    "pipeline": "AsyncPipeline Cut",
    "wire": "Account Flight Wire World codecs init shutdown topology",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
_MOVED = {"LookAhead": "thinwire.optim.AsyncNAdam"}


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"thinwire.{name}")
    if name == "hooks":
        return import_module("thinwire.methods.onebit.ddp_hook")
    if name in _HOME_OF:
        return getattr(import_module(f"thinwire.{_HOME_OF[name]}"), name)
    from thinwire.deprecated import moved

    return moved("thinwire", name, _MOVED)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

"""thinwire: train PyTorch models across machines joined by slow networks.

The names below are the library. They are imported on first use, so that `thinwire --help` and the
lab, which need no torch, start at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire import pipeline
    from thinwire.optim import (
        CO2,
        DSGD,
        ConcurrentAdversarial,
        DecentLaM,
        DiLoCo,
        DmSGD,
        Eager,
        GradientAverage,
        Lamb,
        Lars,
        LocalSGD,
        LocalUpdates,
        NoiseScale,
        OneBitAdam,
        OneBitLamb,
        Outer,
        Overlapped,
        SlowMo,
        SparseAverage,
        SparseLoCo,
        StreamingDiLoCo,
        WireOptimizer,
        ZeroOneAdam,
        dual_batch_norm,
        hooks,
    )
    from thinwire.pipeline import AsyncPipeline, Cut, LookAhead
    from thinwire.wire import Account, Flight, Wire, World, codecs, init, shutdown, topology

__version__ = "0.1.0"

__all__ = [
    "CO2",
    "DSGD",
    "Account",
    "AsyncPipeline",
    "ConcurrentAdversarial",
    "Cut",
    "DecentLaM",
    "DiLoCo",
    "DmSGD",
    "Eager",
    "Flight",
    "GradientAverage",
    "Lamb",
    "Lars",
    "LocalSGD",
    "LocalUpdates",
    "LookAhead",
    "NoiseScale",
    "OneBitAdam",
    "OneBitLamb",
    "Outer",
    "Overlapped",
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
    "hooks",
    "init",
    "pipeline",
    "shutdown",
    "topology",
]

_PIPELINE = {"AsyncPipeline", "Cut", "LookAhead"}
_WIRE = {"Account", "Flight", "Wire", "World", "codecs", "init", "shutdown", "topology"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'thinwire' has no attribute {name!r}")
    if name == "pipeline":
        return import_module("thinwire.pipeline")
    room = "wire" if name in _WIRE else "pipeline" if name in _PIPELINE else "optim"
    return getattr(import_module(f"thinwire.{room}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

"""Plain optimizers, which send nothing: LAMB and LARS, and NAdam for asynchronous stages."""

from typing import Any

from thinwire.deprecated import moved
from thinwire.optim.async_nadam import AsyncNAdam
from thinwire.optim.lamb import Lamb
from thinwire.optim.lars import Lars

__all__ = ["AsyncNAdam", "Lamb", "Lars"]

_METHODS = (
    "CO2 DSGD DecentLaM DiLoCo DmSGD Eager GradientAverage LocalSGD LocalUpdates OneBitAdam "
    "OneBitLamb Outer Overlapped SlowMo SparseAverage SparseLoCo StreamingDiLoCo WireOptimizer "
    "ZeroOneAdam hooks"
)
_EXTRAS = "ConcurrentAdversarial NoiseScale dual_batch_norm"
_MOVED = {name: f"thinwire.{name}" for name in _METHODS.split()}
_MOVED |= {name: f"thinwire.extras.{name}" for name in _EXTRAS.split()}


def __getattr__(name: str) -> Any:
    return moved("thinwire.optim", name, _MOVED)

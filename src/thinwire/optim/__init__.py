"""The methods, one file each; every one is a torch.optim.Optimizer."""

from thinwire.optim import hooks
from thinwire.optim.base import WireOptimizer
from thinwire.optim.decentlam import DecentLaM
from thinwire.optim.dsgd import DSGD, DmSGD
from thinwire.optim.gradient_average import GradientAverage
from thinwire.optim.lamb import Lamb
from thinwire.optim.local_updates import LocalUpdates
from thinwire.optim.noise_scale import NoiseScale
from thinwire.optim.one_bit_adam import OneBitAdam
from thinwire.optim.one_bit_lamb import OneBitLamb
from thinwire.optim.outer import Outer
from thinwire.optim.presets import (
    CO2,
    DiLoCo,
    Eager,
    LocalSGD,
    Overlapped,
    SlowMo,
    SparseLoCo,
    StreamingDiLoCo,
)
from thinwire.optim.sparse_average import SparseAverage
from thinwire.optim.zero_one_adam import ZeroOneAdam

__all__ = [
    "CO2",
    "DSGD",
    "DecentLaM",
    "DiLoCo",
    "DmSGD",
    "Eager",
    "GradientAverage",
    "Lamb",
    "LocalSGD",
    "LocalUpdates",
    "NoiseScale",
    "OneBitAdam",
    "OneBitLamb",
    "Outer",
    "Overlapped",
    "SlowMo",
    "SparseAverage",
    "SparseLoCo",
    "StreamingDiLoCo",
    "WireOptimizer",
    "ZeroOneAdam",
    "hooks",
]

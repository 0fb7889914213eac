"""The methods, one file each; every one is a torch.optim.Optimizer."""

from thinwire.optim import hooks
from thinwire.optim.adversarial import ConcurrentAdversarial
from thinwire.optim.base import WireOptimizer
from thinwire.optim.decentlam import DecentLaM
from thinwire.optim.dsgd import DSGD, DmSGD
from thinwire.optim.dual_batch_norm import dual_batch_norm
from thinwire.optim.gradient_average import GradientAverage
from thinwire.optim.lamb import Lamb
from thinwire.optim.lars import Lars
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
    "ConcurrentAdversarial",
    "DecentLaM",
    "DiLoCo",
    "DmSGD",
    "Eager",
    "GradientAverage",
    "Lamb",
    "Lars",
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
    "dual_batch_norm",
    "hooks",
]

"""The methods, one file each; every one is a torch.optim.Optimizer."""

from thinwire.optim.base import WireOptimizer
from thinwire.optim.gradient_average import GradientAverage

__all__ = ["GradientAverage", "WireOptimizer"]

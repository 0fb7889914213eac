"""Beside the methods: the gradient noise scale, and concurrent adversarial training."""

from thinwire.extras.adversarial import ConcurrentAdversarial
from thinwire.extras.dual_batch_norm import dual_batch_norm
from thinwire.extras.noise_scale import NoiseScale

__all__ = ["ConcurrentAdversarial", "NoiseScale", "dual_batch_norm"]

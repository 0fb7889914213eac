"""Concurrent adversarial training for the trainer: its flags, and batches that are announced."""

from dataclasses import dataclass

import torch

from thinwire.extras import ConcurrentAdversarial
from thinwire.train.data.order import Batches, Pair


@dataclass
class AdversaryConfig:
    """Training on perturbed images, too (docs/methods/conadv.md)."""

    adversarial: float = 0.0
    """How far each pixel, 0 to 1, is moved to raise the loss; 0 trains on clean images alone. Try
    it where a large batch ends at a lower accuracy than a small one. A step then has three passes
    instead of one."""
    adversarial_weight: float = 1.0
    """Of the loss on perturbed images. Lower it when the clean loss stays behind."""


class AnnouncedBatches:
    """Reads one batch ahead, to announce it to the adversary. The position is that of the batches
    which have been handed out."""

    def __init__(
        self, batches: Batches, adversary: ConcurrentAdversarial, device: torch.device
    ) -> None:
        self._batches, self._adversary, self._device = batches, adversary, device
        self._next: Pair | None = None
        self._position = batches.position

    @property
    def position(self) -> int:
        return self._position

    @position.setter
    def position(self, value: int) -> None:
        self._batches.position = self._position = value
        self._next = None

    def next(self) -> Pair:
        batch = self._next or self._read()
        self._position = self._batches.position
        self._next = self._read()
        self._adversary.announce(*self._next)
        return batch

    def _read(self) -> Pair:
        x, y = self._batches.next()
        return x.to(self._device), y.to(self._device)

"""Labelled images, split into a training and a validation side, in the order of order.py.

`digits` is scikit-learn's: 1797 handwritten digits of 8 x 8 pixels, which come with the package, so
nothing is downloaded. Pixels are scaled to [0, 1].
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from thinwire.errors import UsageError
from thinwire.train.data.order import Order, permute, spread
from thinwire.train.tasks.image_models import ImageShape

_SPLIT_SEED = 0  # fixed, so that all runs are judged by the same images
VALIDATION = 0.2  # share, where none is given


@dataclass(frozen=True)
class Images:
    """Images (N, C, H, W) in float32 and their labels (N,)."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def at(self, indices: np.ndarray) -> Images:
        chosen = torch.from_numpy(indices)
        return Images(self.pixels[chosen], self.labels[chosen])


@dataclass(frozen=True)
class ImageSet:
    """Both sides of a set of images."""

    train: Images
    validation: Images
    shape: ImageShape
    digest: str
    """Identifies the content: ranks with other images have other digests."""


def load_digits(validation: float | None = None) -> ImageSet:
    """scikit-learn's digits, `validation` of them kept apart."""
    try:
        from sklearn import datasets
    except ImportError:
        raise UsageError(
            "--data digits needs scikit-learn: pip install 'thinwire[images]'"
        ) from None
    found = datasets.load_digits()
    pixels = torch.from_numpy((found.images / 16).astype(np.float32)).unsqueeze(1)
    labels = torch.from_numpy(found.target.astype(np.int64))
    return split(Images(pixels, labels), VALIDATION if validation is None else validation)


def split(images: Images, share: float) -> ImageSet:
    """`share` of the images, drawn by a fixed seed, for validation; at least one on each side."""
    if not 0 < share < 1:
        raise UsageError(f"--validation must be between 0 and 1, got {share}")
    count = len(images)
    places = np.arange(count, dtype=np.int64)
    order = permute(places, count, _SPLIT_SEED, np.zeros_like(places))
    kept = min(max(1, round(share * count)), count - 1)
    train, validation = images.at(np.sort(order[kept:])), images.at(np.sort(order[:kept]))
    channels, size = images.pixels.shape[1:3]
    shape = ImageShape(channels, size, int(images.labels.max()) + 1)
    return ImageSet(train, validation, shape, _digest(train, validation))


def _digest(*sides: Images) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for side in sides:
        digest.update(f" side {tuple(side.pixels.shape)} ".encode())
        digest.update(side.pixels.numpy().tobytes())
        digest.update(side.labels.numpy().tobytes())
    return digest.hexdigest()


class ImageBatches(Order):
    """Endless training batches of one replica; `position` is their whole state."""

    def __init__(self, images: Images, batch: int, replica: int, replicas: int, seed: int) -> None:
        super().__init__(len(images), batch, replica, replicas, seed)
        self.images = images

    def next(self) -> tuple[Tensor, Tensor]:
        """The next (x, y): (batch, C, H, W) and (batch,)."""
        found = self.images.at(self.advance()[1])
        return found.pixels, found.labels


def validation_images(
    images: Images, batch: int, replica: int, replicas: int, limit: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """This replica's share of at most `limit` images; the last batch can be short."""
    share = spread(len(images), limit, replica, replicas)
    for start in range(0, len(share), batch):
        found = images.at(share[start : start + batch])
        yield found.pixels, found.labels

"""Selection: the largest values of a segment, found by a threshold that is searched for rarely."""

import math

import numpy as np
import torch
from torch import Tensor

RUNAWAY = 4  # times as many as may be kept: a threshold that lets through more is found anew
_TILE = 1 << 17  # values handled at a time on a CPU: they stay in the cache
_TINY = float(np.finfo(np.float32).tiny)  # zeros are never worth sending


def select(values: Tensor, keep: int, threshold: float | None) -> tuple[Tensor, float, bool]:
    """(ascending indices of at most `keep` values, the threshold used, whether all are finite).

    Without a threshold, or when it lets through more than RUNAWAY times `keep` or less than half of
    it, a new one is found: the `keep`-th largest magnitude. All are kept if all may be.
    """
    if keep >= values.numel():
        finite = bool(values.isfinite().all())
        return torch.arange(values.numel() if finite else 0, device=values.device), _TINY, finite
    found, largest = _above(values, threshold) if threshold is not None else (None, 0.0)
    if not math.isfinite(largest):
        return _none(values), threshold or _TINY, False
    if found is None or threshold is None or _ran_away(found.numel(), keep, threshold):
        threshold = max(_TINY, kth_largest(values, keep))
        found, largest = _above(values, threshold)
        if not math.isfinite(largest):
            return _none(values), _TINY, False
    if found.numel() > keep:
        found = found[largest_of(values[found], keep)]
    return found, threshold, True


def is_due(step: int, refresh: int) -> bool:
    """Whether a threshold is found anew at this step, counted from 1: 1, 2, 4, ... and then every
    `refresh` steps. Early ones do not last: what is kept for later still grows."""
    return step % refresh == 0 or (step < refresh and step & (step - 1) == 0)


def _ran_away(count: int, keep: int, threshold: float) -> bool:
    return count > RUNAWAY * keep or (2 * count < keep and threshold > _TINY)


def _above(values: Tensor, threshold: float) -> tuple[Tensor, float]:
    """Ascending indices of the magnitudes >= threshold, and the largest magnitude of all."""
    if values.device.type == "cpu":
        return _above_on_cpu(values, threshold)
    size = values.abs()
    return (size >= threshold).nonzero().view(-1), float(size.max())


def _above_on_cpu(values: Tensor, threshold: float) -> tuple[Tensor, float]:
    """Tile by tile in numpy: five times as fast here as nonzero() of the whole in torch."""
    array = values.numpy()
    scratch = np.empty(min(_TILE, array.size), array.dtype)
    mask = np.empty(scratch.size, bool)
    largest, found = 0.0, []
    for start in range(0, array.size, _TILE):
        tile = array[start : start + _TILE]
        size = np.abs(tile, out=scratch[: tile.size])
        top = float(size.max())
        if not top <= largest:  # a NaN too
            largest = top
            if not math.isfinite(top):
                break
        if top >= threshold:
            above = np.greater_equal(size, threshold, out=mask[: tile.size])
            found.append(np.flatnonzero(above) + start)
    indices = np.concatenate(found) if found else np.zeros(0, np.int64)
    return torch.from_numpy(indices), largest


def kth_largest(values: Tensor, k: int) -> float:
    """The k-th largest magnitude."""
    if values.device.type == "cpu":
        size = np.abs(values.numpy())
        return float(np.partition(size, size.size - k)[size.size - k])
    return float(values.abs().topk(k, sorted=False).values.min())


def largest_of(values: Tensor, k: int) -> Tensor:
    """Ascending indices of the k largest magnitudes."""
    if values.device.type == "cpu":
        size = np.abs(values.numpy())
        return torch.from_numpy(np.sort(np.argpartition(size, size.size - k)[size.size - k :]))
    return values.abs().topk(k, sorted=False).indices.sort().values


def _none(values: Tensor) -> Tensor:
    return torch.zeros(0, dtype=torch.int64, device=values.device)

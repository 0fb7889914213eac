"""The order in which a run reads its samples: which replica takes which, and when.

An epoch visits every sample once, in an order drawn from (seed, epoch). A step takes the next
replicas * batch samples of that order; replica r reads its contiguous share of `batch`:

    position p      p+batch        p+2*batch            p + replicas*batch
        | replica 0 |  replica 1   |      ...           |   the next step

So one integer, the number of samples the whole run has consumed, says where the run is. It is equal
on all ranks, it is all that a checkpoint keeps, and it means the same for any number of replicas.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

Indices = npt.NDArray[np.int64]

_WORD = (1 << 64) - 1

Pair = tuple[Tensor, Tensor]  # inputs and targets


class Batches(Protocol):
    """Endless training micro-batches of one replica."""

    position: int
    """Samples the whole run has consumed: all that a checkpoint keeps of the data."""

    def next(self) -> Pair: ...


class Order:
    """One replica's way through `size` samples; `position` is its whole state."""

    def __init__(
        self, size: int, batch: int, replica: int, replicas: int, seed: int, position: int = 0
    ) -> None:
        if not 0 <= replica < replicas:
            raise ValueError(f"replica must be in 0..{replicas - 1}, got {replica}")
        self.size = size
        self.batch = batch
        self.replica = replica
        self.replicas = replicas
        self.seed = seed
        self.position = position

    def advance(self) -> tuple[Indices, Indices]:
        """The places of the next batch in the whole run's order, and the samples there."""
        first = self.position + self.replica * self.batch
        places = np.arange(first, first + self.batch, dtype=np.int64)
        self.position += self.replicas * self.batch
        epochs, indices = np.divmod(places, self.size)
        return places, permute(indices, self.size, self.seed, epochs)


def spread(size: int, limit: int, replica: int, replicas: int) -> Indices:
    """This replica's share of at most `limit` samples, spread evenly over `size`.

    The samples of all replicas together do not depend on their number; shares differ by at most one
    and can be empty.
    """
    count = min(limit, size)
    chosen = np.arange(count, dtype=np.int64) * size // max(count, 1)
    return chosen[replica * count // replicas : (replica + 1) * count // replicas]


def permute(indices: Indices, size: int, seed: int, epochs: Indices) -> Indices:
    """Where the permutation of range(size) that belongs to (seed, epoch) sends each index.

    A Feistel network permutes a grid of rows * columns >= size without a table, so 10 million
    samples cost no memory. The few values that land outside range(size) are sent round again, which
    keeps the map one to one ("cycle walking").
    """
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    keys = _mix(np.uint64(seed & _WORD) ^ _mix(epochs.astype(np.uint64)))
    values = _feistel(indices.astype(np.uint64), rows, columns, keys)
    while (outside := values >= size).any():
        values[outside] = _feistel(values[outside], rows, columns, keys[outside])
    return values.astype(np.int64)


def _feistel(
    values: npt.NDArray[np.uint64], rows: int, columns: int, keys: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    """Move each row by a hash of the column, then each column by a hash of the row, three times."""
    height, width = np.uint64(rows), np.uint64(columns)
    row, column = values // width, values % width
    for turn in range(3):
        key = keys + np.uint64(turn << 48)  # rows and columns stay far below 2**47
        row = (row + _mix(column + key) % height) % height
        column = (column + _mix(row + key + np.uint64(1 << 47)) % width) % width
    joined: npt.NDArray[np.uint64] = row * width + column
    return joined


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64; arithmetic modulo 2**64."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    values = values ^ (values >> np.uint64(31))
    return values

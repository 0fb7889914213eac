"""Batches of tokens: windows of the text, in the order of order.py.

The tokens are cut into windows of context + 1 (a window's last token is the next one's first); a
window is a sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from thinwire.errors import UsageError
from thinwire.train.data.order import Indices, Order, spread

Tokens = npt.NDArray[Any]  # one-dimensional, unsigned, possibly memory-mapped

IGNORED = -100  # the target that cross_entropy leaves out
_WORD = (1 << 64) - 1
_VALIDATION_SEED = 0  # fixed, so that the validation loss of all runs is over the same masks


@dataclass
class DataConfig:
    """What the model reads."""

    data: str = "stdlib"
    """stdlib (the Python standard library of this machine), files:GLOB (text files), tokens:GLOB
    (memory-mapped .npy of uint8, uint16 or uint32, or raw .bin of uint16; ** is recursive), or
    digits (images that come with scikit-learn: pip install thinwire[images])."""

    tokenizer: str | None = None
    """A Hugging Face tokenizer.json; without it every byte is a token (vocabulary 256)."""

    vocab: int | None = None
    """Vocabulary of tokens:GLOB, where there is no tokenizer to tell it. Not needed for uint8."""

    context: int = 128
    """Tokens in a sequence. Memory of the activations grows with it."""

    batch: int = 8
    """Sequences or images per replica and micro-batch. Lower it when memory runs out."""

    validation: float | None = None
    """Share kept for validation: of the files (of the tokens, where there is one file only), 0.05
    if not given; of the images, 0.2."""


class Windows:
    """Random access to the windows of context + 1 tokens in one or more arrays."""

    def __init__(self, tokens: Sequence[Tokens], context: int) -> None:
        self.tokens = list(tokens)
        self.context = context
        counts = [max(0, (len(array) - 1) // context) for array in self.tokens]
        self._ends = np.cumsum(counts, dtype=np.int64)
        if not len(self):
            found = max((len(array) for array in self.tokens), default=0)
            raise UsageError(
                f"a window of context + 1 = {context + 1} tokens was asked for, but the longest "
                f"text has {found}; use a smaller --context or more data"
            )

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, indices: Indices) -> Tensor:
        """The windows as int64, (N, context + 1)."""
        out = np.empty((len(indices), self.context + 1), dtype=np.int64)
        for row, index in enumerate(indices):
            which = int(np.searchsorted(self._ends, index, side="right"))
            before = int(self._ends[which - 1]) if which else 0
            start = (int(index) - before) * self.context
            out[row] = self.tokens[which][start : start + self.context + 1]
        return torch.from_numpy(out)


class Batches(Order):
    """Endless training batches of one replica; `position` is their whole state.

    With `mask_vocab` the batches are (inputs, targets) of the masked objective, where the masks of
    a window depend on the seed and its place in the global order only.
    """

    def __init__(
        self,
        tokens: Sequence[Tokens],
        context: int,
        batch: int,
        replica: int,
        replicas: int,
        seed: int,
        position: int = 0,
        *,
        mask_vocab: int | None = None,
    ) -> None:
        self.windows = Windows(tokens, context)
        super().__init__(len(self.windows), batch, replica, replicas, seed, position)
        self.mask_vocab = mask_vocab

    def next(self) -> tuple[Tensor, Tensor]:
        """The next (x, y), int64, each (batch, context)."""
        places, indices = self.advance()
        return _pair(self.windows.read(indices), self.mask_vocab, self.seed, places)


def validation_batches(
    tokens: Sequence[Tokens],
    context: int,
    batch: int,
    replica: int,
    replicas: int,
    limit: int,
    *,
    mask_vocab: int | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """This replica's share of at most `limit` windows, spread evenly over the validation tokens.

    The windows (and masks) of all replicas together do not depend on their number. Shares differ by
    at most one window and can be empty, the last batch can be short: weigh each batch's loss by its
    number of targets, `(y != IGNORED).sum()`.
    """
    windows = Windows(tokens, context)
    share = spread(len(windows), limit, replica, replicas)
    for start in range(0, len(share), batch):
        indices = share[start : start + batch]
        yield _pair(windows.read(indices), mask_vocab, _VALIDATION_SEED, indices)


def mask_tokens(
    x: Tensor, vocab: int, *, generator: torch.Generator, rate: float = 0.15
) -> tuple[Tensor, Tensor]:
    """BERT's masking of tokens x: (inputs, targets).

    `rate` of the tokens, at least one, are to be predicted; the other targets are IGNORED. Of those
    tokens 80 % are replaced by the mask (id `vocab`, so the model needs vocab + 1 rows), 10 % by a
    random token, and 10 % stay, so that the model cannot trust what it sees.
    """
    chance = torch.rand(x.shape, generator=generator)
    chosen = (chance < rate) | (chance == chance.min())
    targets = torch.where(chosen, x, IGNORED)
    fate = torch.rand(x.shape, generator=generator)
    noise = torch.randint(vocab, x.shape, generator=generator)
    inputs = torch.where(chosen & (fate < 0.8), vocab, x)
    inputs = torch.where(chosen & (fate >= 0.8) & (fate < 0.9), noise, inputs)
    return inputs, targets


def _pair(
    rows: Tensor, mask_vocab: int | None, seed: int, places: Indices
) -> tuple[Tensor, Tensor]:
    """(x, y) of either objective from windows (N, context + 1)."""
    if mask_vocab is None:
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    masked = [
        mask_tokens(row, mask_vocab, generator=_generator(seed, int(place)))
        for row, place in zip(rows[:, :-1], places, strict=True)
    ]
    return torch.stack([x for x, _ in masked]), torch.stack([y for _, y in masked])


def _generator(seed: int, place: int) -> torch.Generator:
    """A generator for one place in the global order, so that masks need no state of their own."""
    state = np.random.SeedSequence((seed & _WORD, place)).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state) >> 1)

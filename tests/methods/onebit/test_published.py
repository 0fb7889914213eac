"""The published one-bit methods, by settings alone: docs/methods/one-bit.md has the table."""

from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire as tw
from tests.conftest import Ranks
from tests.methods.onebit import one_bit_oracle as ours
from tests.methods.onebit import published_oracle as published
from tests.methods.onebit.one_bit_oracle import SHAPES, Gradient

LR, FREEZE = 0.02, 6
ORDER = [2, 1, 0]  # of the tensors in a bucket, when no backward pass has told another

ADAM: dict[str, Any] = {
    "bias_correction": False,
    "whiten": False,
    "forget": False,
    "floor": 0.0,
    "bucket_mb": 1e9,
}
LAMB: dict[str, Any] = {
    "bias_correction": False,
    "debias": False,
    "floor": 0.0,
    "bucket_mb": 1e9,
}
ZERO_ONE: dict[str, Any] = {"bias_correction": False, "floor": 0.0, "bucket_mb": 1e9}


def trained(method: str, size: int, steps: int, settings: dict[str, Any]) -> list[Tensor]:
    settings = {"lr": LR, "freeze_at": FREEZE} | settings
    weights, _ = ours.run(getattr(tw, method), size, steps, **settings)
    return [w.detach() for w in weights]


def problem(size: int) -> tuple[list[Tensor], Gradient]:
    start, gradient = ours.problem(size, SHAPES)

    def reordered(rank: int, step: int, x: list[Tensor]) -> list[Tensor]:
        back = [x[ORDER.index(i)] for i in range(len(ORDER))]
        given = gradient(rank, step, back)
        return [given[i] for i in ORDER]

    return [start[i] for i in ORDER], reordered


def assert_equal(got: list[Tensor], expected: list[Tensor]) -> None:
    for i, wanted in zip(ORDER, expected, strict=True):
        torch.testing.assert_close(got[i].double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_one_bit_adam(ranks: Ranks, size: int) -> None:
    expected = published.adam(*problem(size), size, 9, LR, FREEZE)
    for got in ranks(size, trained, "OneBitAdam", size, 9, ADAM):
        assert_equal(got, expected)


@pytest.mark.parametrize(("size", "lam"), [(1, 0.0), (2, 0.01), (3, 0.0)])
def test_one_bit_lamb(ranks: Ranks, size: int, lam: float) -> None:
    expected = published.lamb(*problem(size), size, 9, LR, FREEZE, lam)
    for got in ranks(size, trained, "OneBitLamb", size, 9, LAMB | {"weight_decay": lam}):
        assert_equal(got, expected)


@pytest.mark.parametrize("steps", [6, 9, 13])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_zero_one_adam(ranks: Ranks, size: int, steps: int) -> None:
    """Spacings double after 2 refreshes, and after 3 local steps up to 4, in the place of the
    published 16, 32678 and 16."""
    more = {"double_after": 2, "local_double_after": 3, "longest": 4}
    expected = published.zero_one(*problem(size), size, steps, LR, FREEZE, 2, 3, 4)
    answers = ranks(size, trained, "ZeroOneAdam", size, steps, ZERO_ONE | more)
    for got, wanted in zip(answers, expected, strict=True):
        assert_equal(got, wanted)


def test_the_defaults_are_not_the_published_methods(ranks: Ranks) -> None:
    """Else the table would be of no use: each setting changes the result."""
    expected = published.adam(*problem(2), 2, 9, LR, FREEZE)
    for name in ("bias_correction", "whiten"):
        got = ranks(2, trained, "OneBitAdam", 2, 9, {k: v for k, v in ADAM.items() if k != name})
        with pytest.raises(AssertionError, match="not close"):
            assert_equal(got[0], expected)
    wanted = published.lamb(*problem(2), 2, 9, LR, FREEZE, 0.0)
    got = ranks(2, trained, "OneBitLamb", 2, 9, {k: v for k, v in LAMB.items() if k != "debias"})
    with pytest.raises(AssertionError, match="not close"):
        assert_equal(got[0], wanted)

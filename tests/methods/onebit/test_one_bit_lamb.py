"""1-bit LAMB on real ranks against the oracle and plain LAMB; test_traps.py has more."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.conftest import Ranks
from tests.methods.onebit import one_bit_oracle as oracle
from tests.methods.onebit.one_bit_oracle import SHAPES

LR = 0.02


def lamb(size: int, steps: int, settings: dict[str, Any]) -> list[Tensor]:
    weights, _ = oracle.run(tw.OneBitLamb, size, steps, lr=LR, **settings)
    return [w.detach() for w in weights]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("decay", "correct"), [(0.0, True), (0.1, False), (0.1, True)])
def test_both_stages_equal_the_oracle(ranks: Ranks, size: int, decay: float, correct: bool) -> None:
    settings = {"weight_decay": decay, "bias_correction": correct, "freeze_at": 6}
    answers = ranks(size, lamb, size, 9, settings)
    start, gradient = oracle.problem(size, SHAPES)
    order = [2, 1, 0]  # of the bucket, when no backward pass has told another

    def reordered(rank: int, step: int, x: list[Tensor]) -> list[Tensor]:
        back = [x[order.index(i)] for i in range(3)]
        return [gradient(rank, step, back)[i] for i in order]

    expected = oracle.lamb(
        [start[i] for i in order], reordered, size, 9, LR, 6, lam=decay, correct=correct
    )
    for weights in answers:
        for i, wanted in zip(order, expected, strict=True):
            torch.testing.assert_close(weights[i].double(), wanted, rtol=1e-4, atol=1e-5)
        assert all(map(torch.equal, weights, answers[0])), "replicas hold the same bits"


def test_the_warm_up_is_lamb_with_data_parallelism(ranks: Ranks) -> None:
    size, steps = 2, 12
    start, gradient = oracle.problem(size, SHAPES)
    weights = [nn.Parameter(t.float()) for t in start]
    plain = tw.Lamb(weights, lr=LR, weight_decay=0.1)
    for step in range(1, steps + 1):
        now = [w.detach() for w in weights]
        everyone = [gradient(rank, step, now) for rank in range(size)]
        for i, w in enumerate(weights):
            w.grad = sum(g[i] for g in everyone).div(size).float()
        plain.step()
    for got in ranks(size, lamb, size, steps, {"weight_decay": 0.1, "freeze_at": 99}):
        torch.testing.assert_close(got, [w.detach() for w in weights], rtol=1e-5, atol=1e-6)


def _scales() -> list[float]:
    _, optimizer = oracle.run(tw.OneBitLamb, 2, 6, lr=LR, freeze_at=6)
    (bucket,) = optimizer.buckets
    return [
        float(m.norm()) / m.numel() ** 0.5 * float(k)
        for m, k in zip(bucket.views(bucket.m), bucket.scalars["scale"], strict=True)
    ]


def test_tensors_of_very_different_size_are_brought_to_one(ranks: Ranks) -> None:
    for sizes in ranks(2, _scales):
        assert max(sizes) == pytest.approx(min(sizes), rel=1e-4)


def test_the_factor_follows_the_fresh_variance_within_its_bounds() -> None:
    """Gradients ten times smaller after the freeze: r may rise, by 10 % a step, up to r_max."""
    weights = nn.Parameter(torch.ones(64))
    optimizer = tw.OneBitLamb([weights], lr=1e-4, freeze_at=20, betas=(0.0, 0.9), factor=(0.5, 2.0))
    factors = []
    for step in range(60):
        generator = torch.Generator().manual_seed(step)
        weights.grad = torch.randn(64, generator=generator) * (1.0 if step < 20 else 0.1)
        optimizer.step()
        if optimizer.compressing and step >= 20:
            factors.append(float(optimizer.state[weights]["factor"]))
    assert factors[0] <= 1.1 + 1e-6
    assert all(b <= a * 1.1 + 1e-6 for a, b in itertools.pairwise(factors))
    assert factors[-1] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("coefficient_beta", 1.0),
        ("factor", (4.0, 0.5)),
        ("factor_threshold", -0.1),
        ("coefficient", (1.0,)),
        ("phi", (3.0, 1.0)),
        ("freeze_at", -1),
    ],
)
def test_bad_settings_are_refused_by_name(setting: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"OneBitLamb\({setting}=...\) takes .*, got"):
        tw.OneBitLamb([nn.Parameter(torch.zeros(2))], **{setting: value})

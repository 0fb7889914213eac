"""Lamb against its equations, written out with doubles; what it does at the edges."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw


def oracle(x: Tensor, gradients: list[Tensor], lr: float, **s: Any) -> Tensor:
    """One tensor through the equations of the module's docstring."""
    b1, b2 = s.get("betas", (0.9, 0.999))
    low, high = s.get("coefficient", (0.01, 10.0))
    m, v = torch.zeros_like(x), torch.zeros_like(x)
    for t, g in enumerate(gradients, 1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        mh, vh = m, v
        if s.get("bias_correction", True):
            mh, vh = m / (1 - b1**t), v / (1 - b2**t)
        u = mh / (vh.sqrt() + s.get("eps", 1e-8)) + s.get("weight_decay", 0.0) * x
        length, step = float(x.norm()), float(u.norm())
        c = 1.0
        if length > 0 and step > 0:
            if s.get("phi"):
                length = min(max(length, s["phi"][0]), s["phi"][1])
            c = min(max(length / step, low), high)
        x = x - lr * c * u
    return x


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "decay": {"weight_decay": 0.1},
    "no correction": {"bias_correction": False},
    "bounded": {"coefficient": (0.2, 0.3), "eps": 1e-3},
    "phi": {"phi": (0.5, 1.0), "betas": (0.8, 0.9)},
}


def gradients(shape: tuple[int, ...], steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(steps)]


@pytest.mark.parametrize("name", CASES)
def test_lamb_equals_its_equations(name: str) -> None:
    given = gradients((5, 3), 12)
    start = torch.randn(5, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    weights = nn.Parameter(start.float())
    optimizer = tw.Lamb([weights], lr=0.02, **CASES[name])
    for g in given:
        weights.grad = g.float()
        optimizer.step()
    expected = oracle(start, given, 0.02, **CASES[name])
    torch.testing.assert_close(weights.detach().double(), expected, rtol=1e-5, atol=1e-6)


def test_a_step_changes_a_tensor_by_its_share() -> None:
    for scale in (1e-3, 1.0, 1e3):
        weights = nn.Parameter(torch.full((100,), scale))
        optimizer = tw.Lamb([weights], lr=0.01, coefficient=(0.0, 1e9))
        weights.grad = torch.randn(100, generator=torch.Generator().manual_seed(0))
        optimizer.step()
        moved = float((weights.detach() - scale).norm())
        assert moved == pytest.approx(0.01 * scale * 10, rel=1e-3)


def test_a_tensor_of_zeros_moves_and_one_without_gradient_does_not() -> None:
    zeros, idle = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(4))
    optimizer = tw.Lamb([zeros, idle], lr=0.1, weight_decay=0.1)
    zeros.grad = torch.ones(4)
    optimizer.step()
    torch.testing.assert_close(zeros.detach(), torch.full((4,), -0.1))
    assert torch.equal(idle.detach(), torch.ones(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_are_float32_and_go_on_after_loading(dtype: torch.dtype) -> None:
    one, other = (nn.Parameter(torch.ones(6, dtype=dtype)) for _ in range(2))
    first, second = tw.Lamb([one], lr=0.1), tw.Lamb([other], lr=0.1)
    given = [g.to(dtype) for g in gradients((6,), 4)]
    for g in given[:2]:
        one.grad = g
        first.step()
    second.load_state_dict(first.state_dict())
    with torch.no_grad():
        other.copy_(one)
    for g in given[2:]:
        for weights, optimizer in ((one, first), (other, second)):
            weights.grad = g.clone()
            optimizer.step()
    assert torch.equal(one, other)
    assert second.state[other]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("lr", -1.0),
        ("lr", math.nan),
        ("eps", -1e-8),
        ("weight_decay", -0.1),
        ("betas", (0.9, 1.0)),
        ("betas", (0.9,)),
        ("coefficient", (1.0, 0.5)),
        ("coefficient", (-1.0, 0.5)),
        ("coefficient", 3.0),
        ("phi", (0.0, math.inf)),
    ],
)
def test_bad_settings_are_refused_by_name(setting: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"Lamb\({setting}=...\) takes .*, got"):
        tw.Lamb([nn.Parameter(torch.zeros(2))], **{setting: value})


def test_a_sparse_gradient_is_refused() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = tw.Lamb(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse=False"):
        optimizer.step()

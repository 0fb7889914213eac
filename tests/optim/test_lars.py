"""Lars against its equations, written out with doubles; what it does at the edges."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.conftest import Ranks


def oracle(x: Tensor, gradients: list[Tensor], rates: list[float], **s: Any) -> Tensor:
    """One tensor through the equations of the module's docstring."""
    mu, lam, trust = s.get("momentum", 0.9), s.get("weight_decay", 0.0), s.get("trust", 0.001)
    v = torch.zeros_like(x)
    for g, lr in zip(gradients, rates, strict=True):
        c = 1.0
        length, slope = float(x.norm()), float(g.norm())
        if x.dim() >= 2 and length > 0 and slope > 0:
            c = trust * length / (slope + lam * length)
        v = mu * v + lr * c * (g + lam * x)
        x = x - v
    return x


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "decay": {"weight_decay": 0.1},
    "no momentum": {"momentum": 0.0, "weight_decay": 1e-4},
    "trust": {"trust": 0.02, "momentum": 0.5},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shape", [(5, 3), (4, 2, 3, 3), (7,)])
def test_lars_equals_its_equations(name: str, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    start, *given = torch.randn(13, *shape, generator=generator, dtype=torch.float64)
    rates = [0.5 + 0.1 * (step % 4) for step in range(12)]
    weights = nn.Parameter(start.float())
    optimizer = tw.Lars([weights], **CASES[name])
    for g, lr in zip(given, rates, strict=True):
        weights.grad = g.float()
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
    expected = oracle(start, list(given), rates, **CASES[name])
    torch.testing.assert_close(weights.detach().double(), expected, rtol=1e-5, atol=1e-5)
    assert weights.grad.double().equal(given[-1].float().double())  # left as it was


def test_the_size_of_a_gradient_does_not_matter_to_a_matrix() -> None:
    moved = []
    for scale in (1e-6, 1.0, 1e6):
        weights = nn.Parameter(torch.ones(10, 10))
        weights.grad = scale * torch.randn(10, 10, generator=torch.Generator().manual_seed(0))
        tw.Lars([weights], lr=2.0).step()
        moved.append(float((weights.detach() - 1).norm()))
    assert moved == pytest.approx([2.0 * 0.001 * 10] * 3, rel=1e-3)


def test_a_matrix_of_zeros_moves_and_one_without_gradient_does_not() -> None:
    zeros, idle = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = tw.Lars([zeros, idle], lr=0.1, weight_decay=0.1)
    zeros.grad = torch.ones(2, 2)
    optimizer.step()
    torch.testing.assert_close(zeros.detach(), torch.full((2, 2), -0.1))
    assert torch.equal(idle.detach(), torch.ones(2, 2))


def test_it_goes_on_after_loading() -> None:
    one, other = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3, 2))
    first, second = tw.Lars([one]), tw.Lars([other])
    for step in range(4):
        if step == 2:
            second.load_state_dict(copy.deepcopy(first.state_dict()))
            with torch.no_grad():
                other.copy_(one)
        for weights, optimizer in ((one, first), (other, second)):
            weights.grad = torch.full((3, 2), 1.0 + step)
            optimizer.step()
    assert torch.equal(one, other)


def sharded() -> list[Tensor]:
    """A step on a matrix that two ranks share, and on one that each has whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    world = tw.init()
    mesh = init_device_mesh("cpu", (world.size,))
    torch.manual_seed(0)
    start, slope = torch.randn(4, 3), torch.randn(4, 3)
    whole = nn.Parameter(start.clone())
    parts = nn.Parameter(distribute_tensor(start.clone(), mesh, [Shard(0)]))
    whole.grad, parts.grad = slope, distribute_tensor(slope, mesh, [Shard(0)])
    for weights in (whole, parts):
        tw.Lars([weights], weight_decay=0.1).step()
    return [whole.detach(), parts.full_tensor().detach()]  # type: ignore[attr-defined]


def test_the_norm_of_a_sharded_matrix_is_the_whole_one(ranks: Ranks) -> None:
    for whole, parts in ranks(2, sharded):
        torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("lr", -1.0),
        ("lr", math.nan),
        ("weight_decay", -0.1),
        ("momentum", 1.0),
        ("momentum", -0.1),
        ("trust", 0.0),
    ],
)
def test_bad_settings_are_refused_by_name(setting: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"Lars\({setting}=...\) takes .*, got"):
        tw.Lars([nn.Parameter(torch.zeros(2))], **{setting: value})


def test_a_sparse_gradient_is_refused() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = tw.Lars(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse=False"):
        optimizer.step()

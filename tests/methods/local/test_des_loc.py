"""DES-LOC against a plain sequential version of it: all replicas in one process, no wire."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.conftest import Ranks

STEPS, EVERY = 14, 2
SHAPES = [(3, 4), (5,), (2,)]


def start() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def gradient(weights: list[nn.Parameter], rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    for w in weights:
        w.grad = w.detach() + torch.randn(w.shape, generator=generator)


def adam(weights: list[nn.Parameter]) -> torch.optim.Adam:
    return torch.optim.Adam(weights, lr=0.05)


def oracle(size: int, first: int, second: int) -> list[list[Tensor]]:
    """Every replica's weights after the run."""
    replicas = [start() for _ in range(size)]
    inner = [adam(weights) for weights in replicas]
    for step in range(1, STEPS + 1):
        for rank, weights in enumerate(replicas):
            gradient(weights, rank, step)
            inner[rank].step()
        if step % EVERY:
            continue
        averages = step // EVERY
        meet([[w.data for w in weights] for weights in replicas])
        for name, period in (("exp_avg", first), ("exp_avg_sq", second)):
            if period and averages % period == 0:
                pairs = zip(inner, replicas, strict=True)
                meet([[o.state[w][name] for w in weights] for o, weights in pairs])
    return [[w.detach() for w in weights] for weights in replicas]


def meet(replicas: list[list[Tensor]]) -> None:
    for tensors in zip(*replicas, strict=True):
        mean = torch.stack(tensors).mean(0)
        for tensor in tensors:
            tensor.copy_(mean)


def trained(first: int, second: int, resumed: bool = False) -> tuple[list[Tensor], int]:
    rank = tw.init().rank
    weights = start()
    build = {"every": EVERY, "first_moments": first, "second_moments": second}
    optimizer = tw.DesLoc(adam(weights), **build)
    for step in range(1, STEPS + 1):
        if resumed and step == 6:
            state = copy.deepcopy(optimizer.state_dict())
            weights = [nn.Parameter(w.detach().clone()) for w in weights]
            optimizer = tw.DesLoc(adam(weights), **build)
            optimizer.load_state_dict(state)
        gradient(weights, rank, step)
        optimizer.step()
    own = [w.detach().clone() for w in weights]
    optimizer.finish()
    return own, optimizer.rounds


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize(("size", "first", "second"), [(2, 3, 6), (3, 1, 2), (2, 0, 0)])
def test_it_is_its_oracle(ranks: Ranks, size: int, first: int, second: int, resumed: bool) -> None:
    found = ranks(size, trained, first, second, resumed)
    for (weights, rounds), expected in zip(found, oracle(size, first, second), strict=True):
        assert rounds == STEPS // EVERY
        for ours, theirs in zip(weights, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def one_nan() -> tuple[list[Tensor], int]:
    """A gradient that is not finite, once, on rank 1: its step is left out, nothing spreads."""
    rank = tw.init().rank
    weights = start()
    optimizer = tw.DesLoc(adam(weights), every=EVERY)
    for step in range(1, 9):
        gradient(weights, rank, step)
        if rank == 1 and step == 3:
            weights[0].grad.fill_(torch.nan)  # type: ignore[union-attr]
        optimizer.step()
    optimizer.finish()
    return [w.detach() for w in weights], optimizer.account.skipped


def test_what_is_not_finite_does_not_spread(ranks: Ranks) -> None:
    (ours, skipped), (theirs, also) = ranks(2, one_nan)
    assert (skipped, also) == (0, 1)
    assert all(bool(w.isfinite().all()) for w in ours)
    assert all(map(torch.equal, ours, theirs))


def test_an_inner_optimizer_without_the_moments_is_refused() -> None:
    weights = start()
    optimizer = tw.DesLoc(torch.optim.SGD(weights, lr=0.1), every=1, first_moments=1)
    gradient(weights, 0, 1)
    with pytest.raises(ValueError, match="keeps nothing, and no exp_avg or momentum_buffer"):
        optimizer.step()


@pytest.mark.parametrize(
    ("setting", "value"), [("every", 0), ("first_moments", -1), ("second_moments", 1.5)]
)
def test_bad_settings_are_refused_by_name(setting: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"DesLoc\({setting}=...\) takes"):
        tw.DesLoc(adam(start()), **{setting: value})

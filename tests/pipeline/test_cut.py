"""Cut: an all-to-all whose gradients come back by the way the activations went."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.conftest import Ranks

SHAPE = (40, 30)  # what each rank has for each other: 1200 values


def activations(source: int, target: int, step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * source + target)
    return torch.randn(*SHAPE, generator=generator) ** 3


def weight(target: int) -> Tensor:
    """The loss of rank `target` is the sum of its weight times what it got."""
    return torch.randn(*SHAPE, generator=torch.Generator().manual_seed(500 + target))


def largest(x: Tensor, keep: int) -> Tensor:
    mask = torch.zeros(x.numel(), dtype=torch.bool)
    mask[x.abs().view(-1).topk(keep).indices] = True
    return mask.view_as(x)


def crossing(steps: int, train: bool, settings: dict[str, Any]) -> list[tuple[Tensor, Tensor, int]]:
    """(what arrived, the gradient of what was given, bytes so far) of every step."""
    rank = tw.init().rank
    cut = tw.Cut(**settings).train(train)
    size, seen = cut.wire.size, []
    for step in range(steps):
        x = torch.stack([activations(rank, j, step) for j in range(size)]).requires_grad_()
        out = cut(x)
        (out * weight(rank)).sum().backward()
        assert x.grad is not None
        seen.append((out.detach(), x.grad, cut.account.bytes))
    return seen


@pytest.mark.parametrize("size", [2, 3])
def test_forward_and_backward_equal_the_definition(ranks: Ranks, size: int) -> None:
    settings = {"density": 0.1, "value_bits": 32, "refresh": 1}
    for rank, steps in enumerate(ranks(size, crossing, 3, True, settings)):
        for step, (out, gradient, _) in enumerate(steps):
            for peer in range(size):
                x = activations(peer, rank, step)
                mask = torch.ones(SHAPE) if peer == rank else largest(x, 120)
                torch.testing.assert_close(out[peer], x * mask)
                x = activations(rank, peer, step)
                mask = torch.ones(SHAPE) if peer == rank else largest(x, 120)
                torch.testing.assert_close(gradient[peer], weight(peer) * mask / size)


def test_no_places_travel_back_and_the_bytes_are_counted(ranks: Ranks) -> None:
    settings = {"density": 0.1, "value_bits": 8}
    for steps in ranks(3, crossing, 2, True, settings):
        blocks = -(-1200 // 256)
        there = 4 + blocks + 120 + 120  # the range, the places, the values
        back = 4 + 120
        assert [sent for _, _, sent in steps] == [2 * (there + back), 4 * (there + back)]
    dense = 2 * 2 * 4 * 1200
    assert dense / (2 * (there + back)) > 20


def test_a_second_threshold_thins_the_gradients(ranks: Ranks) -> None:
    settings = {"density": 0.5, "value_bits": 32, "refresh": 1, "gradient_density": 0.5}
    for rank, steps in enumerate(ranks(2, crossing, 1, True, settings)):
        (_, gradient, _), other = steps[0], 1 - rank
        may_return = weight(other) * largest(activations(rank, other), 600)
        expected = may_return * largest(may_return, 300) / 2
        torch.testing.assert_close(gradient[other], expected)


def test_eval_mode_is_exact(ranks: Ranks) -> None:
    for rank, steps in enumerate(ranks(2, crossing, 1, False, {"density": 0.01})):
        out, gradient, _ = steps[0]
        assert torch.equal(out[1 - rank], activations(1 - rank, rank))
        torch.testing.assert_close(gradient[1 - rank], weight(1 - rank) / 2)


def thresholds_last() -> tuple[list[float], bool]:
    """Shares that crossed under a threshold that is found rarely; then a state that is loaded."""
    rank = tw.init().rank
    cut = tw.Cut(density=0.1, refresh=1000)
    shares = []
    for step in range(12):
        x = torch.stack([activations(rank, j, step) for j in range(2)]) * (1 + step)
        out = cut(x.requires_grad_())
        shares.append(float((out[1 - rank] != 0).float().mean()))
    again = tw.Cut(density=0.1, refresh=1000)
    again.load_state_dict(cut.state_dict())
    x = torch.stack([activations(rank, j, 99) for j in range(2)]).requires_grad_()
    return shares, torch.equal(cut(x), again(x))


def test_the_share_is_held_and_a_loaded_cut_goes_on(ranks: Ranks) -> None:
    for shares, same in ranks(2, thresholds_last):
        assert all(0.05 <= share <= 0.1001 for share in shares)
        assert same


def broken() -> bool:
    rank = tw.init().rank
    cut = tw.Cut(density=0.1)
    x = torch.stack([activations(rank, j) for j in range(2)])
    if rank == 0:
        x[1, 3, 3] = float("nan")
    out = cut(x.requires_grad_())
    out.sum().backward()
    assert x.grad is not None
    return bool(out[1 - rank].isfinite().all())


def test_what_is_not_finite_arrives_as_such(ranks: Ranks) -> None:
    theirs, ours = ranks(2, broken)
    assert theirs
    assert not ours


class Small(nn.Module):
    def __init__(self, cut: tw.Cut) -> None:
        super().__init__()
        self.cut = cut


def test_alone_it_is_the_identity_and_bad_settings_are_refused() -> None:
    cut = tw.Cut(density=0.5)
    x = torch.randn(1, 4, 3, requires_grad=True)
    assert torch.equal(cut(x), x)
    assert "cut._extra_state" in Small(cut).state_dict()
    for settings, message in [
        ({"density": 0.0}, r"Cut\(density=...\) takes a number in \(0, 1\], got 0.0"),
        ({"density": 1.1}, r"Cut\(density=...\) takes a number in \(0, 1\], got 1.1"),
        ({"gradient_density": -1}, r"Cut\(gradient_density=...\) takes a number in \(0, 1\]"),
        ({"refresh": 0}, r"Cut\(refresh=...\) takes a whole number >= 1, got 0"),
        ({"value_bits": 5}, r"Cut\(value_bits=...\) takes one of 1, 2, 4"),
    ]:
        with pytest.raises(ValueError, match=message):
            tw.Cut(**settings)
    with pytest.raises(ValueError, match=r"floats of shape \(1 ranks, ...\), got torch.int64"):
        cut(torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"floats of shape \(1 ranks, ...\)"):
        cut(torch.zeros(2, 2))

"""0/1 Adam on real ranks against the oracle, and what its local steps promise."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.conftest import Ranks
from tests.methods.onebit import one_bit_oracle as oracle
from tests.methods.onebit.one_bit_oracle import SHAPES
from thinwire.wire.agreement import digest

LR = 0.02
SMALL = {"lr": LR, "double_after": 2, "local_double_after": 3, "longest": 4, "freeze_at": 9}


def weights_after(size: int, steps: int, settings: dict[str, Any]) -> list[Tensor]:
    weights, _ = oracle.run(tw.ZeroOneAdam, size, steps, **settings)
    return [w.detach() for w in weights]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("steps", "decay"), [(6, 0.0), (9, 0.1), (12, 0.0), (16, 0.1)])
def test_every_part_equals_the_oracle(ranks: Ranks, size: int, steps: int, decay: float) -> None:
    """Learning v (to step 9, refreshes at 1, 2, 4, 6, 10, ...), then rounds of 1, 1, 1, 2, 2, 4."""
    answers = ranks(size, weights_after, size, steps, SMALL | {"weight_decay": decay})
    start, gradient = oracle.problem(size, SHAPES)
    order = [2, 1, 0]  # of the bucket, when no backward pass has told another

    def reordered(rank: int, step: int, x: list[Tensor]) -> list[Tensor]:
        back = [x[order.index(i)] for i in range(3)]
        return [gradient(rank, step, back)[i] for i in order]

    expected = oracle.zero_one(
        [start[i] for i in order], reordered, size, steps, LR, 9, 2, 3, 4, lam=decay
    )
    for weights, wanted in zip(answers, expected, strict=True):
        for i, each in zip(order, wanted, strict=True):
            torch.testing.assert_close(weights[i].double(), each, rtol=1e-4, atol=1e-5)


def traffic(steps: int) -> tuple[list[bool], list[bytes], bytes, bytes, bytes]:
    """Which steps sent anything; digests of each step, in consensus, after it and after finish."""
    rank = tw.init().rank
    start, gradient = oracle.problem(2, SHAPES)
    weights = [nn.Parameter(t.float()) for t in start]
    optimizer = tw.ZeroOneAdam(weights, **SMALL)
    sent, states = [], []
    for step in range(1, steps + 1):
        before = optimizer.account.bytes
        oracle.advance(optimizer, weights, gradient, rank, step, step)
        sent.append(optimizer.account.bytes > before)
        states.append(digest(weights))
    with optimizer.consensus():
        inside = digest(weights)
    after = digest(weights)
    optimizer.finish()
    return sent, states, inside, after, digest(weights)


def test_local_steps_send_nothing_and_replicas_meet_at_exchanges(ranks: Ranks) -> None:
    one, other = ranks(2, traffic, 21)
    assert one[0] == other[0]
    assert one[0][:9] == [True] * 9
    #      exchanges at steps 10, 11, 12, 14, 16 and 20 (spacing 1, 1, 1, 2, 2, 4)
    exchanged = [step in (10, 11, 12, 14, 16, 20) for step in range(10, 22)]
    assert one[0][9:] == exchanged
    same = [a == b for a, b in zip(one[1], other[1], strict=True)]
    assert same == [True] * 9 + one[0][9:]
    assert one[2] == other[2], "the consensus"
    assert one[3] == one[1][-1] != other[3], "and each its own after it"
    assert one[4] == other[4], "finished"


def poisoned() -> tuple[bool, int, bytes]:
    weights, optimizer = oracle.run(tw.ZeroOneAdam, 2, 16, **SMALL)
    _, gradient = oracle.problem(2, SHAPES)
    for w in weights:
        w.grad = torch.full_like(w, math.nan if optimizer.wire.rank else 1.0)
    optimizer.step()
    skipped = optimizer.account.skipped
    oracle.advance(optimizer, weights, gradient, optimizer.wire.rank, 18, 20)
    finite = all(bool(w.isfinite().all()) for w in weights)
    return finite, skipped, digest(weights)


def test_a_bad_local_gradient_is_left_out_and_replicas_still_meet(ranks: Ranks) -> None:
    (good, none, one), (fine, skipped, other) = ranks(2, poisoned)
    assert good
    assert fine
    assert (none, skipped) == (0, 1)
    assert one == other


def resumed(stop: int, end: int) -> bool:
    weights, optimizer = oracle.run(tw.ZeroOneAdam, 2, stop, **SMALL)
    _, gradient = oracle.problem(2, SHAPES)
    state = copy.deepcopy(optimizer.state_dict())
    again = [nn.Parameter(w.detach().clone()) for w in weights]
    second = tw.ZeroOneAdam(again, **SMALL)
    second.load_state_dict(state)
    rank = optimizer.wire.rank
    oracle.advance(optimizer, weights, gradient, rank, stop + 1, end)
    oracle.advance(second, again, gradient, rank, stop + 1, end)
    return all(map(torch.equal, weights, again))


@pytest.mark.parametrize("stop", [5, 9, 14])
def test_a_saved_run_goes_on_bit_for_bit(ranks: Ranks, stop: int) -> None:
    assert ranks(2, resumed, stop, 20) == [True, True]


def parted(size: int, stop: int) -> tuple[Any, list[Tensor], list[Tensor], list[Tensor], bool]:
    """The portable state, this replica's weights, those of all together, and its U and m."""
    weights, optimizer = oracle.run(tw.ZeroOneAdam, size, stop, **SMALL)
    own = [w.detach().clone() for w in weights]
    with optimizer.consensus():
        mean = [w.detach().clone() for w in weights]
    held = [optimizer.buckets[0].moments[name].clone() for name in ("update", "exp_avg")]
    return optimizer.portable_state_dict(), own, mean, held, optimizer.apart


def taken_up(state: Any, mean: list[Tensor], stop: int, end: int) -> Any:
    rank = tw.init().rank
    _, gradient = oracle.problem(tw.Wire().size, SHAPES)
    weights = [nn.Parameter(w.clone()) for w in mean]
    optimizer = tw.ZeroOneAdam(weights, **SMALL)
    optimizer.load_state_dict(state)
    held = [optimizer.buckets[0].moments[name].clone() for name in ("update", "exp_avg")]
    oracle.advance(optimizer, weights, gradient, rank, stop + 1, end)
    return held, optimizer.portable_state_dict()["errors"], [w.detach() for w in weights]


def test_another_number_of_workers_goes_on_from_the_means(ranks: Ranks) -> None:
    """Saved after step 18, two steps into a round of four; the exchange comes at step 20."""
    saved = ranks(2, parted, 2, 18)
    state, _, mean, _, apart = saved[0]
    assert apart
    assert not torch.equal(saved[0][1][0], saved[1][1][0]), "replicas differ"
    for answers in (
        ranks(1, taken_up, state, mean, 18, 18),
        ranks(3, taken_up, state, mean, 18, 18),
    ):
        for held, errors, _ in answers:
            for now, one, other in zip(held, saved[0][3], saved[1][3], strict=True):
                torch.testing.assert_close(now, (one + other) / 2)
            torch.testing.assert_close(errors, state["errors"])
    for got in (ranks(3, taken_up, state, mean, 18, 20), ranks(2, taken_up, state, mean, 18, 20)):
        assert all(map(torch.equal, got[0][2], got[-1][2])), "they meet at the exchange"
        assert all(bool(w.isfinite().all()) for w in got[0][2])


def test_the_mean_of_the_weights_is_that_of_the_updates(ranks: Ranks) -> None:
    """x = anchor - U / (sqrt(v) + eps) for the means, as for each replica."""
    state, _, mean, _, _ = ranks(2, parted, 2, 18)[0]
    for index, weights in enumerate(mean):
        kept = state["state"][index]
        from_means = kept["anchor"] - kept["update"] / (kept["exp_avg_sq"].sqrt() + 1e-8)
        torch.testing.assert_close(from_means, weights, rtol=1e-5, atol=1e-6)


def test_bad_settings() -> None:
    weights = nn.Parameter(torch.zeros(2))
    for setting in ("double_after", "local_double_after", "longest"):
        with pytest.raises(ValueError, match=rf"ZeroOneAdam\({setting}=...\) takes a whole number"):
            tw.ZeroOneAdam([weights], **{setting: 0})
    with pytest.raises(ValueError, match=r"compress=False\): local steps send nothing"):
        tw.ZeroOneAdam([{"params": [weights], "compress": False}])

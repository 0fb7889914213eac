"""The traps of the forerunner, one by one: what holds here fails with its behaviour put back.

Every `trap` runs on two ranks, once as it is and once with the naive version, in one launch.
"""

import copy
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.conftest import Ranks
from tests.methods.onebit import one_bit_oracle as oracle
from tests.methods.onebit.one_bit_oracle import SHAPES
from thinwire.methods.onebit import one_bit_lamb
from thinwire.methods.onebit.clipping import Clipping, squared_norm
from thinwire.methods.onebit.moments import MomentBucket
from thinwire.methods.onebit.one_bit_adam import AdamRule
from thinwire.methods.onebit.one_bit_lamb import LambRule
from thinwire.methods.onebit.store import MomentStore
from thinwire.methods.onebit.two_stages import TwoStages
from thinwire.methods.overlap.reducer import GradientReducer

LR = 0.02


def both(run: Callable[[], Any], *patches: Any) -> tuple[Any, Any]:
    """(as it is, with the naive version)"""
    tw.init()
    as_it_is = run()
    for patch in patches:
        patch.start()
    naive = run()
    mock.patch.stopall()
    return as_it_is, naive


def noise(step: int, shape: tuple[int, ...]) -> Tensor:
    seed = 2 * step + tw.init().rank
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# 1. A value that saw no gradient before the freeze has v = 0: divided by sqrt(v) its share of the
#    one-bit noise grows without limit. (Whitened noise has the size of a step, floor or not.)


def unseen_rows(floor: float = 0.01) -> tuple[float, float]:
    torch.manual_seed(0)
    table = nn.Parameter(torch.randn(32, 8))
    optimizer = tw.OneBitAdam([table], lr=0.01, freeze_at=10, whiten=False, floor=floor)
    start = table.detach().clone()
    for step in range(40):
        table.grad = torch.zeros(32, 8)
        table.grad[:4] = noise(step, (4, 8)) + table.detach()[:4]
        optimizer.step()
    moved = (table.detach() - start).abs()
    return float(moved[4:].max()), float(moved[:4].max())


def floor_trap() -> Any:
    tw.init()
    return unseen_rows(), unseen_rows(floor=0.0)


def rows_stay(answer: tuple[float, float]) -> bool:
    unseen, seen = answer
    return unseen < 1.0 and seen > 0.01


# 2. A tensor without momentum at the freeze has no size to be scaled by.


def still_tensor() -> tuple[float, float]:
    """One whose gradient is zero until the freeze, an empty one, and one that moves."""
    still, moving = nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(16))
    optimizer = tw.OneBitLamb([still, nn.Parameter(torch.ones(0)), moving], lr=LR, freeze_at=5)
    after = moving.detach().clone()
    for step in range(12):
        still.grad, moving.grad = torch.zeros(16), noise(step, (16,))
        optimizer.step()
        if step == 4:
            after = moving.detach().clone()
    return float((still.detach() - 1).abs().max()), float((moving.detach() - after).abs().max())


def momentum_trap() -> Any:
    def divided(sizes: Tensor) -> Tensor:
        return sizes.mean() / sizes

    return both(still_tensor, mock.patch.object(one_bit_lamb, "equalising", divided))


def all_go_on(answer: tuple[float, float]) -> bool:
    still, moved = answer
    return still < 5 and 0 < moved < 5


# 3. An average of coefficients that starts from 0 and leaves out a c of exactly 1.


def unit_coefficient() -> float:
    zeros = nn.Parameter(torch.zeros(16))  # no norm: c is 1 in the first step
    optimizer = tw.OneBitLamb([zeros], lr=LR, freeze_at=1)
    for _ in range(2):
        before = zeros.detach().clone()
        zeros.grad = torch.ones(16)
        optimizer.step()
    return float((zeros.detach() - before).abs().max())


def coefficient_trap() -> Any:
    def skipping_ones(self: Any, bucket: MomentBucket, directions: list[Tensor]) -> None:
        c = self._coefficients(bucket, directions)
        average = bucket.scalar("coefficient", 0.0)
        average.copy_(torch.where(c == 1.0, average, average.lerp(c, 1 - self._b3)))
        self._shift(bucket, directions, c)

    return both(unit_coefficient, mock.patch.object(LambRule, "_move_dense", skipping_ones))


def it_moves(moved: float) -> bool:
    return moved > 0.5 * LR


# 4. Each rank clips by its own norm: all get the same length, and the mean another direction.


def clipped_payloads() -> tuple[float, float]:
    weights, optimizer = oracle.run(tw.OneBitAdam, 2, 4, lr=LR, freeze_at=4, clip=1.0)
    size = 3.0 if optimizer.wire.rank else 1.0
    for w in weights:
        w.grad = torch.full_like(w, size)
    sent: list[Tensor] = []
    with mock.patch.object(
        AdamRule, "payload", lambda self, bucket: sent.append(bucket.buffer.clone())
    ):
        optimizer.step()
    return size, float(torch.cat(sent).norm())


def clip_trap() -> Any:
    def own_norm(self: Any) -> None:
        norm = math.sqrt(squared_norm([p.grad for p in self._session.parameters]))
        self.factor = min(1.0, self.clip / norm)

    return both(clipped_payloads, mock.patch.object(Clipping, "measure", own_norm))


def in_proportion(answers: list[tuple[float, float]]) -> bool:
    (one, small), (three, large) = answers
    return large / small == pytest.approx(three / one)


# 5. The first step is a dry run, in which buffers are made and nothing is learnt.


def first_step() -> float:
    """How far it is from AdamW's first step with the mean gradient."""
    start, gradient = oracle.problem(2, SHAPES)
    weights, _ = oracle.run(tw.OneBitAdam, 2, 1, lr=LR)
    ours = [w.detach() for w in weights]
    plain = [nn.Parameter(t.float()) for t in start]
    for i, w in enumerate(plain):
        w.grad = sum(gradient(rank, 1, start)[i] for rank in range(2)).div(2).float()
    torch.optim.AdamW(plain, lr=LR, weight_decay=0).step()
    return max(float((a - b.detach()).abs().max()) for a, b in zip(ours, plain, strict=True))


def dry_run_trap() -> Any:
    step = TwoStages.step

    def dry(self: Any) -> None:
        if self.buckets:
            step(self)
        else:
            self.reducer.begin()

    return both(first_step, mock.patch.object(TwoStages, "step", dry))


def like_adamw(distance: float) -> bool:
    return distance < 1e-5


# 6. Each rank looks at its own gradients: one skips, the others step with its NaN.


def overflow() -> tuple[int, bool, bool]:
    weights, optimizer = oracle.run(tw.OneBitAdam, 2, 5, lr=LR, freeze_at=3)
    before = [w.detach().clone() for w in weights]
    for w in weights:
        w.grad = torch.full_like(w, math.nan if optimizer.wire.rank else 1.0)
    optimizer.step()
    kept = all(map(torch.equal, before, weights))
    return optimizer.steps, kept, all(bool(w.isfinite().all()) for w in weights)


def overflow_trap() -> Any:
    def own_gradients(self: Any, finite: bool) -> bool:
        return all(bool(p.grad.isfinite().all()) for p in self.session.parameters)

    return both(overflow, mock.patch.object(TwoStages, "agreed", own_gradients))


def skipped_by_all(answers: list[tuple[int, bool, bool]]) -> bool:
    return answers == [(5, True, True)] * 2


# 7. Errors start from zeros when a checkpoint is loaded.


def resumed() -> tuple[bool, float]:
    """Whether it goes on bit for bit; how much of the portable errors is lost by loading them."""
    weights, optimizer = oracle.run(tw.OneBitAdam, 2, 8, lr=LR, freeze_at=4, bucket_mb=1e-5)
    own, portable = copy.deepcopy(optimizer.state_dict()), optimizer.portable_state_dict()
    again = [nn.Parameter(w.detach().clone()) for w in weights]
    second = tw.OneBitAdam(again, lr=LR, freeze_at=4, bucket_mb=1e-5)
    second.load_state_dict(portable)
    lost = 0.0
    for before, after in zip(
        portable["errors"], second.engine.store.portable_errors(), strict=True
    ):
        for side in ("worker", "owner"):
            here = torch.zeros(()) if after[side] is None else after[side]
            lost = max(lost, float((before[side] - here).abs().max()))
    second.load_state_dict(own)
    _, gradient = oracle.problem(2, SHAPES)
    for each, now in ((optimizer, weights), (second, again)):
        oracle.advance(each, now, gradient, optimizer.wire.rank, 9, 12)
    return all(map(torch.equal, weights, again)), lost


def reset_trap() -> Any:
    def reset(self: Any, errors: Any, *, ranks: Any) -> None:
        pass

    return both(resumed, mock.patch.object(MomentStore, "load_errors", reset))


def goes_on(answer: tuple[bool, float]) -> bool:
    same, lost = answer
    return same and lost < 1e-6


# 8. One exchange for every tensor: a small one costs the link's delay like a large one.


def exchanges() -> tuple[int, int]:
    weights, optimizer = oracle.run(tw.OneBitAdam, 2, 4, lr=LR, freeze_at=3)
    before = optimizer.account.transfers
    _, gradient = oracle.problem(2, SHAPES)
    oracle.advance(optimizer, weights, gradient, optimizer.wire.rank, 5, 5)
    return optimizer.account.transfers - before, len(weights)


def latency_trap() -> Any:
    arrange = GradientReducer.arrange

    def one_by_one(self: Any, order: Any) -> None:
        self.bucket_mb = 1e-9
        arrange(self, order)

    return both(exchanges, mock.patch.object(GradientReducer, "arrange", one_by_one))


def together(answer: tuple[int, int]) -> bool:
    return answer[0] == 2 < answer[1]  # the mean, and which tensors are used


@pytest.mark.parametrize(
    ("trap", "holds"),
    [
        (floor_trap, rows_stay),
        (momentum_trap, all_go_on),
        (coefficient_trap, it_moves),
        (dry_run_trap, like_adamw),
        (reset_trap, goes_on),
        (latency_trap, together),
    ],
)
def test_it_holds_on_every_rank_and_naively_on_none(
    ranks: Ranks, trap: Callable[[], Any], holds: Callable[[Any], bool]
) -> None:
    for as_it_is, naive in ranks(2, trap):
        assert holds(as_it_is), as_it_is
        assert not holds(naive), naive


@pytest.mark.parametrize(
    ("trap", "holds"), [(clip_trap, in_proportion), (overflow_trap, skipped_by_all)]
)
def test_it_holds_among_the_ranks_and_naively_it_does_not(
    ranks: Ranks, trap: Callable[[], Any], holds: Callable[[list[Any]], bool]
) -> None:
    answers = ranks(2, trap)
    assert holds([as_it_is for as_it_is, _ in answers])
    assert not holds([naive for _, naive in answers])

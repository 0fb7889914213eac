"""State spread over the ranks: against its oracle, in memory, in traffic and in checkpoints."""

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
from thinwire.wire.codecs import Dense, Int8

LR, FREEZE = 0.02, 6
KINDS = {"adam": "OneBitAdam", "lamb": "OneBitLamb"}
ORDER = [2, 1, 0]  # of the bucket, when no backward pass has told another


def trained(kind: str, size: int, steps: int, settings: dict[str, Any]) -> Any:
    settings = {"lr": LR, "freeze_at": FREEZE, "shard_state": True} | settings
    weights, optimizer = oracle.run(getattr(tw, KINDS[kind]), size, steps, **settings)
    held = sum(m.numel() for b in optimizer.buckets for m in b.moments.values())
    owner = [b.feedback.owner.error for b in optimizer.buckets]
    kept = sum(e.numel() for e in owner if e is not None)
    return [w.detach() for w in weights], held, kept, optimizer.account.bytes


def expected(kind: str, size: int, steps: int, **settings: Any) -> list[Tensor]:
    start, gradient = oracle.problem(size, SHAPES)

    def reordered(rank: int, step: int, x: list[Tensor]) -> list[Tensor]:
        given = gradient(rank, step, [x[ORDER.index(i)] for i in range(3)])
        return [given[i] for i in ORDER]

    x = oracle.sharded(
        kind, [start[i] for i in ORDER], reordered, size, steps, LR, FREEZE, **settings
    )
    return [x[ORDER.index(i)] for i in range(3)]


@pytest.mark.parametrize("kind", ["adam", "lamb"])
@pytest.mark.parametrize(("size", "decay"), [(1, 0.1), (2, 0.0), (3, 0.1)])
def test_both_stages_equal_the_oracle(ranks: Ranks, kind: str, size: int, decay: float) -> None:
    answers = ranks(size, trained, kind, size, 9, {"weight_decay": decay})
    for weights, *_ in answers:
        for got, wanted in zip(weights, expected(kind, size, 9, lam=decay), strict=True):
            torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-5)
        assert all(map(torch.equal, weights, answers[0][0])), "replicas hold the same bits"


@pytest.mark.parametrize(("kind", "moments"), [("adam", 2), ("lamb", 3)])
def test_a_rank_keeps_its_share_of_the_state_and_sends_what_it_did(
    ranks: Ranks, kind: str, moments: int
) -> None:
    size, numel = 3, sum(math.prod(shape) for shape in SHAPES)
    part = math.ceil(numel / (8 * size)) * 8
    shards = ranks(size, trained, kind, size, 9, {})
    whole = ranks(size, trained, kind, size, 9, {"shard_state": False})
    for rank, ((_, held, owner, _), (_, all_held, same, _)) in enumerate(
        zip(shards, whole, strict=True)
    ):
        own = max(0, min(part, numel - rank * part))
        assert held == moments * own
        assert all_held == moments * numel
        assert owner == same == own
    if kind == "adam":
        verdicts = 2 * (size - 1) * 16 // size * FREEZE
        freeze = 2 * (size - 1) * 8 * len(SHAPES) // size
        dense = 2 * (size - 1) * 4 * part * FREEZE - 2 * (size - 1) * 4 * numel // size * FREEZE
        for one, other in zip(shards, whole, strict=True):
            assert one[3] - other[3] == verdicts + freeze + dense


def bits(overlap: bool, settings: dict[str, Any]) -> tuple[int, int, list[int], bytes]:
    """Traffic of one compressed step of a net."""
    rank = tw.init().rank
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 1))
    optimizer = tw.OneBitAdam(
        net.parameters(),
        lr=1e-2,
        freeze_at=3,
        bucket_mb=1e-4,
        overlap=overlap,
        shard_state=True,
        **settings,
    )
    sent = transfers = 0
    for step in range(8):
        sent, transfers = optimizer.account.bytes, optimizer.account.transfers
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        (net(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return (
        optimizer.account.bytes - sent,
        optimizer.account.transfers - transfers,
        [bucket.flat.numel for bucket in optimizer.buckets],
        tw.wire.agreement.digest(net.parameters()),
    )


def test_the_compressed_stage_sends_exactly_its_bits_behind_the_backward_pass(ranks: Ranks) -> None:
    size = 2
    answers = ranks(size, bits, True, {})
    for sent, transfers, buckets, _ in answers:
        padded = [math.ceil(n / (8 * size)) * 8 * size for n in buckets]
        assert len(buckets) > 1
        assert transfers == len(buckets) + 1  # and which of the 6 tensors are used
        payloads = sum(2 * (size - 1) * p // (8 * size) + 8 * (size - 1) for p in padded)
        assert sent == payloads + (size - 1) * 6
    late = ranks(size, bits, False, {})
    assert len({digest for *_, digest in [*answers, *late]}) == 1


def toy(shard: bool, steps: int, lr: float, freeze_at: int, kind: str) -> float:
    """The loss after a regression of which each rank sees its own noisy share."""
    rank = tw.init().rank
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 4))
    target = torch.randn(12, 4, generator=torch.Generator().manual_seed(2))
    optimizer = getattr(tw, kind)(net.parameters(), freeze_at=freeze_at, shard_state=shard)
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(32, 12, generator=generator)
        noise = 0.3 * torch.randn(32, 4, generator=generator)
        (net(x) - torch.tanh(x @ target) - noise).square().mean().backward()
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 - step / steps)
        optimizer.step()
        optimizer.zero_grad()
    x = torch.randn(2000, 12, generator=torch.Generator().manual_seed(99))
    return float((net(x) - torch.tanh(x @ target)).square().mean().detach())


def test_it_learns_as_well_as_the_whole_state(ranks: Ranks) -> None:
    start = toy(False, 0, 1e-2, 60, "OneBitAdam")
    (shards, *_), (whole, *_) = (
        ranks(2, toy, shard, 300, 1e-2, 60, "OneBitAdam") for shard in (True, False)
    )
    assert whole < 0.1 * start
    assert shards < 1.05 * whole


def poisoned(stage: str) -> tuple[bool, bool, int, int]:
    freeze = 3 if stage == "compressed" else 99
    weights, optimizer = oracle.run(
        tw.OneBitLamb, 2, 5, lr=LR, freeze_at=freeze, bucket_mb=1e-5, shard_state=True
    )
    before = copy.deepcopy(optimizer.state_dict())
    old = [w.detach().clone() for w in weights]
    for i, w in enumerate(weights):
        w.grad = torch.ones_like(w)
        if optimizer.wire.rank == 1 and i == 0:  # a value that rank 0 owns
            w.grad.view(-1)[0] = math.nan
    optimizer.step()
    same = _equal(before, optimizer.state_dict())
    return same, all(map(torch.equal, old, weights)), optimizer.account.skipped, optimizer.steps


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)


@pytest.mark.parametrize("stage", ["warm-up", "compressed"])
def test_a_bad_value_that_one_owner_sees_skips_the_step_on_all(ranks: Ranks, stage: str) -> None:
    assert ranks(2, poisoned, stage) == [(True, True, 1, 5)] * 2


def clipped(shard: bool) -> tuple[list[Tensor], float]:
    weights, optimizer = oracle.run(
        tw.OneBitAdam, 2, 5, lr=LR, freeze_at=99, clip=0.5, bucket_mb=1e-5, shard_state=shard
    )
    return [w.detach() for w in weights], optimizer.grad_norm


def test_the_warm_up_clips_by_the_norm_of_all_parts(ranks: Ranks) -> None:
    whole = ranks(2, clipped, False)
    for (weights, norm), (wanted, other) in zip(ranks(2, clipped, True), whole, strict=True):
        assert norm == pytest.approx(other)
        torch.testing.assert_close(weights, wanted, rtol=1e-5, atol=1e-6)


def mixed() -> tuple[bool, list[bool], list[int]]:
    """A dense group, a parameter that is never used and one that is used late, in bfloat16."""
    rank = tw.init().rank
    dense, used, unused, rare = (nn.Parameter(torch.ones(9)) for _ in range(4))
    optimizer = tw.OneBitAdam(
        [{"params": [dense], "compress": False}, {"params": [used, unused, rare]}],
        lr=LR,
        weight_decay=0.1,
        freeze_at=4,
        dense=Dense(torch.bfloat16),
        clip=0.5,
        shard_state=True,
    )
    for step in range(8):
        generator = torch.Generator().manual_seed(2 * step + rank)
        used.grad, dense.grad = torch.randn(9, generator=generator), torch.ones(9)
        rare.grad = torch.ones(9) if rank == 1 and step >= 2 else None
        optimizer.step()
    moved = [not torch.equal(p, torch.ones(9)) for p in (dense, used, rare)]
    return torch.equal(unused, torch.ones(9)), moved, [b.flat.numel for b in optimizer.buckets]


def test_groups_that_stay_dense_and_unused_parameters(ranks: Ranks) -> None:
    for alone, moved, sizes in ranks(2, mixed):
        assert alone
        assert moved == [True] * 3
        assert sorted(sizes) == [9, 9, 9], "one bucket more for a parameter that came later"


def saved(kind: str, size: int, steps: int) -> tuple[Any, Any, list[Tensor]]:
    weights, optimizer = oracle.run(
        getattr(tw, KINDS[kind]),
        size,
        steps,
        lr=LR,
        freeze_at=4,
        bucket_mb=1e-5,
        shard_state=True,
    )
    own, portable = copy.deepcopy(optimizer.state_dict()), optimizer.portable_state_dict()
    return own, portable, [w.detach() for w in weights]


def resumed(kind: str, states: list[Any], now: list[Tensor], first: int, last: int) -> Any:
    rank = tw.init().rank
    _, gradient = oracle.problem(tw.Wire().size, SHAPES)
    weights = [nn.Parameter(w.clone()) for w in now]
    optimizer = getattr(tw, KINDS[kind])(
        weights, lr=LR, freeze_at=4, bucket_mb=1e-5, shard_state=True
    )
    optimizer.load_state_dict(states[rank % len(states)])
    loaded = optimizer.portable_state_dict()
    oracle.advance(optimizer, weights, gradient, rank, first + 1, last)
    return [w.detach() for w in weights], loaded


@pytest.mark.parametrize("kind", ["adam", "lamb"])
def test_a_saved_run_goes_on_bit_for_bit(ranks: Ranks, kind: str) -> None:
    states = ranks(2, saved, kind, 2, 8)
    straight = ranks(2, saved, kind, 2, 12)[0][2]
    for weights, _ in ranks(2, resumed, kind, [own for own, *_ in states], states[0][2], 8, 12):
        assert all(map(torch.equal, weights, straight))


@pytest.mark.parametrize(("size", "stop"), [(1, 8), (4, 8), (2, 2)])
def test_a_run_goes_on_on_another_number_of_ranks(ranks: Ranks, size: int, stop: int) -> None:
    states = ranks(3, saved, "lamb", 3, stop)
    portable = states[0][1]
    assert all(_equal(portable, each) for _, each, _ in states)
    answers = ranks(size, resumed, "lamb", [portable], states[0][2], stop, 12)
    for weights, loaded in answers:
        torch.testing.assert_close(loaded["state"], portable["state"])
        torch.testing.assert_close(loaded["errors"], portable["errors"])
        assert all(map(torch.equal, weights, answers[0][0]))
        assert all(bool(w.isfinite().all()) for w in weights)


def test_the_state_of_a_warm_up_may_change_its_place_and_a_frozen_one_may_not() -> None:
    for steps, fits in ((2, True), (6, False)):
        weights, optimizer = oracle.run(tw.OneBitAdam, 1, steps, lr=LR, freeze_at=4)
        again = tw.OneBitAdam(weights, lr=LR, freeze_at=4, shard_state=True)
        if fits:
            again.load_state_dict(optimizer.state_dict())
            assert torch.equal(again.buckets[0].v, optimizer.buckets[0].v)
        else:
            with pytest.raises(
                ValueError, match=r"saved with shard_state=False after the variance"
            ):
                again.load_state_dict(optimizer.state_dict())


def test_bad_settings() -> None:
    weights = [nn.Parameter(torch.zeros(2))]
    with pytest.raises(ValueError, match=r"takes Dense\(...\) there, got Int8"):
        tw.OneBitAdam(weights, shard_state=True, dense=Int8())
    for setting in ({"shard_state": True}, {"inside": None}):
        with pytest.raises(TypeError, match=r"shard_state|inside"):  # replicas need all of m and v
            tw.ZeroOneAdam(weights, **setting)  # type: ignore[arg-type]

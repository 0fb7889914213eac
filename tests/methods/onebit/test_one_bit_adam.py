"""1-bit Adam on real ranks against the oracle, AdamW and its promises."""

import copy
import inspect
import itertools
import math
import statistics
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.conftest import Ranks
from tests.methods.onebit import one_bit_oracle as oracle
from tests.methods.onebit.one_bit_oracle import SHAPES
from thinwire.methods.onebit.variance_level import VarianceLevel
from thinwire.wire.codecs import Dense

LR = 0.02


def adam(size: int, steps: int, **settings: Any) -> tuple[list[Tensor], dict[str, Any]]:
    weights, optimizer = oracle.run(tw.OneBitAdam, size, steps, lr=LR, **settings)
    return [w.detach() for w in weights], optimizer.account.snapshot()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    ("decay", "correct", "whiten"), [(0.0, True, True), (0.1, False, True), (0.1, True, False)]
)
def test_both_stages_equal_the_oracle(
    ranks: Ranks, size: int, decay: float, correct: bool, whiten: bool
) -> None:
    # Few steps after the freeze: rounding may flip a sign on the edge, and then the runs part.
    answers = ranks(size, _both, size, 9, decay, correct, whiten)
    start, gradient = oracle.problem(size, SHAPES)
    # Buckets hold the tensors in reverse order when no backward pass has told another.
    order = [2, 1, 0]

    def reordered(rank: int, step: int, x: list[Tensor]) -> list[Tensor]:
        back = [x[order.index(i)] for i in range(3)]
        return [gradient(rank, step, back)[i] for i in order]

    settings = {"lam": decay, "correct": correct, "whiten": whiten, "forget": whiten}
    expected = oracle.adam([start[i] for i in order], reordered, size, 9, LR, 6, **settings)
    for weights, _ in answers:
        for i, wanted in zip(order, expected, strict=True):
            torch.testing.assert_close(weights[i].double(), wanted, rtol=1e-4, atol=1e-5)
        assert all(map(torch.equal, weights, answers[0][0])), "replicas hold the same bits"


def _both(size: int, steps: int, decay: float, correct: bool, whiten: bool) -> Any:
    settings = {"weight_decay": decay, "bias_correction": correct, "whiten": whiten}
    settings["forget"] = whiten
    return adam(size, steps, freeze_at=6, **settings)


def _off(whiten: bool, freeze_at: int) -> float:
    """Half of the values have an eighth of the others' gradients: how far they are off in the end,
    squared."""
    tw.init()
    x, half, steps = nn.Parameter(torch.ones(64)), 32, 800
    optimizer = tw.OneBitAdam([x], lr=5e-3, freeze_at=freeze_at, whiten=whiten, forget=False)
    curvature = torch.where(torch.arange(64) < half, 8.0, 1.0)
    generator = torch.Generator().manual_seed(0)
    late = []
    for step in range(steps):
        x.grad = curvature * (x.detach() + 0.1 * torch.randn(64, generator=generator))
        optimizer.step()
        if step >= steps - 100:
            late.append(float(x.detach()[half:].square().mean()))
    return statistics.mean(late)


def test_whitening_keeps_small_gradients_from_the_noise_of_large_ones(ranks: Ranks) -> None:
    dense = ranks(2, _off, True, 10_000)[0]
    plain, whitened = (ranks(2, _off, whiten, 100)[0] - dense for whiten in (False, True))
    assert abs(whitened) < 0.5 * plain


def _late_steps(build: Any) -> float:
    """How far steps go long after the freeze, with gradients five times larger at first."""
    x = nn.Parameter(torch.zeros(200))
    optimizer = build([x])
    generator = torch.Generator().manual_seed(0)
    length = 0.0
    for step in range(800):
        before = x.detach().clone()
        x.grad = torch.randn(200, generator=generator) * (5.0 if step < 50 else 1.0)
        optimizer.step()
        length += float((x.detach() - before).norm()) if step >= 700 else 0.0
    return length


def test_a_frozen_variance_forgets_the_first_gradients_as_adamws_does() -> None:
    """Kept as it was, it makes steps half as long for the rest of the run."""
    adamw = _late_steps(lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0))
    kept, forgotten = (
        _late_steps(lambda p, f=f: tw.OneBitAdam(p, lr=1e-3, freeze_at=200, forget=f))
        for f in (False, True)
    )
    assert kept < 0.7 * adamw
    assert forgotten == pytest.approx(adamw, rel=0.05)


def test_the_level_never_rises_and_is_saved() -> None:
    level = VarianceLevel(0.99)
    for step in range(100):
        level.observe(1.0 if step < 90 else 50.0)
    assert level.factor(101) == level.factor(10_000) == 1.0
    level = VarianceLevel(0.99)
    assert level.factor(5) == 1.0, "nothing seen"
    squares = [100.0] * 20 + [1.0] * 80
    for square in squares:
        level.observe(square)
    other = VarianceLevel(0.99)
    other.load_state_dict(level.state_dict())
    factors = [level.factor(step) for step in range(101, 2000)]
    assert factors == [other.factor(step) for step in range(101, 2000)]
    assert all(a >= b for a, b in itertools.pairwise(factors))
    weights = [0.99**age for age in range(99, -1, -1)]
    seen = sum(w * s for w, s in zip(weights, squares, strict=True)) / sum(weights)
    assert factors[-1] == pytest.approx(1 / seen)


def test_a_state_in_other_units_is_refused() -> None:
    weights = [nn.Parameter(torch.ones(3))]
    optimizer = tw.OneBitAdam(weights, freeze_at=1)
    for _ in range(2):
        weights[0].grad = torch.ones(3)
        optimizer.step()
    other = tw.OneBitAdam(weights, freeze_at=1, whiten=False)
    with pytest.raises(ValueError, match=r"saved with whiten=True .* load it as it was saved"):
        other.load_state_dict(optimizer.state_dict())
    old = copy.deepcopy(optimizer.state_dict())
    for name in ("whiten", "levels", "norms", "arrived"):  # as saved before these existed
        del _holder(old, name)[name]
    other.load_state_dict(old)
    with pytest.raises(ValueError, match="saved with whiten=False"):
        tw.OneBitAdam(weights, freeze_at=1).load_state_dict(old)


def _holder(state: dict[str, Any], key: str) -> dict[str, Any]:
    """The dict inside a state that has this key."""
    inside = (v for v in state.values() if isinstance(v, dict))
    return state if key in state else next(d for d in inside if key in d)


def _warm(size: int, steps: int) -> Any:
    return adam(size, steps, weight_decay=0.1, freeze_at=1000)


def test_the_warm_up_is_adamw_with_data_parallelism(ranks: Ranks) -> None:
    size, steps = 2, 12
    start, gradient = oracle.problem(size, SHAPES)
    weights = [nn.Parameter(t.float()) for t in start]
    adamw = torch.optim.AdamW(weights, lr=LR, weight_decay=0.1)
    for step in range(1, steps + 1):
        now = [w.detach() for w in weights]
        everyone = [gradient(rank, step, now) for rank in range(size)]
        for i, w in enumerate(weights):
            w.grad = sum(g[i] for g in everyone).div(size).float()
        adamw.step()
    for got, _ in ranks(size, _warm, size, steps):
        torch.testing.assert_close(got, [w.detach() for w in weights], rtol=1e-5, atol=1e-6)


def _bytes(size: int, bucket_mb: float) -> tuple[int, int, list[int]]:
    weights, optimizer = oracle.run(
        tw.OneBitAdam, size, 4, lr=LR, freeze_at=3, bucket_mb=bucket_mb, shapes=[(9, 11), (50,)]
    )
    before, transfers = optimizer.account.bytes, optimizer.account.transfers
    _, gradient = oracle.problem(size, [(9, 11), (50,)])
    oracle.advance(optimizer, weights, gradient, optimizer.wire.rank, 5, 5)
    return (
        optimizer.account.bytes - before,
        optimizer.account.transfers - transfers,
        [b.flat.numel for b in optimizer.buckets],
    )


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("bucket_mb", [25.0, 1e-5])
def test_the_compressed_stage_sends_exactly_its_bits(
    ranks: Ranks, size: int, bucket_mb: float
) -> None:
    for sent, transfers, buckets in ranks(size, _bytes, size, bucket_mb):
        padded = [math.ceil(n / (8 * size)) * 8 * size for n in buckets]
        assert len(buckets) == (1 if bucket_mb == 25.0 else 2)
        assert transfers == len(buckets) + 1, "one mean each, which are used, and nothing dense"
        bits = sum(2 * (size - 1) * p // (8 * size) + 8 * (size - 1) for p in padded)
        assert sent == bits + (size - 1) * 2  # and which of the two tensors are used


def _poisoned(stage: str, bad: float) -> tuple[bool, bool, int, int]:
    weights, optimizer = oracle.run(
        tw.OneBitAdam, 2, 5, lr=LR, freeze_at=3 if stage == "compressed" else 99, bucket_mb=1e-5
    )
    before = copy.deepcopy(optimizer.state_dict())
    old = [w.detach().clone() for w in weights]
    for i, w in enumerate(weights):
        w.grad = torch.ones_like(w)
        if optimizer.wire.rank == 1 and i == 0:  # one value of one bucket of one rank
            w.grad.view(-1)[3] = bad
    optimizer.step()
    after = optimizer.state_dict()
    same = _equal(before, after)
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
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_bad_value_on_one_rank_skips_the_step_on_all_without_a_trace(
    ranks: Ranks, stage: str, bad: float
) -> None:
    """Naively the other buckets would take over their errors, and the other ranks would step."""
    for answer in ranks(2, _poisoned, stage, bad):
        assert answer == (True, True, 1, 5)


def _clipped(clip: float) -> tuple[float, float, list[Tensor]]:
    weights, optimizer = oracle.run(tw.OneBitAdam, 2, 4, lr=LR, freeze_at=4, clip=clip)
    m = torch.cat([b.m for b in optimizer.buckets])
    for w in weights:  # rank 0 has a small gradient, rank 1 a large one
        w.grad = torch.full_like(w, 3.0 if optimizer.wire.rank else 1.0)
    seen: list[Tensor] = []
    rule = optimizer.engine.rule
    payload = rule.payload
    rule.payload = lambda bucket: (seen.append(bucket.buffer.clone()), payload(bucket))
    optimizer.step()
    assert not torch.equal(m, torch.cat([b.m for b in optimizer.buckets]))
    own = float(torch.cat([w.grad.view(-1) for w in weights]).norm())
    return optimizer.grad_norm, own, seen


def test_clipping_is_by_the_norm_of_all_replicas(ranks: Ranks) -> None:
    """Each rank by its own norm would give both the same length, and turn the mean."""
    for clip in (1.0, 1e6):
        answers = ranks(2, _clipped, clip)
        factors = [float(torch.cat(sent).norm()) / own for _, own, sent in answers]
        assert factors[0] == pytest.approx(factors[1])
        assert answers[0][0] == answers[1][0]
        assert factors[0] == pytest.approx(min(1.0, clip / answers[0][0]))


def _norms(alike: float) -> tuple[list[float], list[float]]:
    """The norms that a step was clipped by, dense and in one bit, beside those of the true mean."""
    rank = tw.init().rank
    weights = nn.Parameter(torch.zeros(400))
    optimizer = tw.OneBitAdam([weights], lr=1e-9, freeze_at=60, clip=1e-3)
    shared = torch.Generator().manual_seed(99)
    found, true = [], []
    for step in range(90):
        common = torch.randn(400, generator=shared)
        seeds = (torch.Generator().manual_seed(100 * step + r) for r in range(4))
        gradients = [
            alike * common + (1 - alike) * torch.randn(400, generator=seed) for seed in seeds
        ]
        weights.grad = gradients[rank]
        optimizer.step()
        found.append(optimizer.grad_norm)
        true.append(float(torch.stack(gradients).mean(0).norm()))
    return found, true


@pytest.mark.parametrize("alike", [0.0, 0.3, 1.0])
def test_the_norm_is_that_of_the_mean_gradient_in_both_stages(ranks: Ranks, alike: float) -> None:
    """From the ranks' own norms alone it would come out twice as large on four ranks of noise."""
    found, true = ranks(4, _norms, alike)[0]
    assert found[:60] == pytest.approx(true[:60], rel=1e-4)
    assert found[60:] == pytest.approx(true[60:], rel=0.15)
    assert statistics.mean(found[60:]) == pytest.approx(statistics.mean(true[60:]), rel=0.02)


def _clipped_group() -> float:
    """How far momentum of a dense group goes with a gradient that is clipped to nothing."""
    dense, other = nn.Parameter(torch.zeros(9)), nn.Parameter(torch.zeros(9))
    optimizer = tw.OneBitAdam(
        [{"params": [dense], "compress": False}, {"params": [other]}], freeze_at=1, clip=1e-6
    )
    for _ in range(3):
        dense.grad, other.grad = torch.ones(9), torch.ones(9)
        optimizer.step()
    return float(optimizer.state[dense]["exp_avg"].norm())


def test_dense_groups_are_clipped_in_both_stages() -> None:
    assert _clipped_group() < 1e-6


def _groups() -> tuple[int, int, bool, bool]:
    rank = tw.init().rank
    start, gradient = oracle.problem(2, SHAPES)
    weights = [nn.Parameter(t.float()) for t in start]
    optimizer = tw.OneBitAdam(
        [{"params": weights[:1], "compress": False}, {"params": weights[1:], "lr": 0.1}],
        lr=LR,
        freeze_at=3,
    )
    oracle.advance(optimizer, weights, gradient, rank, 1, 4)
    before = optimizer.account.bytes
    v = [optimizer.state[w]["exp_avg_sq"].clone() for w in weights]
    oracle.advance(optimizer, weights, gradient, rank, 5, 5)
    now = [optimizer.state[w]["exp_avg_sq"] for w in weights]
    alive = [not torch.equal(a, b) for a, b in zip(v, now, strict=True)]
    return optimizer.account.bytes - before, len(optimizer.buckets), alive[0], any(alive[1:])


def test_groups_may_stay_dense(ranks: Ranks) -> None:
    for sent, buckets, alive, others in ranks(2, _groups):
        assert buckets == 2
        assert alive
        assert not others
        # 20 values dense; 19 in one bit, padded to 32; a byte for each tensor
        assert sent == 4 * 20 + (2 * 32 // 16 + 8) + 3


def _unused() -> tuple[bool, list[int]]:
    rank = tw.init().rank
    used, unused, rare = (nn.Parameter(torch.ones(9)) for _ in range(3))
    optimizer = tw.OneBitAdam([used, unused, rare], lr=LR, weight_decay=0.1, freeze_at=4)
    for step in range(8):
        used.grad = torch.randn(9)
        # one rank only, and not from the start
        rare.grad = torch.ones(9) if rank == 1 and step >= 2 else None
        optimizer.step()
    sizes = [b.flat.numel for b in optimizer.buckets]
    left_alone = torch.equal(unused.detach(), torch.ones(9))
    return left_alone and not torch.equal(rare, torch.ones(9)), sizes


def test_parameters_without_gradients_are_left_alone(ranks: Ranks) -> None:
    for alone, sizes in ranks(2, _unused):
        assert alone
        assert sizes == [9, 9], "one bucket more for a parameter that came later"


def _types(dtype: torch.dtype) -> tuple[bool, list[Tensor]]:
    weights, optimizer = oracle.run(
        tw.OneBitAdam, 2, 8, dtype=dtype, lr=LR, freeze_at=4, dense=Dense(torch.bfloat16)
    )
    return optimizer.buckets[0].m.dtype == torch.float32, [w.detach().float() for w in weights]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_of_weights(ranks: Ranks, dtype: torch.dtype) -> None:
    answers = ranks(2, _types, dtype)
    for wide, weights in answers:
        assert wide == (dtype == torch.bfloat16)
        assert all(map(torch.equal, weights, answers[0][1]))
        assert all(bool(w.isfinite().all()) for w in weights)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("freeze_at", 0),
        ("freeze_at", 2.5),
        ("clip", 0.0),
        ("clip", math.nan),
        ("betas", (0.9, 1.5)),
        ("lr", -1.0),
        ("eps", math.inf),
        ("bucket_mb", 0),
        ("dense", "bf16"),
        ("compress", 1),
    ],
)
def test_bad_settings_are_refused_by_name(setting: str, value: Any) -> None:
    group: dict[str, Any] = {"params": [nn.Parameter(torch.zeros(2))]}
    settings = {setting: value}
    if setting == "compress":
        group, settings = group | settings, {}
    with pytest.raises(ValueError, match=rf"OneBitAdam\({setting}=...\) takes .*, got"):
        tw.OneBitAdam([group], **settings)


def test_help_and_editors_see_all_settings() -> None:
    shared = ["floor", "freeze_at", "clip", "dense", "bucket_mb", "overlap", "group"]
    for method, more in (
        (tw.OneBitAdam, [*shared, "inside", "shard_state", "delayed_step"]),
        (tw.OneBitLamb, [*shared, "inside", "shard_state", "delayed_step"]),
        (tw.ZeroOneAdam, shared),
    ):
        names = list(inspect.signature(method).parameters)
        assert names[:2] == ["params", "lr"]
        assert names[-len(more) :] == more
        assert all(f"{name}" in (tw.OneBitAdam.__doc__ or "") for name in more)
    with pytest.raises(TypeError, match="freeze_it"):
        tw.OneBitAdam([nn.Parameter(torch.zeros(2))], freeze_it=3)  # type: ignore[call-arg]


def test_a_freeze_that_never_came_is_told() -> None:
    weights = nn.Parameter(torch.zeros(2))
    optimizer = tw.OneBitAdam([weights], freeze_at=100)
    weights.grad = torch.ones(2)
    optimizer.step()
    with pytest.warns(UserWarning, match=r"freeze_at=100.*after 1 steps") as told:
        optimizer.finish()
    assert len(told) == 1
    reached = tw.OneBitAdam([weights], freeze_at=1)
    reached.step()
    with warnings.catch_warnings(record=True) as silent:
        reached.finish()
    assert not silent


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = tw.OneBitAdam(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse=False"):
        optimizer.step()


def _scaled() -> tuple[list[Tensor], list[Tensor]]:
    rank = tw.init().rank
    results = []
    for scale in (1.0, 1024.0):
        start, gradient = oracle.problem(2, SHAPES)
        weights = [nn.Parameter(t.float()) for t in start]
        optimizer = tw.OneBitAdam(weights, lr=LR, freeze_at=3, clip=0.5)
        for step in range(1, 7):
            given = gradient(rank, step, [w.detach() for w in weights])
            for w, g in zip(weights, given, strict=True):
                w.grad = (g * scale).float()
            optimizer.grad_scale = torch.tensor(scale)  # as GradScaler does
            optimizer.found_inf = torch.tensor(0.0)
            optimizer.step()
        results.append([w.detach() for w in weights])
    return results[0], results[1]


def test_gradscalers_scale_is_taken_out_before_anything_is_sent(ranks: Ranks) -> None:
    for plain, scaled in ranks(2, _scaled):
        torch.testing.assert_close(plain, scaled, rtol=1e-5, atol=1e-6)


def _saved(size: int) -> tuple[dict[str, Any], dict[str, Any], list[Tensor]]:
    weights, optimizer = oracle.run(tw.OneBitAdam, size, 8, lr=LR, freeze_at=4, bucket_mb=1e-5)
    own, portable = copy.deepcopy(optimizer.state_dict()), optimizer.portable_state_dict()
    return own, portable, [w.detach() for w in weights]


def _resumed(states: list[dict[str, Any]], now: list[Tensor], last: int) -> Any:
    rank = tw.init().rank
    _, gradient = oracle.problem(tw.Wire().size, SHAPES)
    weights = [nn.Parameter(w.clone()) for w in now]
    optimizer = tw.OneBitAdam(weights, lr=LR, freeze_at=4, bucket_mb=1e-5)
    optimizer.load_state_dict(states[rank % len(states)])
    loaded = optimizer.engine.store.portable_errors()
    oracle.advance(optimizer, weights, gradient, rank, 9, last)
    return [w.detach() for w in weights], loaded


def _straight(size: int, steps: int) -> list[Tensor]:
    weights, _ = oracle.run(tw.OneBitAdam, size, steps, lr=LR, freeze_at=4, bucket_mb=1e-5)
    return [w.detach() for w in weights]


def test_a_saved_run_goes_on_bit_for_bit(ranks: Ranks) -> None:
    saved = ranks(2, _saved, 2)
    straight = ranks(2, _straight, 2, 12)
    for weights, _ in ranks(2, _resumed, [own for own, _, _ in saved], saved[0][2], 12):
        assert all(map(torch.equal, weights, straight[0]))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_errors_are_restored_on_another_number_of_ranks(ranks: Ranks, size: int) -> None:
    """The forerunner starts from zeros; here the mean of what the workers keep and what the owners
    keep are the same before and after."""
    saved = ranks(3, _saved, 3)
    assert all(_equal(portable, saved[0][1]) for _, portable, _ in saved)
    errors = saved[0][1]["errors"]
    assert all(float(e["worker"].norm()) > 0 < float(e["owner"].norm()) for e in errors)
    for weights, loaded in ranks(size, _resumed, [saved[0][1]], saved[0][2], 12):
        for before, after in zip(errors, loaded, strict=True):
            torch.testing.assert_close(before["worker"], after["worker"])
            torch.testing.assert_close(before["owner"], after["owner"])
        assert all(bool(w.isfinite().all()) for w in weights)


def test_a_state_of_another_kind_or_model_is_refused() -> None:
    weights = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(4))]
    optimizer = tw.OneBitAdam(weights)
    for w in weights:
        w.grad = torch.ones_like(w)
    optimizer.step()
    state = optimizer.state_dict()
    with pytest.raises(ValueError, match=r"groups of \[2\] parameters, this optimizer of \[1\]"):
        tw.OneBitAdam(weights[:1]).load_state_dict(state)
    with pytest.raises(ValueError, match=r"parameter 0 has shape \(4,\), in the state \(3,\)"):
        tw.OneBitAdam(weights[::-1]).load_state_dict(state)
    with pytest.raises(ValueError, match="OneBitLamb cannot load the state of OneBitAdam"):
        tw.OneBitLamb(weights).load_state_dict(state)
    with pytest.raises(ValueError, match="cannot load the state of another optimizer"):
        optimizer.load_state_dict(torch.optim.AdamW(weights).state_dict())
    state["ranks"] = 4
    with pytest.raises(ValueError, match=r"one of 4 ranks, and here are 1; .*portable"):
        optimizer.load_state_dict(state)

"""SparseAverage on real ranks against the sequential oracle, and the identities of its rules."""

import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.methods.local.local_oracle import quadratic, start_point
from tests.methods.sparse import sparse_oracle as oracle
from tests.methods.sparse.sparse_oracle import Rules
from thinwire.methods.sparse.subsets import Subsets
from thinwire.wire.flight import Flight

SHAPES = [(5, 4), (7,), (1,), (11, 2)]
NUMEL, LR, REPLICAS, STEPS = 50, 0.05, 3, 41


def weights_of(start: Tensor) -> list[nn.Parameter]:
    sizes = [torch.Size(shape).numel() for shape in SHAPES]
    parts = start.split(sizes)
    return [nn.Parameter(p.reshape(s).clone()) for p, s in zip(parts, SHAPES, strict=True)]


def flat(weights: list[nn.Parameter]) -> Tensor:
    return torch.cat([w.detach().reshape(-1) for w in weights])


def descend(optimizer: tw.SparseAverage, gradient: oracle.Gradient, first: int, last: int) -> None:
    """Steps first..last with the gradient of this replica."""
    weights: Any = optimizer.param_groups[0]["params"]
    for step in range(first, last + 1):
        whole = gradient(optimizer.wire.rank, step, flat(weights))
        for weight, part in zip(weights, whole.split([w.numel() for w in weights]), strict=True):
            weight.grad = part.view(weight.shape).clone()
        optimizer.step()


def masks(fraction: float, seed: int = 0) -> oracle.Mask:
    sizes = [torch.Size(shape).numel() for shape in SHAPES]
    partition = Subsets(sizes, round(1 / fraction), seed)

    def mask(number: int) -> Tensor:
        chosen = [torch.zeros(size) for size in sizes]
        subset = partition.subset(number)
        subset.write(torch.ones(subset.numel), chosen)
        return torch.cat(chosen) > 0

    return mask


CASES: dict[str, tuple[float, Rules]] = {
    "ema": (0.2, Rules(delay=3)),
    "ema, lam falls": (0.2, Rules(delay=3, steps=STEPS, ema=(0.6, 0.1))),
    "ema, in the air twice": (0.25, Rules(delay=9)),
    "ema, everything": (1.0, Rules(delay=2)),
    "delta": (0.2, Rules(delay=3, correction="delta")),
    "delta, rare": (0.5, Rules(delay=7, correction="delta", every=3)),
    "overwrite": (0.2, Rules(delay=3, correction="overwrite")),
    "ema, slow rounds": (0.2, Rules(delay=2, every=4)),
    "blocking": (0.2, Rules(delay=0)),
    "blocking, rare": (0.25, Rules(delay=0, every=3, correction="delta")),
}


def build(fraction: float, rules: Rules, **more: Any) -> tw.SparseAverage:
    inner = torch.optim.SGD(weights_of(start_point(NUMEL)), lr=LR)
    settings = {"steps": rules.steps, **({"ema": rules.ema} if rules.steps else {}), **more}
    return tw.SparseAverage(
        inner,
        fraction=fraction,
        delay=rules.delay,
        correction=rules.correction,  # type: ignore[arg-type]
        every=rules.every,
        **settings,
    )


def all_cases() -> dict[str, tuple[Tensor, dict[str, float]]]:
    tw.init()
    answers = {}
    for name, (fraction, rules) in CASES.items():
        optimizer = build(fraction, rules)
        descend(optimizer, quadratic(REPLICAS, NUMEL), 1, STEPS)
        weights: Any = optimizer.param_groups[0]["params"]
        answers[name] = flat(weights), optimizer.account.snapshot()
        optimizer.drain()
    return answers


def test_the_engine_equals_the_oracle(ranks) -> None:
    answers = ranks(REPLICAS, all_cases)
    gradient, start = quadratic(REPLICAS, NUMEL), start_point(NUMEL)
    for name, (fraction, rules) in CASES.items():
        expected = oracle.run(start, gradient, masks(fraction), REPLICAS, STEPS, LR, rules)
        for answer, wanted in zip(answers, expected, strict=True):
            got, account = answer[name]
            torch.testing.assert_close(got, wanted.weights, rtol=1e-4, atol=1e-5, msg=name)
            assert account["transfers"] == STEPS // rules.every, f"{name}: one flight a round"
            assert account["lag"] == rules.delay, name


LAGS = {0: [1, 2, 1], 1: [4, 3, 5, 4], 2: [6]}  # by replica; the bound of 5 holds for the last


def lag_of(replica: int, number: int) -> int:
    return LAGS[replica][number % len(LAGS[replica])]


def arriving() -> tuple[Tensor, float]:
    """landing="arrival", with arrivals that this test decides: each replica has its own."""
    tw.init()
    optimizer = build(0.2, Rules(delay=5), landing="arrival")

    def arrived(flight: Flight) -> bool:
        entry = next(e for e in optimizer.engine._in_air if e.flight is flight)
        return optimizer.engine._count - entry.step >= lag_of(optimizer.wire.rank, entry.number)

    with mock.patch.object(Flight, "arrived", property(arrived)):
        descend(optimizer, quadratic(REPLICAS, NUMEL), 1, STEPS)
    weights: Any = optimizer.param_groups[0]["params"]
    optimizer.drain()
    return flat(weights), optimizer.account.lag


def test_a_varying_lag_of_each_replicas_own_is_corrected_by_what_it_was(ranks) -> None:
    answers = ranks(REPLICAS, arriving)
    gradient, start = quadratic(REPLICAS, NUMEL), start_point(NUMEL)
    rules = Rules(delay=5)
    expected = oracle.run(start, gradient, masks(0.2), REPLICAS, STEPS, LR, rules, lag=lag_of)
    assert [sorted(set(replica.lags)) for replica in expected] == [[1, 2], [3, 4, 5], [5]]
    for (got, _), wanted in zip(answers, expected, strict=True):
        torch.testing.assert_close(got, wanted.weights, rtol=1e-4, atol=1e-5)


def test_the_weight_of_the_newest_drift_over_a_run() -> None:
    """The published schedule in a run of the published length; a shorter memory in shorter ones."""

    def weights(steps: int, every: int = 1, **more: Any) -> list[float]:
        optimizer = build(0.05, Rules(delay=10, every=every), **{"steps": steps, **more})
        found = []
        for share in (0.0, 1 / 30, 31 / 60, 1.0, 1.5):
            optimizer.engine._count = round(share * steps)
            found.append(optimizer.engine._ema_weight())
        return found

    published = [0.5, 0.5, (0.5 + 0.01) / 2, 0.01, 0.01]
    assert weights(30_000) == pytest.approx(published, abs=1e-4)
    assert weights(480, ema=(0.5, 0.01)) == pytest.approx(published, abs=1e-2)
    assert weights(480) == [0.5] * 5, "24 landings"
    assert weights(3000)[3] == pytest.approx(0.1), "150 landings: the last ten"
    assert weights(12_000, every=4)[3] == pytest.approx(0.1)
    assert build(0.05, Rules(delay=10)).engine._ema_weight() == 0.5, "of no known length"


# -- identities ----------------------------------------------------------------------------------


def plain_averaging(fraction: float, every: int) -> bool:
    """delay = 0, whatever the correction, against averaging written out on the same wire."""
    gradient = quadratic(2, NUMEL)
    results = []
    for correction in ("ema", "delta", "overwrite"):
        optimizer = build(fraction, Rules(delay=0, correction=correction, every=every))
        descend(optimizer, gradient, 1, 24)
        results.append(flat(optimizer.param_groups[0]["params"]))
    wire, mask, weights = tw.Wire(), masks(fraction), start_point(NUMEL)
    for step in range(1, 25):
        weights = weights.add(gradient(wire.rank, step, weights), alpha=-LR)
        if step % every == 0:
            chosen = mask(step // every - 1)
            weights[chosen] = wire.mean(weights[chosen]).wait()
    return all(torch.equal(result, weights) for result in results)


def blocking_identities() -> list[bool]:
    tw.init()
    return [plain_averaging(0.2, 1), plain_averaging(0.25, 3), plain_averaging(1.0, 1)]


def test_without_a_delay_it_is_plain_averaging_of_the_subset_or_of_everything(ranks) -> None:
    for answers in ranks(2, blocking_identities):
        assert answers == [True, True, True]


@pytest.mark.parametrize("delay", [0, 4])
@pytest.mark.parametrize("landing", ["step", "arrival"])
def test_one_replica_is_its_inner_optimizer_and_sends_nothing(delay: int, landing: str) -> None:
    gradient = quadratic(1, NUMEL)
    optimizer = build(0.2, Rules(delay=delay), landing=landing)
    descend(optimizer, gradient, 1, 30)
    weights = start_point(NUMEL)
    for step in range(1, 31):
        weights = weights.add(gradient(0, step, weights), alpha=-LR)
    assert torch.equal(flat(optimizer.param_groups[0]["params"]), weights)
    optimizer.finish()
    assert torch.equal(flat(optimizer.param_groups[0]["params"]), weights)
    assert optimizer.account.transfers == optimizer.account.bytes == 0


@pytest.mark.parametrize("delay", [3, 9])
def test_delta_leaves_the_mean_of_the_replicas_as_it_is(delay: int) -> None:
    """Gradients that do not depend on the weights: the mean must be that of separate replicas."""
    pull = quadratic(REPLICAS, NUMEL)

    def gradient(replica: int, step: int, weights: Tensor) -> Tensor:
        return pull(replica, step, torch.zeros(NUMEL))

    start = start_point(NUMEL)
    apart = oracle.run(
        start, gradient, lambda k: torch.zeros(NUMEL, dtype=torch.bool), REPLICAS, 60, LR, Rules(0)
    )
    means = {}
    for correction in ("delta", "ema", "overwrite"):
        rules = Rules(delay, correction)
        means[correction] = oracle.mean(
            oracle.run(start, gradient, masks(0.2), REPLICAS, 60, LR, rules)
        )
    torch.testing.assert_close(means["delta"], oracle.mean(apart), rtol=1e-4, atol=1e-4)
    for other in ("ema", "overwrite"):
        assert float((means[other] - oracle.mean(apart)).norm()) > 0.1, "it would prove nothing"


def test_delta_in_the_air_twice_drives_the_replicas_apart_and_says_so() -> None:
    """A cycle of 5 rounds: with a delay of 4 a value lands before it leaves again, with 12 not."""
    start, gradient = start_point(NUMEL), quadratic(REPLICAS, NUMEL)

    def apart(rules: Rules) -> float:
        replicas = oracle.run(start, gradient, masks(0.2), REPLICAS, 200, LR, rules)
        return max(float((own.weights - oracle.mean(replicas)).norm()) for own in replicas)

    within, beyond = (apart(Rules(delay, "delta")) for delay in (4, 12))
    assert beyond > 2 * max(within, apart(Rules(12, "ema")))
    inner = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1)
    with pytest.warns(UserWarning, match=r"turn after 20 steps, .* corrected twice: they drift"):
        tw.SparseAverage(inner, correction="delta", delay=40)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tw.SparseAverage(inner, correction="delta", delay=20)
        tw.SparseAverage(inner, correction="ema", delay=40)


def drifting(correction: str) -> tuple[float, float]:
    """Share of a constant drift that is kept: of all of it, and of its last quarter."""
    weight = nn.Parameter(torch.zeros(1000))
    optimizer = tw.SparseAverage(
        torch.optim.SGD([weight], lr=1.0), correction=correction, delay=10, fraction=0.05
    )
    moved = []
    for step in range(1, 401):
        weight.grad = -torch.ones(1000)
        optimizer.step()
        if step in (300, 400):
            moved.append(float(weight.detach().mean()))
    optimizer.drain()
    return moved[1] / 400, (moved[1] - moved[0]) / 100


def all_drifts() -> dict[str, tuple[float, float]]:
    tw.init()
    return {correction: drifting(correction) for correction in ("overwrite", "delta", "ema")}


def test_a_constant_drift_is_lost_by_overwriting_and_kept_by_the_corrections(ranks) -> None:
    for kept in ranks(2, all_drifts):
        assert kept["overwrite"][1] == pytest.approx(0.57, abs=0.02)
        assert kept["delta"] == pytest.approx((1.0, 1.0), abs=1e-5)
        # The average starts at 0 and has to learn the drift: that is lost once.
        assert kept["ema"][0] > 0.97
        assert kept["ema"][1] == pytest.approx(1.0, abs=1e-3)


# -- what travels --------------------------------------------------------------------------------


def traffic() -> dict[str, float]:
    """Bytes of one cycle, against averaging all weights at each of its 20 steps."""
    tw.init()
    sent = {}
    codecs = {"fp32": None, "bf16": tw.codecs.Dense(torch.bfloat16), "int8": tw.codecs.Int8()}
    for name, fraction, codec in [
        ("all", 1.0, None),
        *((name, 0.05, codec) for name, codec in codecs.items()),
    ]:
        weights = [nn.Parameter(torch.randn(100, 97)), nn.Parameter(torch.randn(300))]
        for weight in weights:
            torch.nn.init.constant_(weight, 0.5)
        optimizer = tw.SparseAverage(
            torch.optim.SGD(weights, lr=0.1), fraction=fraction, codec=codec, delay=4
        )
        for _ in range(20):
            for weight in weights:
                weight.grad = torch.full_like(weight, float(optimizer.wire.rank))
            optimizer.step()
        optimizer.drain()
        sent[name] = optimizer.account.bytes
    return {name: sent["all"] / count for name, count in sent.items()}


def test_the_traffic_is_20_and_40_times_less_than_averaging_all_weights(ranks) -> None:
    for less in ranks(3, traffic):
        assert less["fp32"] == pytest.approx(20, rel=0.01)
        assert less["bf16"] == pytest.approx(40, rel=0.01)
        assert less["int8"] > 70


def coded() -> dict[str, float]:
    """How far each codec ends from full precision, relative to the weights."""
    tw.init()
    ends = {}
    codecs = {"fp32": None, "bf16": tw.codecs.Dense(torch.bfloat16), "int8": tw.codecs.Int8()}
    for name, codec in codecs.items():
        optimizer = build(0.2, Rules(delay=3), codec=codec)
        descend(optimizer, quadratic(2, NUMEL), 1, STEPS)
        optimizer.finish()
        ends[name] = flat(optimizer.param_groups[0]["params"])
    return {n: float((w - ends["fp32"]).norm() / ends["fp32"].norm()) for n, w in ends.items()}


def test_coarse_codecs_stay_near_full_precision(ranks) -> None:
    for apart in ranks(2, coded):
        assert 0 < apart["bf16"] < 0.01
        assert 0 < apart["int8"] < 0.03

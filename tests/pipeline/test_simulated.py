"""The pipeline's compute against the oracle, bit for bit, with all stages in this process."""

import copy

import pytest
import torch
from torch import nn

from tests.pipeline import oracle
from thinwire.pipeline import AsyncNAdam, SimulatedPipeline
from thinwire.pipeline.simulated import travelled
from thinwire.wire.codecs import Int8

UPDATES = 9


def run(
    stages: int,
    version: oracle.Version,
    *,
    accumulate: int = 1,
    oracle_settings: dict | None = None,
    optimize: oracle.Optimize = oracle.adamw,
    exactly: bool = True,
    **settings,
) -> SimulatedPipeline:
    """Asserts that both agree, and returns the pipeline."""
    parts = oracle.small_stages(stages)
    batches = oracle.small_batches(UPDATES * accumulate)
    expected, losses = oracle.train(
        parts,
        optimize,
        oracle.small_loss,
        batches,
        version,
        accumulate=accumulate,
        **(oracle_settings or {}),
    )
    mine = [copy.deepcopy(part) for part in parts]
    pipeline = SimulatedPipeline(
        mine,
        [optimize(part) for part in mine],
        loss=oracle.small_loss,
        accumulate=accumulate,
        **settings,
    )
    records = list(pipeline.train(batches, UPDATES))
    assert [record.update for record in records] == list(range(UPDATES))
    for update, record in enumerate(records):
        mean = sum(losses[update * accumulate : (update + 1) * accumulate]) / accumulate
        assert float(record.loss) == pytest.approx(mean, rel=1e-6 if exactly else 1e-4)
    for stage, (a, b) in enumerate(zip(mine, expected, strict=True)):
        assert oracle.same(a, b) if exactly else oracle.close(a, b), f"stage {stage} differs"
    for runner in pipeline.runners:
        assert not runner.held
        if runner.stash is not None:
            assert runner.stash.copies <= runner.schedule.copies
            if UPDATES * accumulate > 2 * runner.schedule.warmup:  # long enough to need them all
                assert runner.stash.copies == runner.schedule.copies
    return pipeline


@pytest.mark.parametrize("recompute", [False, True], ids=["stash", "recompute"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(("stages", "lead"), [(1, 0), (2, 0), (2, 2), (3, 0), (4, 0), (4, 1)])
def test_1f1b(stages: int, lead: int, accumulate: int, recompute: bool) -> None:
    version = oracle.one_f_one_b(stages, accumulate, lead)
    run(stages, version, accumulate=accumulate, lead=lead, recompute=recompute)


@pytest.mark.parametrize("recompute", [False, True], ids=["stash", "recompute"])
@pytest.mark.parametrize(("stages", "accumulate", "lead"), [(3, 1, 0), (2, 1, 1), (4, 2, 0)])
def test_versions_that_look_ahead(stages, accumulate, lead, recompute) -> None:
    horizons = [0.5 * (stages - 1 - s) * (1 + lead) / accumulate for s in range(stages)]
    run(
        stages,
        oracle.one_f_one_b(stages, accumulate, lead),
        accumulate=accumulate,
        lead=lead,
        recompute=recompute,
        look_ahead=0.5,
        oracle_settings={"horizons": horizons},
        exactly=False,
    )


def test_2bw_looks_ahead_by_one_update() -> None:
    run(
        2,
        oracle.two_buffers(3),
        accumulate=3,
        schedule="2bw",
        look_ahead=1.0,
        oracle_settings={"horizons": [1.0, 1.0]},
        exactly=False,
    )


@pytest.mark.parametrize(("stages", "accumulate"), [(2, 1), (4, 1), (3, 2)])
def test_without_a_stash(stages: int, accumulate: int) -> None:
    version = oracle.one_f_one_b(stages, accumulate)
    pipeline = run(
        stages, version, accumulate=accumulate, stash=False, oracle_settings={"stash": False}
    )
    assert all(runner.stash is None for runner in pipeline.runners)


@pytest.mark.parametrize("recompute", [False, True], ids=["stash", "recompute"])
@pytest.mark.parametrize(("stages", "accumulate"), [(1, 1), (2, 2), (3, 5), (4, 4)])
def test_2bw_has_two_versions_at_any_depth(stages: int, accumulate: int, recompute: bool) -> None:
    pipeline = run(
        stages,
        oracle.two_buffers(accumulate),
        accumulate=accumulate,
        schedule="2bw",
        recompute=recompute,
    )
    assert all(runner.stash.copies <= 2 for runner in pipeline.runners)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_flushed_stages_are_the_unsplit_model(accumulate: int, recompute: bool) -> None:
    """Identity (h): clipping off, for it is by stage."""
    parts, batches = oracle.small_stages(3), oracle.small_batches(UPDATES * accumulate)
    whole = nn.Sequential(*[copy.deepcopy(part) for part in parts])
    optimizer = oracle.adamw(whole)
    for i, (x, y) in enumerate(batches):
        (oracle.small_loss(whole(x), y) / accumulate).backward()
        if (i + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    pipeline = SimulatedPipeline(
        parts,
        [oracle.adamw(part) for part in parts],
        loss=oracle.small_loss,
        schedule="flush",
        accumulate=accumulate,
        recompute=recompute,
        clip=0,
    )
    for _ in pipeline.train(batches, UPDATES):
        pass
    assert oracle.same(nn.Sequential(*parts), whole)


def test_codecs_and_the_look_ahead_optimizer() -> None:
    run(
        3,
        oracle.one_f_one_b(3),
        optimize=lambda module: AsyncNAdam(module.parameters(), lr=0.02, updates=UPDATES),
        codec=Int8(),
        gradient_codec=Int8(),
        oracle_settings={"passed": lambda t: travelled(t, Int8())},
    )


def test_two_calls_with_a_drain_between_them() -> None:
    """A call starts afresh: its first micro-batches see the newest weights."""
    parts, batches = oracle.small_stages(3), oracle.small_batches(8)
    optimizers = [oracle.adamw(part) for part in parts]
    pipeline = SimulatedPipeline(parts, optimizers, loss=oracle.small_loss)
    begun = [copy.deepcopy(part) for part in parts]
    updates = [r.update for half in (batches[:4], batches[4:]) for r in pipeline.train(half, 4)]
    assert updates == list(range(8))

    def version(stage: int, micro: int) -> int:
        return micro // 4 * 4 + max(0, micro % 4 - (2 - stage))

    expected, _ = oracle.train(begun, oracle.adamw, oracle.small_loss, batches, version)
    assert all(oracle.same(a, b) for a, b in zip(parts, expected, strict=True))


# -- (e): the version of a backward ---------------------------------------------------------------


class Witness(torch.autograd.Function):
    """Notes the weight that a forward used, and the one its backward finds."""

    seen: list[tuple[str, float]] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        Witness.seen.append(("forward", weight.item()))
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        Witness.seen.append(("backward", weight.item()))
        return gradient * weight, (gradient * x).sum()


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return Witness.apply(x, self.weight)


@pytest.mark.parametrize(("stash", "recompute"), [(True, False), (True, True), (False, False)])
def test_a_backward_uses_the_version_of_its_forward(stash: bool, recompute: bool) -> None:
    modules = [Scale(), nn.Linear(2, 2), nn.Linear(2, 2)]
    pipeline = SimulatedPipeline(
        modules,
        [torch.optim.SGD(module.parameters(), lr=0.1) for module in modules],
        loss=oracle.small_loss,
        stash=stash,
        recompute=recompute,
    )
    Witness.seen.clear()
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(2, 2, generator=generator), torch.ones(2, 2)) for _ in range(8)]
    for _ in pipeline.train(batches, 8):
        pass
    forwards = [w for kind, w in Witness.seen if kind == "forward"]
    if recompute or not stash:  # every forward is run again right before its backward
        places = [i for i, (kind, _) in enumerate(Witness.seen) if kind == "backward"]
        again = {i - 1 for i in places}
        forwards = [
            w for i, (kind, w) in enumerate(Witness.seen) if kind == "forward" and i not in again
        ]
    backwards = [w for kind, w in Witness.seen if kind == "backward"]
    assert len(forwards) == len(backwards) == 8
    assert len(set(forwards)) == 6, "two warm-up forwards on the first weights, then new ones"
    assert (forwards == backwards) == stash


# -- buffers and random numbers -------------------------------------------------------------------


@pytest.mark.parametrize("stash", [True, False])
def test_a_forward_run_again_is_the_same_forward(stash: bool) -> None:
    """Dropout draws the same numbers and running means move once, whatever is recomputed."""

    def parts() -> list[nn.Module]:
        torch.manual_seed(0)
        stage = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.GELU())
        return [stage, nn.Linear(6, 6)]

    results = []
    for recompute in (False, True):
        mine = parts()
        # lr 0: with stash=False the first stage is then recomputed on the same weights
        optimizers = [torch.optim.SGD(p.parameters(), lr=0.1 if stash else 0.0) for p in mine]
        pipeline = SimulatedPipeline(
            mine,
            optimizers,
            loss=oracle.small_loss,
            stash=stash or not recompute,
            recompute=recompute,
        )
        torch.manual_seed(1)
        norms = [r.norm.item() for r in pipeline.train(oracle.small_batches(6), 6)]
        results.append((norms, mine, torch.get_rng_state()))
    (a, first, random), (b, second, random_again) = results
    assert a == b
    assert oracle.same(first[0], second[0])
    for x, y in zip(first[0].buffers(), second[0].buffers(), strict=True):
        assert torch.equal(x, y)
    assert torch.equal(random, random_again)
    assert first[0][1].num_batches_tracked == 6


def test_frozen_weights_are_not_copied() -> None:
    parts = oracle.small_stages(2)
    parts[0][0].requires_grad_(False)
    pipeline = SimulatedPipeline(
        parts, [oracle.adamw(part) for part in parts], loss=oracle.small_loss
    )
    before = oracle.weights(parts[0][0])
    for _ in pipeline.train(oracle.small_batches(4), 4):
        pass
    assert all(torch.equal(a, b) for a, b in zip(before, parts[0][0].parameters(), strict=True))
    assert pipeline.runners[0].stash.nbytes == 2 * sum(p.nbytes for p in parts[0][2].parameters())

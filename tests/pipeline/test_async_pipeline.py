"""AsyncPipeline on real ranks against the oracle, bit for bit; what it refuses; what it counts."""

import itertools
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw
from tests.pipeline import oracle
from thinwire.pipeline import SimulatedPipeline
from thinwire.pipeline.simulated import travelled
from thinwire.wire.codecs import Dense, Int8

UPDATES = 7
BF16 = Dense(torch.bfloat16)


def build(*, double: bool = False, **settings) -> tw.AsyncPipeline:
    """The stage of this rank in a pipeline over all ranks."""
    world = tw.init(timeout=20)
    module = stages_of(world.size, double)[world.rank]
    return tw.AsyncPipeline(module, oracle.adamw(module), loss=oracle.small_loss, **settings)


def stages_of(count: int, double: bool) -> list[nn.Module]:
    stages = oracle.small_stages(count)
    return [stage.double() for stage in stages] if double else stages


def batches_of(count: int, double: bool) -> list[oracle.Batch]:
    batches = oracle.small_batches(count)
    return [(x.double(), y.double()) for x, y in batches] if double else batches


def trained(cases: list[dict]) -> list[list[torch.Tensor]]:
    """The weights of this rank's stage after each case."""
    found = []
    for settings in cases:
        pipe = build(**settings)
        count = UPDATES * pipe.schedule.accumulate
        batches = batches_of(count, settings.get("double", False))
        records = list(pipe.train(iter(batches), UPDATES))
        assert [record.update for record in records] == list(range(UPDATES))
        assert all((record.loss is not None) == pipe.last for record in records)
        assert not pipe.runner.held
        found.append(oracle.weights(pipe.module))
        pipe.close()
    return found


def expected(stages: int, settings: dict) -> list[nn.Module]:
    accumulate, lead = settings.get("accumulate", 1), settings.get("lead", 0)
    name = settings.get("schedule", "1f1b")
    version = {
        "1f1b": oracle.one_f_one_b(stages, accumulate, lead),
        "2bw": oracle.two_buffers(accumulate),
        "flush": oracle.synchronous(accumulate),
    }[name]
    codec, double = settings.get("codec"), settings.get("double", False)
    parts, _ = oracle.train(
        stages_of(stages, double),
        oracle.adamw,
        oracle.small_loss,
        batches_of(UPDATES * accumulate, double),
        version,
        accumulate=accumulate,
        stash=settings.get("stash", True),
        passed=lambda tensor: travelled(tensor, codec),
    )
    return parts


@pytest.mark.parametrize(
    ("stages", "cases"),
    [
        (1, [{}, {"accumulate": 2}]),
        (
            2,
            [{}, {"lead": 2}, {"double": True}, {"codec": BF16, "gradient_codec": BF16, "lead": 1}],
        ),
        (3, [{}, {"recompute": True}, {"stash": False}, {"schedule": "flush", "accumulate": 2}]),
        (4, [{}, {"accumulate": 3}, {"schedule": "2bw", "accumulate": 4}]),
    ],
)
def test_ranks_agree_with_the_oracle(ranks, stages: int, cases: list[dict]) -> None:
    answers = ranks(stages, trained, cases)
    for index, settings in enumerate(cases):
        for stage, module in enumerate(expected(stages, settings)):
            mine = answers[stage][index]
            for ours, theirs in zip(mine, module.parameters(), strict=True):
                assert torch.equal(ours, theirs), (settings, stage)


def in_bfloat16() -> tuple[list[torch.Tensor], bool]:
    """Autocast: what is between the stages is bfloat16, and travels as such, exactly."""
    pipe = build(autocast=torch.bfloat16)
    losses = [r.loss for r in pipe.train(oracle.small_batches(UPDATES), UPDATES)]
    sent = UPDATES * 2 * oracle.BATCH * oracle.WIDTH
    assert pipe.account.bytes == sent
    return oracle.weights(pipe.module), all(x is None or x.isfinite() for x in losses)


def test_autocast(ranks) -> None:
    parts = oracle.small_stages(2)
    pipeline = SimulatedPipeline(
        parts,
        [oracle.adamw(part) for part in parts],
        loss=oracle.small_loss,
        autocast=torch.bfloat16,
    )
    for _ in pipeline.train(oracle.small_batches(UPDATES), UPDATES):
        pass
    for (mine, finite), part in zip(ranks(2, in_bfloat16), parts, strict=True):
        assert finite
        assert all(torch.equal(a, b) for a, b in zip(mine, part.parameters(), strict=True))


def test_one_stage_is_plain_training(ranks) -> None:
    """Identity (g), without the oracle."""
    (mine,) = ranks(1, trained, [{}])[0]
    (module,) = oracle.small_stages(1)
    optimizer = oracle.adamw(module)
    for x, y in oracle.small_batches(UPDATES):
        oracle.small_loss(module(x), y).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(mine, module.parameters(), strict=True))


# -- several calls, evaluation, what is counted ---------------------------------------------------


def several_calls() -> dict:
    pipe = build(gradient_codec=Int8())
    batches = oracle.small_batches(10)
    seen: list[int] = []
    first = [r.update for r in pipe.train(batches[:4], 4, before=seen.append)]
    bytes_of_four = pipe.account.bytes
    evaluated = pipe.evaluate(
        [(batches[0][0], batches[0][1]), (batches[1][0][:2], batches[1][1][:2])]
    )
    out = pipe.forward(batches[0][0][:1])
    shapes = [None if o is None else tuple(o.shape) for _, o in pipe.outputs(batches[:3])]
    assert shapes == [(oracle.BATCH, oracle.WIDTH) if pipe.last else None] * 3
    before = [p.clone() for p in pipe.module.parameters()]
    again = pipe.evaluate(iter(batches[:2]))
    assert pipe.account.bytes == bytes_of_four, "evaluation is no cost of the method"
    assert all(torch.equal(a, b) for a, b in zip(before, pipe.module.parameters(), strict=True))
    second = [r.update for r in pipe.train(itertools.cycle(batches[4:]), 3)]
    return {
        "updates": first + second,
        "seen": seen,
        "bytes": bytes_of_four,
        "evaluated": evaluated,
        "again": again,
        "out": out,
        "weights": oracle.weights(pipe.module),
        "steps": pipe.account.steps,
    }


def test_several_calls_and_evaluation(ranks) -> None:
    answers = ranks(2, several_calls)
    for answer in answers:
        assert answer["updates"] == list(range(7))
        assert answer["seen"] == [0, 1, 2, 3]
        assert answer["steps"] == 7
    a, b = answers
    assert a["evaluated"] == b["evaluated"]
    assert a["out"] is None
    assert b["out"].shape == (1, oracle.WIDTH)
    values = oracle.BATCH * oracle.WIDTH
    assert a["bytes"] == 4 * 4 * values, "activations in fp32"
    assert b["bytes"] == 4 * Int8().payload_bytes(Int8().part(values, 1)), "gradients in int8"


def weighted_evaluation() -> tuple[float, float]:
    pipe = build()
    batches = oracle.small_batches(2)
    short = [(batches[0][0], batches[0][1]), (batches[1][0][:1], batches[1][1][:1])]
    counted = pipe.evaluate(short, weight=lambda y: float(len(y)))
    return pipe.evaluate(short), counted


def test_evaluation_is_the_mean_over_targets(ranks) -> None:
    whole = nn.Sequential(*oracle.small_stages(3))
    batches = oracle.small_batches(2)
    x = torch.cat([batches[0][0], batches[1][0][:1]])
    y = torch.cat([batches[0][1], batches[1][1][:1]])
    wanted = oracle.small_loss(whole(x), y).item()
    for means in ranks(3, weighted_evaluation):
        assert means == pytest.approx((wanted, wanted), rel=1e-6)


# -- with a method between replicas ---------------------------------------------------------------


def mesh_of_two_by_two() -> list[torch.Tensor]:
    """2 stages x 2 replicas; every stage's replicas average their gradients."""
    tw.init(timeout=20)
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "stage"))
    stage, replica = mesh["stage"].get_local_rank(), mesh["replica"].get_local_rank()
    module = oracle.small_stages(2)[stage]
    optimizer = tw.GradientAverage(oracle.adamw(module), group=mesh["replica"])
    pipe = tw.AsyncPipeline(
        module, optimizer, group=mesh["stage"], loss=oracle.small_loss, update=optimizer.step
    )
    batches = oracle.small_batches(2 * UPDATES)[replica::2]
    for _ in pipe.train(batches, UPDATES):
        pass
    return oracle.weights(module)


def test_replicas_of_a_stage_average_by_a_method(ranks) -> None:
    answers = ranks(4, mesh_of_two_by_two)
    parts = oracle.small_stages(2)
    # Both replicas of an update as one micro-batch: the mean of their gradients.
    pairs = oracle.small_batches(2 * UPDATES)
    joined = [
        (torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]]))
        for a, b in zip(pairs[::2], pairs[1::2], strict=True)
    ]
    wanted, _ = oracle.train(
        parts, oracle.adamw, oracle.small_loss, joined, oracle.one_f_one_b(2), clip=float("inf")
    )
    for rank, mine in enumerate(answers):
        stage = rank % 2
        for ours, theirs in zip(mine, wanted[stage].parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-4, atol=1e-5)
        for ours, theirs in zip(mine, answers[stage], strict=True):
            assert torch.equal(ours, theirs), "replicas of a stage stay equal"


DELAY, LATE = 5, 0.3


def with_a_slow_stage() -> list[float]:
    """When each update of this rank was done; the last stage of replica 1 is late by LATE seconds
    in every one."""
    world = tw.init(timeout=20)
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "stage"))
    module = oracle.small_stages(2)[mesh["stage"].get_local_rank()]
    optimizer = tw.SparseAverage(
        oracle.adamw(module), fraction=0.5, delay=DELAY, group=mesh["replica"]
    )

    def update() -> None:
        if world.rank == 3:
            time.sleep(LATE)
        optimizer.step()

    pipe = tw.AsyncPipeline(
        module, optimizer, group=mesh["stage"], loss=oracle.small_loss, update=update
    )
    return [time.time() for _ in pipe.train(oracle.small_batches(12), 12)]


@pytest.mark.alone
def test_a_slow_stage_slows_its_replica_and_others_only_at_the_bounded_lag(ranks) -> None:
    answers = ranks(4, with_a_slow_stage)
    for fast, slow in ((answers[0], answers[2]), (answers[1], answers[3])):
        # the first stage has its gradient before the late update, so it is one update ahead
        assert fast[DELAY - 1] < slow[2], "it goes on alone"
        for update in range(DELAY, 12):
            assert fast[update] > slow[update - DELAY] - LATE / 2, "and waits for what is due"


# -- refusals -------------------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(oracle.WIDTH, oracle.WIDTH)

    def forward(self, x):
        return self.linear(x), x


class Rounded(Pair):
    def forward(self, x):
        return self.linear(x).long()


def refused(kind: str) -> str:
    """The error of this stage of three, one of which or all of which have something wrong."""
    rank = dist.get_rank()
    module: nn.Module = oracle.small_stages(3)[rank]
    loss, settings = oracle.small_loss, {}
    batches = oracle.small_batches(6)
    if kind == "pair" and rank == 1:
        module = Pair()
    if kind == "integers" and rank == 1:
        module = Rounded()
    if kind == "width" and rank == 2:
        module = nn.Linear(5, 5)
    if kind == "loss":
        loss = lambda out, y: (out - y).square()  # noqa: E731
    if kind == "settings":
        settings = {"accumulate": 1 + rank % 2}
    if kind == "shape":
        batches[3] = (batches[3][0][:2], batches[3][1][:2])
    if kind == "short":
        batches = batches[:4]
    with pytest.raises(ValueError) as caught:  # noqa: PT011, PT012
        pipe = tw.AsyncPipeline(module, oracle.adamw(module), loss=loss, **settings)
        list(pipe.train(batches, 6))
    dist.barrier()  # nobody leaves before all have been refused
    return str(caught.value)


def all_refused(kinds: list[str]) -> dict[str, str]:
    tw.init(timeout=20)
    return {kind: refused(kind) for kind in kinds}


def test_bad_input_is_refused_on_all_stages(ranks) -> None:
    wanted = {
        "pair": "stage 1 must give one tensor, but its module Pair gave tuple",
        "integers": "stage 1 gives a tensor of torch.int64",
        "width": "stage 2 fails on an input of",
        "loss": "must give a tensor of no dimension",
        "settings": "'accumulate' differs between ranks: 1 on ranks 0, 2; 2 on rank 1",
        "shape": "micro-batch 3 is (2, 6) float32, the first was (3, 6) float32",
        "short": "batches ended after 4 micro-batches",
    }
    for messages in ranks(3, all_refused, list(wanted)):
        for kind, words in wanted.items():
            assert words in messages[kind], messages[kind]


def left_early() -> str:
    pipe = build()
    for record in pipe.train(oracle.small_batches(6), 6):
        if record.update == 1:
            break
    with pytest.raises(RuntimeError, match="left before its last update") as caught:
        pipe.train([], 1)
    return str(caught.value)


def test_a_run_left_early_ends_the_pipeline(ranks) -> None:
    ranks(1, left_early)


def test_bad_settings_are_refused() -> None:
    module = oracle.small_stages(1)[0]

    def make(**settings):
        return tw.AsyncPipeline(module, oracle.adamw(module), loss=oracle.small_loss, **settings)

    for settings, words in [
        (
            {"codec": tw.codecs.ErrorFeedback(Int8())},
            r"\(codec=...\) takes no error feedback.*use Int8\(block=256\)",
        ),
        ({"gradient_codec": "int8"}, r"gradient_codec=...\) takes an object of thinwire.codecs"),
        ({"clip": -1}, "clip"),
        ({"schedule": "2bw", "stash": False}, "2bw"),
        ({"look_ahead": -0.5}, r"look_ahead=...\) takes a number >= 0"),
        ({"look_ahead": 1.0, "stash": False}, "stash=False"),
        ({"schedule": "gpipe"}, r"schedule=...\) takes one of 1f1b, 2bw, flush"),
    ]:
        with pytest.raises(ValueError, match=words):
            make(**settings)

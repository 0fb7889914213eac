"""`late`: steps with the momentum of the step before, and ahead; real ranks against the oracles."""

import copy
import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import thinwire as tw
from tests.conftest import Ranks
from tests.hosts import on_hosts
from tests.methods.onebit import one_bit_oracle as oracle
from tests.methods.onebit.one_bit_oracle import SHAPES
from thinwire.lab import Link
from thinwire.methods.onebit.delayed_step import DelayedStep
from thinwire.methods.onebit.mean_norm import shortening
from thinwire.wire.agreement import digest

LR, FREEZE, STEPS = 0.02, 6, 10
ORDER = [2, 1, 0]  # of the bucket, when no backward pass has told another


def trained(kind: str, size: int, settings: dict[str, Any]) -> list[Tensor]:
    build = getattr(tw, kind)
    given = {"lr": LR, "freeze_at": FREEZE, "delayed_step": True} | settings
    weights, optimizer = oracle.run(build, size, STEPS, **given)
    optimizer.finish()
    return [w.detach() for w in weights]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    ("kind", "decay", "more"),
    [
        ("OneBitAdam", 0.0, {"whiten": True, "forget": True}),
        ("OneBitAdam", 0.1, {"whiten": False, "forget": False}),
        ("OneBitLamb", 0.1, {}),
    ],
)
def test_both_methods_equal_their_oracles(
    ranks: Ranks, size: int, kind: str, decay: float, more: dict[str, Any]
) -> None:
    answers = ranks(size, trained, kind, size, {"weight_decay": decay} | more)
    start, gradient = oracle.problem(size, SHAPES)

    def reordered(rank: int, step: int, x: list[Tensor]) -> list[Tensor]:
        back = [x[ORDER.index(i)] for i in range(3)]
        return [gradient(rank, step, back)[i] for i in ORDER]

    plain = oracle.adam if kind == "OneBitAdam" else oracle.lamb
    settings = {"lam": decay, "delayed_step": True} | more
    expected = plain([start[i] for i in ORDER], reordered, size, STEPS, LR, FREEZE, **settings)
    for weights in answers:
        for i, wanted in zip(ORDER, expected, strict=True):
            torch.testing.assert_close(weights[i].double(), wanted, rtol=1e-4, atol=1e-5)
        assert all(map(torch.equal, weights, answers[0])), "replicas hold the same bits"


def saved(size: int, late: bool, last: int) -> tuple[Any, Any, list[Tensor]]:
    weights, optimizer = oracle.run(
        tw.OneBitAdam, size, last, lr=LR, freeze_at=FREEZE, bucket_mb=1e-5, delayed_step=late
    )
    own, portable = copy.deepcopy(optimizer.state_dict()), optimizer.portable_state_dict()
    return own, portable, [w.detach() for w in weights]


def resumed(states: list[Any], now: list[Tensor], late: bool, last: int) -> list[Tensor]:
    rank = tw.init().rank
    _, gradient = oracle.problem(tw.Wire().size, SHAPES)
    weights = [nn.Parameter(w.clone()) for w in now]
    optimizer = tw.OneBitAdam(weights, lr=LR, freeze_at=FREEZE, bucket_mb=1e-5, delayed_step=late)
    optimizer.load_state_dict(states[rank % len(states)])
    oracle.advance(optimizer, weights, gradient, rank, STEPS + 1, last)
    return [w.detach() for w in weights]


def test_a_saved_run_goes_on_bit_for_bit(ranks: Ranks) -> None:
    """What had left and was not used yet is in the state."""
    before = ranks(2, saved, 2, True, STEPS)
    straight = ranks(2, saved, 2, True, STEPS + 4)[0][2]
    for weights in ranks(2, resumed, [own for own, *_ in before], before[0][2], True, STEPS + 4):
        assert all(map(torch.equal, weights, straight))
    answers = ranks(3, resumed, [before[0][1]], before[0][2], True, STEPS + 4)
    assert all(map(torch.equal, answers[0], answers[2])), "on another number of ranks"


def waiting_step(state: dict[str, Any], now: list[Tensor], late: bool) -> list[Tensor]:
    """What loading alone leaves to be done, without a further gradient."""
    tw.init()
    weights = [nn.Parameter(w.clone()) for w in now]
    optimizer = tw.OneBitAdam(weights, lr=LR, freeze_at=FREEZE, bucket_mb=1e-5, delayed_step=late)
    optimizer.load_state_dict(state)
    optimizer.finish()
    return [w.detach() - n for w, n in zip(weights, now, strict=True)]


def test_a_momentum_that_waits_is_used_whoever_loads_it(ranks: Ranks) -> None:
    _, portable, now = ranks(2, saved, 2, True, STEPS)[0]
    late, plain = (ranks(1, waiting_step, portable, now, kind)[0] for kind in (True, False))
    assert all(map(torch.equal, late, plain))
    assert all(float(step.norm()) > 0 for step in late)
    _, portable, now = ranks(2, saved, 2, False, STEPS)[0]
    assert not any(s.any() for s in ranks(1, waiting_step, portable, now, True)[0])


def poisoned(bad: float) -> tuple[int, int, bytes, bool]:
    weights, optimizer = oracle.run(
        tw.OneBitAdam, 2, FREEZE + 2, lr=LR, freeze_at=FREEZE, bucket_mb=1e-5, delayed_step=True
    )
    for w in weights:
        w.grad = torch.ones_like(w)
    if optimizer.wire.rank == 1:  # one value of one bucket of one rank
        weights[0].grad.view(-1)[3] = bad
    optimizer.step()  # takes the step of the gradients before, which were good
    before = [w.detach().clone() for w in weights]
    m = [bucket.m.clone() for bucket in optimizer.buckets]
    errors = copy.deepcopy([bucket.feedback.worker.error for bucket in optimizer.buckets])
    optimizer.state_dict()  # lands it
    still = all(map(torch.equal, before, weights))
    still &= all(map(torch.equal, m, [bucket.m for bucket in optimizer.buckets]))
    now = [bucket.feedback.worker.error for bucket in optimizer.buckets]
    still &= all(map(torch.equal, errors, now))
    return optimizer.account.skipped, optimizer.steps, digest(weights), still


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_value_skips_its_own_step_on_all_ranks(ranks: Ranks, bad: float) -> None:
    answers = ranks(2, poisoned, bad)
    assert answers[0] == answers[1]
    assert answers[0][:2] == (1, FREEZE + 2)
    assert answers[0][3], "no trace in weights, momentum or errors"


def with_backward(overlap: bool, nodes: bool, dense: bool, clip: float | None) -> bytes:
    rank = tw.init().rank
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 1))
    groups = [{"params": net[0].parameters()}, {"params": net[2:].parameters()}]
    if dense:
        groups[0]["compress"] = False
    settings: dict[str, Any] = {"bucket_mb": 1e-4, "overlap": overlap, "clip": clip}
    if nodes:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "rank"))
        settings |= {"group": mesh["node"], "inside": mesh["rank"]}
    optimizer = tw.OneBitAdam(groups, lr=1e-2, freeze_at=3, delayed_step=True, **settings)
    for step in range(8):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        (net(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.finish()
    assert optimizer.steps == 8
    return digest(net.parameters())


@pytest.mark.parametrize(
    ("nodes", "dense", "clip"),
    [(False, False, None), (False, True, 0.5), (True, False, None), (True, False, 0.5)],
)
def test_overlap_changes_when_and_not_what(
    ranks: Ranks, nodes: bool, dense: bool, clip: float | None
) -> None:
    size = 4 if nodes else 2
    during = ranks(size, with_backward, True, nodes, dense, clip)
    after = ranks(size, with_backward, False, nodes, dense, clip)
    assert len({*during, *after}) == 1


def waiting_for_the_norm(dense: bool) -> bytes:
    def measure(self: Any) -> None:
        self.factor = shortening(self.norms.estimate(self.spread()), self.clip)

    with mock.patch.object(DelayedStep, "measure", lambda self: measure(self._clipping)):
        return with_backward(True, False, dense, 0.5)


@pytest.mark.parametrize("dense", [False, True])
def test_a_norm_on_its_way_changes_when_and_not_what(ranks: Ranks, dense: bool) -> None:
    waited = ranks(2, waiting_for_the_norm, dense)
    assert {*waited} == {*ranks(2, with_backward, True, False, dense, 0.5)}
    assert {*waited} != {*ranks(2, with_backward, True, False, dense, None)}, "it clips"


def test_shards_and_late_are_refused_together() -> None:
    with pytest.raises(ValueError, match=r"delayed_step=True.*leave one of the two out"):
        tw.OneBitAdam([nn.Parameter(torch.zeros(3))], shard_state=True, delayed_step=True)


WAITING = """
import time, torch, thinwire as tw

tw.init()
control = tw.Wire(name="control")
waited = []
for late, clip in ((False, None), (True, None), (True, 1.0)):
    weights = torch.nn.Parameter(torch.zeros(100_000))
    optimizer = tw.OneBitAdam([weights], freeze_at=1, delayed_step=late, clip=clip)
    for step in range(8):
        if step == 3:
            control.barrier()
            before = optimizer.account.exposed
        time.sleep(0.5)  # the compute
        weights.grad = torch.ones(100_000)
        optimizer.step()
    waited.append((optimizer.account.exposed - before) / 5)
    optimizer.finish()
print(json.dumps(waited))
"""


@pytest.mark.alone
def test_a_long_delay_is_not_waited_for() -> None:
    """50 ms each way: two phases of data, and what gloo says before it sends, are 200 ms."""
    for plain, late, clipped in on_hosts(WAITING, 2, Link.of("100mbit", delay="50ms")):
        assert plain > 0.1
        assert late < 0.02
        assert clipped < 0.02

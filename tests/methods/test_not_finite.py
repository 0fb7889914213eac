"""What is not finite on one replica: a gradient, its weights, its statistics, or all of it."""

import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import thinwire as tw
from tests.conftest import Failed
from thinwire.errors import NonFinite
from thinwire.methods.local.fragment import DROPPED
from thinwire.methods.shared import finite

PRESETS: dict[str, dict[str, Any]] = {
    "LocalSGD": {"every": 5},
    "SlowMo": {"every": 5},
    "DiLoCo": {"every": 5},
    "StreamingDiLoCo": {"every": 6, "fragments": 3, "delay": 1},
    "CO2": {"every": 5},
    "Overlapped": {"every": 5},
    "Eager": {"every": 5},
}
STEPS = 205


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 1))


def loss_of(model: nn.Module, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, 6, generator=generator)
    noise = torch.randn(16, 1, generator=generator)
    return (model(x) - x.prod(1, keepdim=True).tanh() - noise).square().mean()


def wrapped(kind: str, inner: torch.optim.Optimizer, **more: Any) -> tw.LocalUpdates:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(tw, kind)(inner, **{**PRESETS[kind], **more})


def spoil(model: nn.Module) -> None:
    first = next(model.parameters())
    assert first.grad is not None
    first.grad[0, 0] = math.nan


# -- one gradient, once --------------------------------------------------------------------------


def last_losses(seed: int, broken: bool) -> dict[str, tuple[float, int]]:
    """The mean loss over the last steps, by method, and the steps this rank has skipped."""
    tw.init()
    found = {}
    for kind in PRESETS:
        model = net(seed)
        optimizer = wrapped(kind, torch.optim.AdamW(model.parameters(), lr=1e-2))
        losses = []
        for step in range(STEPS):
            loss = loss_of(model, 100_000 * seed + 10 * step + optimizer.wire.rank)
            loss.backward()
            if broken and step == 5 and optimizer.wire.rank == 1:
                spoil(model)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        optimizer.finish()
        assert all(bool(torch.isfinite(p).all()) for p in model.parameters()), kind
        found[kind] = sum(losses[-50:]) / 50, int(optimizer.account.skipped)
    return found


def test_one_nan_gradient_costs_one_step_and_nothing_after_200_more(ranks) -> None:
    clean = [ranks(2, last_losses, seed, False)[0] for seed in (0, 1, 2)]
    healthy, hit = ranks(2, last_losses, 0, True)
    for kind in PRESETS:
        losses = [run[kind][0] for run in clean]
        noise = max(losses) - min(losses)
        assert abs(healthy[kind][0] - losses[0]) < noise, f"{kind}: {healthy[kind]} after {losses}"
        assert (healthy[kind][1], hit[kind][1]) == (0, 1), f"{kind}: only the step itself is lost"


def sharded_case() -> tuple[list[float], int]:
    """2 replicas x 2 shards; one shard of one replica has a NaN: all of that replica skips."""
    tw.init()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model = net(0)
    for layer in model:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = tw.Overlapped(inner, every=4, group=mesh["replica"])
    for step in range(9):
        loss_of(model, 10 * step + dist.get_rank()).backward()
        if step == 2 and dist.get_rank() == 3:
            first: Any = next(model.parameters())
            first.grad.to_local()[0, 0] = math.nan
        optimizer.step()
        optimizer.zero_grad()
    taken = {float(entry["step"]) for entry in inner.state.values()}
    finite_moments = all(
        bool(torch.isfinite(entry["exp_avg"].to_local()).all()) for entry in inner.state.values()
    )
    return [*taken, float(finite_moments)], int(optimizer.account.skipped)


def test_a_replica_skips_a_step_with_all_its_shards(ranks) -> None:
    answers = ranks(4, sharded_case)
    assert answers == [([9.0, 1.0], 0)] * 2 + [([8.0, 1.0], 1)] * 2


# -- a replica that does not come back ------------------------------------------------------------


def stuck_case(kind: str) -> str:
    """From step 5 on, no gradient of rank 1 is finite."""
    tw.init()
    finite.STUCK = 8
    model = net(0)
    optimizer = wrapped(kind, torch.optim.AdamW(model.parameters(), lr=1e-2))

    def train() -> None:
        for step in range(100):
            loss_of(model, 10 * step + optimizer.wire.rank).backward()
            if step >= 5 and optimizer.wire.rank == 1:
                spoil(model)
            optimizer.step()
            optimizer.zero_grad()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(NonFinite) as error:
            train()
    said = [str(w.message) for w in caught if "rank 1: the gradients" in str(w.message)]
    assert len(said) == (optimizer.wire.rank == 1)
    return str(error.value)


@pytest.mark.parametrize("kind", PRESETS)
def test_a_replica_without_finite_gradients_ends_the_run_of_all_by_name(ranks, kind: str) -> None:
    first, second = ranks(2, stuck_case, kind)
    assert first == second
    assert "rank 1 is not finite" in first
    assert f"the last {DROPPED} rounds" in first


def broken_weights_case(kind: str) -> tuple[str, int]:
    """Rank 0's weights are NaN at the end of every round."""
    tw.init()
    model = net(0)
    optimizer = wrapped(kind, torch.optim.SGD(model.parameters(), lr=1e-2))
    inner_step = optimizer.inner.step

    def step_and_break() -> None:
        inner_step()
        if optimizer.wire.rank == 0:
            next(model.parameters()).data.fill_(math.inf)

    optimizer.inner.step = step_and_break  # type: ignore[method-assign]
    for step in range(100):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        try:
            optimizer.step()
        except NonFinite as error:
            return str(error), step
    return "", 100


@pytest.mark.parametrize("kind", ["LocalSGD", "StreamingDiLoCo", "CO2", "Overlapped"])
def test_rounds_dropped_in_a_row_name_the_rank(ranks, kind: str) -> None:
    answers = ranks(3, broken_weights_case, kind)
    assert len(set(answers)) == 1, "all ranks give up at the same step"
    assert "rank 0 is not finite" in answers[0][0]


# -- the mean of the replicas ---------------------------------------------------------------------

KINDS = ["LocalSGD", "StreamingDiLoCo", "CO2", "Overlapped", "Eager", "SparseAverage"]


def averaging(kind: str, model: nn.Module) -> Any:
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if kind == "SparseAverage":
        return tw.SparseAverage(inner, fraction=0.25, delay=2, buffers=model.buffers())
    return wrapped(kind, inner, buffers=model.buffers())


def mean_case(kind: str, broken: list[int]) -> Any:
    """Weights of `broken` ranks are NaN before consensus() and finish()."""
    tw.init()
    model = net(0)
    optimizer = averaging(kind, model)
    for step in range(8):
        loss_of(model, 10 * step + optimizer.wire.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    if optimizer.wire.rank in broken:
        next(model.parameters()).data[0, 0] = math.nan
    own = flat(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with optimizer.consensus():
            inside = flat(model)
        after = flat(model)
        optimizer.finish()
    said = [str(w.message) for w in caught if "left out" in str(w.message)]
    return own, inside, torch.equal(own.nan_to_num(), after.nan_to_num()), flat(model), said


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("kind", KINDS)
def test_consensus_and_finish_leave_out_what_is_not_finite(ranks, kind: str) -> None:
    answers = ranks(3, mean_case, kind, [1])
    inside = [answer[1] for answer in answers]
    wanted = (answers[0][0] + answers[2][0]) / 2
    for answer in answers:
        torch.testing.assert_close(answer[1], wanted, rtol=1e-5, atol=1e-6)
        assert torch.equal(answer[1], inside[0])
        assert answer[2], "the own weights come back"
        assert bool(answer[3].isfinite().all())
        assert torch.equal(answer[3], answers[0][3]), "finish() leaves all replicas equal"
        assert all("rank 1 is" in text for text in answer[4])
        assert answer[4]


def none_left_case(kind: str) -> None:
    mean_case(kind, [0, 1])


@pytest.mark.parametrize("kind", ["LocalSGD", "SparseAverage"])
def test_a_mean_of_no_finite_replica_is_refused_by_all(ranks, kind: str) -> None:
    for error in ranks(2, none_left_case, kind, errors=True):
        assert isinstance(error, Failed)
        assert error.kind == "NonFinite"
        assert "ranks 0, 1 are not finite" in error.message


def statistics_case(delay: int | str) -> list[bool]:
    """A batch of rank 1 is not finite: BatchNorm's statistics would never be again."""
    tw.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = tw.LocalUpdates(inner, every=4, delay=delay, buffers=model.buffers())  # type: ignore[arg-type]
    whole = []
    for step in range(16):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        if step == 5 and optimizer.wire.rank == 1:
            x[0, 0] = math.nan
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        whole.append(all(bool(torch.isfinite(b).all()) for b in model.buffers()))
    optimizer.finish()
    whole.append(all(bool(torch.isfinite(b).all()) for b in model.buffers()))
    return whole


@pytest.mark.parametrize(("delay", "healed"), [(0, 7), ("round", 11)])
def test_statistics_that_broke_are_taken_over_from_the_others(ranks, delay, healed: int) -> None:
    healthy, hit = ranks(2, statistics_case, delay)
    assert all(healthy)
    assert hit == [not 5 <= step < healed for step in range(17)]


# -- nothing to do --------------------------------------------------------------------------------


def test_a_replica_without_gradients_is_asked_whether_it_trains(monkeypatch) -> None:
    """As after load_state_dict(assign=True): the optimizer holds parameters nobody trains."""
    monkeypatch.setattr(finite, "IDLE", 4)
    model = net(0)
    optimizer = tw.LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), every=2)
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)

    def train() -> None:
        for step in range(9):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    with pytest.warns(UserWarning, match=r"assign=True") as caught:
        train()
    assert len(caught) == 1


def test_a_gradient_of_every_kind_is_looked_at() -> None:
    parameters = [nn.Parameter(torch.zeros(3, dtype=t)) for t in (torch.half, torch.complex64)]
    parameters.append(nn.Parameter(torch.zeros(4, 2)))
    assert finite.largest_gradient(parameters) == 0
    parameters[0].grad = torch.tensor([1.0, -7.0, 2.0]).half()
    parameters[1].grad = torch.tensor([1 + 0j, 0 - 9j, 0j])
    rows = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.tensor([[3.0, -11.0]]), (4, 2))
    parameters[2].grad = rows
    assert finite.largest_gradient(parameters) == 11
    parameters[1].grad = torch.tensor([1 + 0j, complex(0, math.nan), 0j])
    assert math.isnan(finite.largest_gradient(parameters))

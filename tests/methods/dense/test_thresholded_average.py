"""GradientAverage with thresholds: against the oracle, by buckets, with and without overlap."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.conftest import Ranks
from tests.wire.codecs.threshold_oracle import Mean
from thinwire.wire.codecs import Codec, Dense, Feedback, Int8, Threshold

STEPS, LR = 7, 0.1


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 30))


def backward(net: nn.Module, rank: int, step: int) -> None:
    x = torch.randn(8, 30, generator=torch.Generator().manual_seed(100 * step + rank))
    (net(x) - x.flip(1)).square().mean().backward()


def trained(
    codec: Codec | Feedback, overlap: Any = "auto"
) -> tuple[list[Tensor], dict[str, Any], Any]:
    tw.init()
    net = model()
    inner = torch.optim.SGD(net.parameters(), lr=LR)
    optimizer = tw.GradientAverage(inner, codec=codec, bucket_mb=0.004, overlap=overlap)
    early = []
    for step in range(STEPS):
        backward(net, optimizer.wire.rank, step)
        early.append(optimizer.engine.reducer.launched)
        optimizer.step()
        optimizer.zero_grad()
    found = [p.detach().clone() for p in net.parameters()]
    return found, optimizer.account.snapshot(), (early, [b.indices for b in optimizer.buckets])


@pytest.mark.parametrize("size", [2, 3])
def test_equals_the_oracle_bucket_by_bucket(ranks: Ranks, size: int) -> None:
    settings = {"density": 0.05, "value_bits": 32}
    answers = ranks(size, trained, Threshold(**settings))
    buckets = answers[0][2][1]
    assert len(buckets) > 1
    net = model()
    parameters = list(net.parameters())
    means = [Mean(size, [parameters[i].numel() for i in b], 0.05) for b in buckets]
    for step in range(STEPS):
        gradients = []
        for rank in range(size):
            net.zero_grad()
            backward(net, rank, step)
            gradients.append([p.grad.clone() for p in parameters])  # type: ignore[union-attr]
        for bucket, mean in zip(buckets, means, strict=True):
            flats = [torch.cat([g[i].reshape(-1) for i in bucket]) for g in gradients]
            parts = mean.of(flats).split([parameters[i].numel() for i in bucket])
            for index, part in zip(bucket, parts, strict=True):
                parameters[index].data.sub_(LR * part.view_as(parameters[index]))
    for found, _, _ in answers:
        torch.testing.assert_close(found, [p.detach() for p in parameters], rtol=1e-4, atol=1e-5)
        assert all(map(torch.equal, found, answers[0][0]))


@pytest.mark.parametrize("codec", [Threshold(0.05, momentum=0.9), Int8(), Dense()], ids=repr)
def test_overlap_changes_when_and_not_what(ranks: Ranks, codec: Any) -> None:
    late, soon = (ranks(2, trained, codec, how) for how in (False, "auto"))
    for (ours, one, (first, _)), (theirs, other, (second, buckets)) in zip(late, soon, strict=True):
        assert all(map(torch.equal, ours, theirs))
        assert one["bytes"] == other["bytes"]
        assert first == [0] * STEPS
        assert second == [0] + [len(buckets)] * (STEPS - 1), "all in the air before step()"


def loops(kind: str) -> tuple[bool, bool]:
    """(whether the loop was served with overlap, whether its replicas are equal)."""
    tw.init()
    net = model()
    optimizer = tw.GradientAverage(torch.optim.SGD(net.parameters(), lr=LR))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        rank = optimizer.wire.rank
        if kind == "accumulates":
            backward(net, rank, 50 + step)
        if kind == "says so":
            with optimizer.accumulating():
                backward(net, rank, 50 + step)
        if kind == "scales":
            x = torch.randn(8, 30)
            scaler.scale(net(x).square().mean()).backward()
            scaler.unscale_(optimizer)
            optimizer.average()
            scaler.step(optimizer)
            scaler.update()
        else:
            backward(net, rank, step)
            if kind == "clips":
                nn.utils.clip_grad_norm_(net.parameters(), 0.01)
            optimizer.step()
        optimizer.zero_grad()
    same = len(set(optimizer.wire.gather_bytes(tw.wire.agreement.digest(net.parameters())))) == 1
    return bool(optimizer.overlap), same


@pytest.mark.parametrize(
    ("kind", "overlapped"),
    [
        ("plain", True),
        ("says so", True),
        ("accumulates", False),
        ("clips", False),
        ("scales", False),
    ],
)
def test_any_loop_works_and_only_those_that_can_overlap(
    ranks: Ranks, kind: str, overlapped: bool
) -> None:
    assert ranks(2, loops, kind) == [(overlapped, True)] * 2


def test_a_loop_that_changes_its_ways_is_told() -> None:
    net = model()
    optimizer = tw.GradientAverage(torch.optim.SGD(net.parameters(), lr=LR))
    backward(net, 0, 0)
    optimizer.step()
    optimizer.zero_grad()
    backward(net, 0, 1)
    with pytest.raises(RuntimeError, match=r"second backward pass before step.*accumulating"):
        backward(net, 0, 2)
    with pytest.raises(ValueError, match=r'overlap=...\) takes True, False or "auto", got 1.5'):
        tw.GradientAverage(torch.optim.SGD(net.parameters(), lr=LR), overlap=1.5)  # type: ignore

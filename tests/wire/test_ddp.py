"""DDP on the books: the same gradients, every byte counted, a lost peer named."""

import itertools
import os
import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.wire.ddp import DdpMeter


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 300), nn.Linear(300, 3))


def batch(rank: int, step: int = 0) -> Tensor:
    return torch.randn(8, 20, generator=torch.Generator().manual_seed(10 * step + rank))


def gradients(metered: bool) -> tuple[list[list[Tensor]], dict[str, float]]:
    """Four backward passes; the second and third only add up."""
    tw.init()
    wire = tw.Wire(name="ddp")
    ddp = DistributedDataParallel(model(), process_group=wire.group, bucket_cap_mb=0.1)
    if metered:
        DdpMeter(ddp, wire)
    seen, sent = [], [wire.account.bytes]
    for step in range(4):
        x = batch(wire.rank, step)
        if step in (1, 2):
            with ddp.no_sync():
                ddp(x).square().sum().backward()
        else:
            ddp(x).square().sum().backward()
        seen.append([p.grad.clone() for p in ddp.parameters() if p.grad is not None])
        sent.append(wire.account.bytes)
        if step == 0:
            ddp.zero_grad()
    steps = [b - a for a, b in itertools.pairwise(sent)]
    return seen, wire.account.snapshot() | {"steps_bytes": steps}  # type: ignore[dict-item]


@pytest.mark.parametrize("n", [2, 3])
def test_gradients_and_bytes(ranks, n: int) -> None:
    metered, plain = ranks(n, gradients, True), ranks(n, gradients, False)
    size = sum(p.nbytes for p in model().parameters())
    for (ours, account), (theirs, _) in zip(metered, plain, strict=True):
        for step_ours, step_theirs in zip(ours, theirs, strict=True):
            for a, b in zip(step_ours, step_theirs, strict=True):
                # Halves are exact; thirds are rounded when DDP multiplies and when we divide.
                if n == 2:
                    assert torch.equal(a, b)
                else:
                    torch.testing.assert_close(a, b)
        first, *adding_up, last = account["steps_bytes"]
        buckets = account["transfers"] / 2
        assert buckets > 1, "the test must have several buckets"
        assert adding_up == [0, 0]
        assert abs(first - 2 * (n - 1) * size / n) <= buckets, "rounded down once a bucket"
        assert last == first
        assert account["exposed"] > 0
        assert account["hidden"] >= 0


def lose_a_peer(after: int) -> tuple[str, str]:
    """What backward, or DDP's own transfer in forward, raises, and what the wire makes of it."""
    tw.init(timeout=1.5)
    wire = tw.Wire(name="ddp")
    ddp = DistributedDataParallel(model(), process_group=wire.group)
    DdpMeter(ddp, wire)
    assert wire.explain(RuntimeError("shapes do not match")) is None
    for _ in range(after):
        ddp(batch(wire.rank)).sum().backward()
    if wire.rank == 1:
        os._exit(3)
    with pytest.raises(RuntimeError) as caught:
        ddp(batch(wire.rank)).sum().backward()
    return str(caught.value), str(wire.explain(caught.value))


def blamed(message: str) -> set[str]:
    return set(re.findall(r"rank (\d+) \(", message))


def test_a_peer_lost_during_backward_is_named(ranks) -> None:
    answers = ranks(3, lose_a_peer, 2, silent=[1])
    for message, explained in (answers[0], answers[2]):
        assert blamed(message) == {"1"}, message
        assert blamed(explained) == {"1"}, explained


def test_a_peer_lost_while_ddp_sorts_its_buckets_can_be_explained(ranks) -> None:
    answers = ranks(3, lose_a_peer, 1, silent=[1])  # it does so in the second forward
    for _, explained in (answers[0], answers[2]):
        assert blamed(explained) == {"1"}, explained


def test_one_rank_has_nothing_to_meter() -> None:
    wire = tw.Wire()
    with pytest.raises(ValueError, match="at least two ranks"):
        DdpMeter(model(), wire)  # type: ignore[arg-type]

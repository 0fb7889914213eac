"""Dense inside a node, one bit between nodes, on a mesh of two nodes with two ranks each."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import thinwire as tw
from tests.conftest import Ranks
from tests.methods.onebit import one_bit_oracle as oracle
from tests.methods.onebit.one_bit_oracle import SHAPES, flat, split

LR, FREEZE = 0.02, 4


def build(kind: str, **settings: Any) -> tuple[list[nn.Parameter], Any, Any]:
    tw.init()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "rank"))
    start, gradient = oracle.problem(4, SHAPES)
    weights = [nn.Parameter(t.float()) for t in start]
    settings = {
        "lr": LR,
        "freeze_at": FREEZE,
        "group": mesh["node"],
        "inside": mesh["rank"],
    } | settings
    return weights, getattr(tw, kind)(weights, **settings), gradient


def trained(kind: str, steps: int, settings: dict[str, Any]) -> tuple[list[Tensor], list[int]]:
    weights, optimizer, gradient = build(kind, **settings)
    sent = []
    for step in range(1, steps + 1):
        before = optimizer.account.bytes
        oracle.advance(optimizer, weights, gradient, optimizer.wire.world.rank, step, step)
        sent.append(optimizer.account.bytes - before)
    return [w.detach() for w in weights], sent


def adam_oracle(steps: int) -> list[Tensor]:
    """1-bit Adam among two nodes, each part of the bucket with an exchange of its own."""
    start, gradient = oracle.problem(4, SHAPES)
    order = [2, 1, 0]
    like = [start[i] for i in order]
    x = flat(like)
    m, v = torch.zeros_like(x), torch.zeros_like(x)
    exchanges = [oracle.Exchange(2), oracle.Exchange(2)]
    width = math.ceil(x.numel() / 2)
    squares: list[float] = []
    for t in range(1, steps + 1):
        now = [split(x, like)[order.index(i)] for i in range(3)]
        each = [flat([gradient(rank, t, now)[i] for i in order]) for rank in range(4)]
        nodes = [(each[0] + each[1]) / 2, (each[2] + each[3]) / 2]
        if t <= FREEZE:
            g = sum(nodes) / 2
            squares.append(float(g.square().sum()))
            m = 0.9 * m + 0.1 * g
            v = 0.999 * v + 0.001 * g * g
            hat = v / (1 - 0.999**t)
            if t == FREEZE:
                frozen = oracle.floored(hat, like)
        else:
            root = frozen.sqrt() + 1e-8
            payloads = [(0.9 * m + 0.1 * g) / root for g in nodes]
            parts = zip(*(p.split(width) for p in payloads), strict=True)
            m = root * torch.cat([e.mean(list(p)) for e, p in zip(exchanges, parts, strict=True)])
            hat = frozen * oracle.forgotten(squares, t, 0.999)
        x = x - LR * m / (1 - 0.9**t) / (hat.sqrt() + 1e-8)
    return [split(x, like)[order.index(i)] for i in range(3)]


def test_adam_equals_the_oracle_and_sends_half_between_the_nodes(ranks: Ranks) -> None:
    answers = ranks(4, trained, "OneBitAdam", 7, {})
    for weights, sent in answers:
        assert all(map(torch.equal, weights, answers[0][0])), "the same bits on all four"
        for got, wanted in zip(weights, adam_oracle(7), strict=True):
            torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-5)
        # 39 values: parts of 20 and 19, one bit each padded to 16, between two nodes; and a byte
        # for each of the three tensors, which says whether it is used
        assert sent[-1] == 2 * 32 // 16 + 8 + 3


@pytest.mark.parametrize("kind", ["OneBitAdam", "OneBitLamb"])
def test_clipping_and_several_buckets(ranks: Ranks, kind: str) -> None:
    answers = ranks(4, trained, kind, 7, {"clip": 0.5, "bucket_mb": 1e-5})
    for weights, _ in answers:
        assert all(map(torch.equal, weights, answers[0][0]))
        assert all(bool(w.isfinite().all()) for w in weights)


def poisoned() -> tuple[bool, int]:
    weights, optimizer, gradient = build("OneBitAdam", bucket_mb=1e-5)
    rank = optimizer.wire.world.rank
    oracle.advance(optimizer, weights, gradient, rank, 1, 6)
    before = [w.detach().clone() for w in weights]
    for w in weights:
        w.grad = torch.ones_like(w)
    if rank == 3:  # one value of one part of one bucket
        weights[1].grad[0] = math.nan
    optimizer.step()
    return all(map(torch.equal, before, weights)), optimizer.account.skipped


def test_a_bad_part_skips_the_step_on_all_ranks_of_all_nodes(ranks: Ranks) -> None:
    assert ranks(4, poisoned) == [(True, 1)] * 4


def saved(steps: int) -> tuple[Any, Any, list[Tensor]]:
    weights, optimizer, gradient = build("OneBitAdam", bucket_mb=1e-5)
    oracle.advance(optimizer, weights, gradient, optimizer.wire.world.rank, 1, steps)
    return optimizer.state_dict(), optimizer.portable_state_dict(), [w.detach() for w in weights]


def resumed(states: list[Any], now: list[Tensor], nodes: bool, last: int) -> Any:
    world = tw.init()
    _, gradient = oracle.problem(4, SHAPES)
    weights = [nn.Parameter(w.clone()) for w in now]
    settings: dict[str, Any] = {"lr": LR, "freeze_at": FREEZE, "bucket_mb": 1e-5}
    if nodes:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "rank"))
        settings |= {"group": mesh["node"], "inside": mesh["rank"]}
    optimizer = tw.OneBitAdam(weights, **settings)
    optimizer.load_state_dict(states[world.rank % len(states)])
    loaded = optimizer.engine.store.portable_errors()
    oracle.advance(optimizer, weights, gradient, world.rank, 8, last)
    return [w.detach() for w in weights], loaded


def test_checkpoints_of_each_rank_and_for_any_layout(ranks: Ranks) -> None:
    states = ranks(4, saved, 7)
    _, portable, now = states[0]
    straight = ranks(4, saved, 10)[0][2]
    for weights, _ in ranks(4, resumed, [own for own, *_ in states], now, True, 10):
        assert all(map(torch.equal, weights, straight)), "bit for bit"
    assert all(float(e["worker"].norm()) > 0 < float(e["owner"].norm()) for e in portable["errors"])
    for size, nodes in ((4, True), (3, False), (1, False)):
        answers = ranks(size, resumed, [portable], now, nodes, 10)
        for weights, loaded in answers:
            torch.testing.assert_close(loaded, portable["errors"])
            assert all(map(torch.equal, weights, answers[0][0]))
    with pytest.raises(ValueError, match=r"one of \[2, 2\] ranks, and here are 1; .*portable"):
        resumed([states[0][0]], now, False, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 1)
        )

    def loss(self, seed: int) -> Tensor:
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
        return (self.layers(x) - x.sum(1, keepdim=True)).square().mean()


def overlapped(overlap: bool) -> bytes:
    rank = tw.init().rank
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "rank"))
    torch.manual_seed(0)
    net = Net()
    optimizer = tw.OneBitAdam(
        net.parameters(),
        lr=1e-2,
        freeze_at=3,
        bucket_mb=0.0001,
        overlap=overlap,
        group=mesh["node"],
        inside=mesh["rank"],
    )
    for step in range(8):
        net.loss(10 * step + rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    return tw.wire.agreement.digest(net.parameters())


def test_overlap_changes_when_and_not_what(ranks: Ranks) -> None:
    assert len({*ranks(4, overlapped, True), *ranks(4, overlapped, False)}) == 1

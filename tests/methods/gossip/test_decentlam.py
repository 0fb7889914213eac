"""DecentLaM and its yardsticks on real ranks, against the oracle and their promises."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import thinwire as tw
from tests.conftest import Ranks
from tests.methods.gossip import decent_oracle as oracle
from thinwire.errors import NonFinite
from thinwire.flat import Flat
from thinwire.methods.gossip.dsgd import require_agreement
from thinwire.wire import topology
from thinwire.wire.codecs import Dense, ErrorFeedback, Int4, Int8, OneBit

RATES = [0.1, 0.1, 0.05, 0.05, 0.2, 0.2, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1]
METHODS = ["DecentLaM", "DSGD", "DmSGD"]


def plain(weights: list[nn.Parameter]) -> list[Tensor]:
    return [w.detach().clone() for w in weights]


def all_methods(size: int, graphs: list[str]) -> dict[tuple[str, str], list[Tensor]]:
    answers = {}
    for graph in graphs:
        for kind in METHODS:
            weights, optimizer, gradient = oracle.build(
                kind, size, RATES[0], 0.9, topology=graph, weight_decay=0.1, bucket_mb=4e-5
            )
            oracle.advance(weights, optimizer, gradient, RATES)
            assert len(optimizer.buckets) > 1
            answers[kind, graph] = plain(weights)
    return answers


@pytest.mark.parametrize(
    ("size", "graphs"),
    [
        (1, ["ring"]),
        (2, ["ring", "complete"]),
        (3, ["ring", "edges:0-1,1-2"]),
        (4, ["ring", "torus", "complete", "exponential"]),
    ],
)
def test_every_method_equals_the_oracle_while_lr_changes(
    ranks: Ranks, size: int, graphs: list[str]
) -> None:
    start, gradient = oracle.problem(size)
    answers = ranks(size, all_methods, size, graphs)
    for kind, graph in answers[0]:
        matrix = topology.parse(graph, size).matrix
        expected = oracle.run(kind, matrix, start, gradient, RATES, 0.9, decay=0.1)
        for got, wanted in zip((a[kind, graph] for a in answers), expected, strict=True):
            for one, other in zip(got, wanted, strict=True):
                torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=2e-6)


def data_parallel(size: int, steps: int) -> list[Tensor]:
    """torch's own momentum SGD on the mean of all gradients."""
    start, gradient = oracle.problem(size)
    weights = [nn.Parameter(v.float()) for v in start]
    sgd = torch.optim.SGD(weights, lr=0.1, momentum=0.9, weight_decay=0.1)
    for step in range(1, steps + 1):
        now = [w.detach().double() for w in weights]
        everyone = [gradient(rank, step, now) for rank in range(size)]
        for k, weight in enumerate(weights):
            weight.grad = sum(g[k] for g in everyone).div(size).float()
        sgd.step()
    return plain(weights)


def _traffic() -> tuple[int, int, int]:
    """(bytes, transfers, neighbours) of one step, after the first, which also agrees on things."""
    weights, optimizer, gradient = oracle.build("DecentLaM", 4, 0.1, 0.9)
    oracle.advance(weights, optimizer, gradient, [0.1])
    before = optimizer.account.snapshot()
    oracle.advance(weights, optimizer, gradient, [0.1], first=2)
    now = optimizer.account.snapshot()
    sent, flights = (int(now[k] - before[k]) for k in ("bytes", "transfers"))
    return sent, flights, len(optimizer.neighbours)


def _meeting() -> tuple[Tensor, Tensor, Tensor, int]:
    """Own weights, those in the consensus, those after finish(); bytes of the consensus."""
    weights, optimizer, gradient = oracle.build("DecentLaM", 4, 0.1, 0.9)
    mean = torch.full((3,), float(optimizer.wire.rank))
    optimizer.engine.model_buffers._buffers = [mean]  # as if given
    optimizer.engine.model_buffers._flat = Flat([mean])
    oracle.advance(weights, optimizer, gradient, [0.1] * 3)
    own, sent = torch.cat([w.view(-1) for w in plain(weights)]), optimizer.account.bytes
    with optimizer.consensus():
        inside = torch.cat([w.view(-1) for w in plain(weights)])
        assert torch.allclose(mean, torch.tensor(1.5))
    assert torch.equal(own, torch.cat([w.view(-1) for w in plain(weights)]))
    assert torch.equal(mean, torch.full((3,), float(optimizer.wire.rank)))
    extra = optimizer.account.bytes - sent
    optimizer.finish()
    assert torch.allclose(mean, torch.tensor(1.5))
    return own, inside, torch.cat([w.view(-1) for w in plain(weights)]), extra


def _coded(codec: Any) -> tuple[list[Tensor], int]:
    weights, optimizer, gradient = oracle.build("DecentLaM", 4, 0.05, 0.9, codec=codec)
    oracle.advance(weights, optimizer, gradient, [0.05])
    before = optimizer.account.bytes
    oracle.advance(weights, optimizer, gradient, [0.05] * 39, first=2)
    return plain(weights), (optimizer.account.bytes - before) // 39


def _bad_gradient() -> list[tuple[bool, int]]:
    """Rank 1 has a NaN, then an infinity, in one bucket: finite weights, steps skipped."""
    answers = []
    for bad in (math.nan, math.inf):
        weights, optimizer, gradient = oracle.build("DecentLaM", 4, 0.1, 0.9, bucket_mb=4e-5)
        oracle.advance(weights, optimizer, gradient, [0.1] * 2)
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        if optimizer.wire.rank == 1:
            weights[0].grad.view(-1)[3] = bad  # type: ignore[union-attr]
        optimizer.step()
        oracle.advance(weights, optimizer, gradient, [0.1] * 2, first=4)
        answers.append((all(bool(w.isfinite().all()) for w in weights), optimizer.account.skipped))
    return answers


def _unused() -> tuple[bool, bool]:
    """A parameter without a gradient anywhere stays to the bit, decay or not; one that has it on
    one rank moves on its neighbours."""
    weights, optimizer, _ = oracle.build("DecentLaM", 4, 0.1, 0.9, weight_decay=0.3)
    start = plain(weights)
    for _ in range(6):
        if optimizer.wire.rank == 2:
            weights[1].grad = torch.ones_like(weights[1])
        optimizer.step()
        optimizer.zero_grad()
    same = all(torch.equal(start[i], weights[i]) for i in (0, 2, 3))
    return same, not torch.equal(start[1], weights[1])


def _low_precision() -> tuple[float, float]:
    """bfloat16 weights: how far the mean ends from the float32 run's, and how far it moved."""
    ends = []
    for dtype in (torch.float32, torch.bfloat16):
        start, gradient = oracle.problem(4)
        weights = [nn.Parameter(v.to(dtype)) for v in start]
        optimizer = tw.DecentLaM(weights, 0.05, 0.9)
        oracle.advance(weights, optimizer, gradient, [0.05] * 40)
        with optimizer.consensus():
            ends.append(torch.cat([w.detach().float().view(-1) for w in weights]))
    begin = torch.cat([v.view(-1) for v in oracle.problem(4)[0]]).float()
    return float((ends[0] - ends[1]).norm()), float((ends[0] - begin).norm())


def alone_and_together() -> dict[str, Any]:
    settings: dict[str, Any] = {"topology": "complete", "weight_decay": 0.1}
    weights, optimizer, gradient = oracle.build("DecentLaM", 4, 0.1, 0.9, **settings)
    oracle.advance(weights, optimizer, gradient, [0.1] * 12)
    return {"complete": plain(weights), "traffic": _traffic(), "meeting": _meeting()}


def test_complete_graph_is_data_parallelism_and_a_ring_talks_to_neighbours(ranks: Ranks) -> None:
    four = ranks(4, alone_and_together)
    numel = sum(math.prod(s) for s in oracle.SHAPES)
    wanted = data_parallel(4, 12)
    own = torch.stack([found["meeting"][0] for found in four])
    assert not torch.equal(own[0], own[1])
    for found in four:
        for got, other in zip(found["complete"], wanted, strict=True):
            torch.testing.assert_close(got, other, rtol=2e-5, atol=2e-6)
        assert found["traffic"] == (2 * 4 * numel, 1, 2), "to two neighbours, nothing else"
        _, inside, after, extra = found["meeting"]
        torch.testing.assert_close(inside, own.mean(0))
        torch.testing.assert_close(after, own.mean(0))
        assert extra == 0, "an evaluation is no part of what a method costs"


def odd_values() -> tuple[Any, Any, Any]:
    return _bad_gradient(), _unused(), _low_precision()


def test_nan_unused_parameters_and_bfloat16(ranks: Ranks) -> None:
    for rank, (bad, unused, (off, moved)) in enumerate(ranks(4, odd_values)):
        # One replica skips, and nobody else sees it.
        assert bad == [(True, int(rank == 1))] * 2
        assert unused == (True, True)
        assert off < 0.02 * moved


def codecs() -> Any:
    return {repr(c): _coded(c) for c in (Dense(torch.bfloat16), Int8(), Int4())}


def test_a_codec_sends_news_and_hardly_moves_the_mean(ranks: Ranks) -> None:
    """Coded as they are, weights would be drawn to the codec's grid: see
    benchmarks/quality/decentralized_quadratic.py."""
    answers = ranks(4, codecs)
    start, gradient = oracle.problem(4)
    exact = oracle.run("DecentLaM", topology.ring(4).matrix, start, gradient, [0.05] * 40, 0.9)
    center = torch.cat([torch.stack([x[k] for x in exact]).mean(0).view(-1) for k in range(4)])
    moved = float((center - torch.cat([s.view(-1) for s in start])).norm())
    numel = center.numel()
    for name, (bytes_each, tolerance) in {
        repr(Dense(torch.bfloat16)): (2 * numel, 1e-3),
        repr(Int8()): (4 + 40, 1e-3),
        repr(Int4()): (4 + 20, 1e-2),
    }.items():
        replicas = [torch.cat([w.view(-1) for w in a[name][0]]).double() for a in answers]
        off = float((torch.stack(replicas).mean(0) - center).norm())
        assert off < tolerance * moved, name
        assert {a[name][1] for a in answers} == {2 * bytes_each}, name


# -- the backward pass -----------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, seed: int) -> Tensor:
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
        hidden = self.middle(torch.tanh(self.first(x)))
        return (self.last(torch.tanh(hidden)) - x.sum(1, keepdim=True)).square().mean()


def train(net: Net, optimizer: Any, first: int, last: int, micro: int = 1) -> list[int]:
    """Steps, and how many buckets had left before each of them."""
    rank, early = optimizer.wire.rank, []
    for step in range(first, last):
        for part in range(micro - 1):
            with optimizer.accumulating():
                net(1000 * step + 10 * part + rank).backward()
        net(1000 * step + 500 + rank).backward()
        early.append(optimizer.engine.reducer.launched)
        optimizer.step()
        optimizer.zero_grad()
    return early


def overlapping(kind: str) -> dict[str, Any]:
    tw.init()
    found: dict[str, Any] = {}
    for micro in (1, 3):
        for overlap in (False, True):
            net = Net()
            optimizer = getattr(tw, kind)(net.parameters(), 0.05, overlap=overlap, bucket_mb=1e-4)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            early = []
            for step in range(6):
                early += train(net, optimizer, step, step + 1, micro)
                scheduler.step()
            found[f"{micro} {overlap}"] = tw.wire.agreement.digest(net.parameters())
            assert early == ([0] + [3] * 5 if overlap else [0] * 6)
    net = Net()
    optimizer = getattr(tw, kind)(net.parameters(), 0.05, clip=0.1, bucket_mb=1e-4)
    assert train(net, optimizer, 0, 3) == [0, 0, 0], "clipping needs the whole norm"
    assert optimizer.grad_norm > 0.1
    return found


@pytest.mark.parametrize("kind", ["DecentLaM", "DmSGD"])
def test_overlap_changes_when_and_not_what(ranks: Ranks, kind: str) -> None:
    for found in ranks(3, overlapping, kind):
        assert found["1 True"] == found["1 False"]
        assert found["3 True"] == found["3 False"]
        assert found["1 True"] != found["3 True"]


def clipped() -> tuple[float, float]:
    """The length of a step with a clip, and of the same without, in units of the clip."""
    lengths = []
    for clip in (0.5, None):
        weights, optimizer, _ = oracle.build("DSGD", 2, 0.1, 0.0, clip=clip)
        before = plain(weights)
        for weight in weights:
            weight.grad = torch.full_like(weight, 1.0 + 9.0 * optimizer.wire.rank)
        optimizer.step()
        moved = torch.cat([(a - b).detach().view(-1) for a, b in zip(before, weights, strict=True)])
        lengths.append(float(moved.norm()) / 0.1 / 0.5)
    return lengths[0], lengths[1]


def misuse() -> None:
    tw.init()
    net = Net()
    optimizer = tw.DecentLaM(net.parameters(), 0.05, bucket_mb=1e-4)
    train(net, optimizer, 0, 2)
    net(1).backward()
    optimizer.param_groups[0]["lr"] = 0.1
    with pytest.raises(RuntimeError, match=r"lr was changed from \[0.05\] to \[0.1\] after"):
        optimizer.step()
    net = Net()
    optimizer = tw.DecentLaM(net.parameters(), 0.05)
    optimizer.param_groups[0]["momentum"] = 1.0
    net(1).backward()
    with pytest.raises(ValueError, match="any below 1 is"):
        optimizer.step()
    optimizer.param_groups[0]["momentum"] = 0.5
    with torch.no_grad():
        net.last.weight[0, 0] = math.inf
    with pytest.raises(NonFinite, match=r"the weights of rank \d are no longer finite"):
        optimizer.step()


def one_replica_clips_by_its_own_norm() -> tuple[float, float]:
    misuse()
    return clipped()


def test_clipping_and_misuse(ranks: Ranks) -> None:
    for length, without in ranks(2, one_replica_clips_by_its_own_norm):
        assert length == pytest.approx(1.0, rel=1e-5), "both replicas' gradients have that norm"
        assert without > 10


def scaled() -> tuple[bytes, bytes, int, float]:
    """GradScaler against the same run without; rank 1 overflows once and only rank 1 skips."""
    rank = tw.init().rank
    nets = [Net(), Net()]
    plain_one, with_scaler = (tw.DecentLaM(net.parameters(), 0.05, overlap=False) for net in nets)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    for step in range(4):
        nets[0](10 * step + rank).backward()
        plain_one.step()
        scaler.scale(nets[1](10 * step + rank)).backward()
        scaler.step(with_scaler)
        scaler.update()
        for net in nets:
            net.zero_grad()
    same = [tw.wire.agreement.digest(net.parameters()) for net in nets]
    factor = math.inf if rank == 1 else 1.0
    scaler.scale(nets[1](99) * factor).backward()
    scaler.step(with_scaler)
    scaler.update()
    assert all(bool(p.isfinite().all()) for p in nets[1].parameters())
    return same[0], same[1], with_scaler.account.skipped, scaler.get_scale()


def test_grad_scaler_skips_on_the_replica_that_overflowed(ranks: Ranks) -> None:
    for rank, (one, other, skipped, scale) in enumerate(ranks(2, scaled)):
        assert one == other, "a scale that is a power of two changes no bit"
        assert skipped == rank
        assert scale == 2.0 ** (10 - rank)


# -- state -----------------------------------------------------------------------------------------


def straight(kind: str, codec: Any, stop: int, end: int) -> tuple[Any, list[Tensor], list[Tensor]]:
    weights, optimizer, gradient = oracle.build(kind, 2, 0.1, 0.9, codec=codec)
    oracle.advance(weights, optimizer, gradient, [0.1] * stop)
    state, middle = copy.deepcopy(optimizer.state_dict()), plain(weights)
    oracle.advance(weights, optimizer, gradient, [0.1] * (end - stop), first=stop + 1)
    return state, middle, plain(weights)


def resumed(kind: str, codec: Any, saved: list[Any], stop: int, end: int) -> list[Tensor]:
    size = tw.init().size
    weights, optimizer, gradient = oracle.build(kind, 2, 0.1, 0.9, codec=codec)
    state, middle, _ = saved[optimizer.wire.rank % len(saved)]
    with torch.no_grad():
        for weight, value in zip(weights, middle, strict=True):
            weight.copy_(value)
    optimizer.load_state_dict(copy.deepcopy(state))
    if size != len(saved):
        return plain(weights)
    oracle.advance(weights, optimizer, gradient, [0.1] * (end - stop), first=stop + 1)
    return plain(weights)


@pytest.mark.parametrize(("kind", "codec"), [("DecentLaM", None), ("DmSGD", Int8())])
def test_a_loaded_state_goes_on_bit_for_bit_and_others_meet(
    ranks: Ranks, kind: str, codec: Any
) -> None:
    saved = ranks(2, straight, kind, codec, 5, 9)
    for got, (_, _, wanted) in zip(ranks(2, resumed, kind, codec, saved, 5, 9), saved, strict=True):
        assert all(map(torch.equal, got, wanted))
    three = ranks(3, resumed, kind, codec, saved, 5, 9)
    for got in three:
        for k, value in enumerate(got):
            mean = (2 * saved[0][1][k] + saved[1][1][k]) / 3  # rank 2 has taken rank 0's
            torch.testing.assert_close(value, mean)


def test_the_state_of_another_method_or_model_is_refused() -> None:
    weights, optimizer, gradient = oracle.build("DecentLaM", 1, 0.1, 0.9)
    oracle.advance(weights, optimizer, gradient, [0.1])
    assert set(optimizer.state[weights[0]]) == {"velocity"}
    with pytest.raises(ValueError, match="DmSGD cannot load the state of DecentLaM"):
        tw.DmSGD(weights, 0.1).load_state_dict(optimizer.state_dict())
    other = tw.DecentLaM(
        [nn.Parameter(torch.zeros(s)) for s in [(5, 4), (7,), (3, 2, 2), (2,)]], 0.1
    )
    with pytest.raises(ValueError, match=r"parameter 3 has shape \(2,\), in the state \(1,\)"):
        other.load_state_dict(optimizer.state_dict())


# -- shards ----------------------------------------------------------------------------------------


def two_replicas(shards: int, clip: float | None) -> list[Tensor]:
    """2 replicas, each whole or over two ranks with FSDP2; each rank of a replica reads a half."""
    rank = tw.init().rank
    net, group = Net(), None
    if shards == 2:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
        for layer in (net.first, net.middle, net.last):
            fully_shard(layer, mesh=mesh["shard"])
        fully_shard(net, mesh=mesh["shard"])
        group = mesh["replica"]
    optimizer = tw.DecentLaM(
        net.parameters(), 0.05, weight_decay=0.1, clip=clip, bucket_mb=1e-4, group=group
    )
    replica, halves = rank // shards, [rank % 2] if shards == 2 else [0, 1]
    early = 0
    for step in range(5):
        losses = [net(100 * step + 10 * replica + half) for half in halves]
        torch.stack(losses).mean().backward()
        early += optimizer.engine.reducer.launched
        optimizer.step()
        optimizer.zero_grad()
    assert (early > 0) == (clip is None)
    with optimizer.consensus():
        return [
            (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
            for p in net.parameters()
        ]


@pytest.mark.parametrize("clip", [None, 0.5])
def test_sharded_replicas_do_what_whole_ones_do(ranks: Ranks, clip: float | None) -> None:
    whole, split = ranks(2, two_replicas, 1, clip), ranks(4, two_replicas, 2, clip)
    for weights in split:
        for got, wanted in zip(weights, whole[0], strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


# -- bad input -------------------------------------------------------------------------------------


def lopsided(size: int) -> topology.Topology:
    matrix = torch.zeros(size, size)
    for rank in range(size):
        for hop, weight in ((0, 0.3), (1, 0.6), (-1, 0.1)):
            matrix[rank, (rank + hop) % size] += weight
    return topology.from_matrix(matrix, symmetric=False)


def refused(size: int) -> None:
    tw.init()
    weights = [nn.Parameter(torch.zeros(3))]
    graph = lopsided(size)
    largest = graph.largest_momentum
    assert largest < 0.9
    with pytest.raises(ValueError, match=rf"momentum=0.9\) is unstable.*one is {largest:g}"):
        tw.DecentLaM(weights, 0.1, 0.9, topology=graph)
    tw.DecentLaM(weights, 0.1, largest, topology=graph)
    with pytest.raises(ValueError, match=rf"ring has {size + 1} ranks and the group {size}"):
        tw.DecentLaM(weights, 0.1, topology=topology.ring(size + 1))
    with pytest.raises(ValueError, match="not connected"):
        tw.DecentLaM(weights, 0.1, topology="edges:0-1,2-3")
    with pytest.raises(ValueError, match="in one direction"):
        tw.DSGD(weights, 0.1, topology="edges:0>1,1>2,2>3,3>0")


def test_bad_graphs_and_momenta_are_refused(ranks: Ranks) -> None:
    ranks(4, refused, 4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"momentum": 1.0}, r"momentum=...\) takes a number in \[0, 1\), got 1.0; on ring of 1"),
        ({"momentum": -0.1}, "any below 1 is"),
        ({"lr": -1.0}, r"lr=...\) takes a number >= 0"),
        ({"weight_decay": math.nan}, r"weight_decay=...\) takes a number >= 0"),
        ({"topology": "star"}, "topology takes one of ring"),
        ({"topology": 3}, "takes a name such as 'ring' or a Topology, got 3"),
        ({"codec": OneBit()}, r"takes Dense\(\), Int8\(\) or Int4\(\)"),
        ({"codec": ErrorFeedback(Int8())}, r"takes Dense\(\), Int8\(\) or Int4\(\)"),
        ({"clip": 0.0}, r"clip=...\) takes a number > 0"),
        ({"bucket_mb": -1.0}, r"bucket_mb=...\) takes a number > 0"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tw.DecentLaM(**{"params": [nn.Parameter(torch.zeros(2))], "lr": 0.1} | settings)


def test_ranks_that_only_swap_never_agree() -> None:
    with pytest.raises(ValueError, match="never agree"):
        require_agreement("DSGD", topology.from_matrix([[0.0, 1.0], [1.0, 0.0]]))

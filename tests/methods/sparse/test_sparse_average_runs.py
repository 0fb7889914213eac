"""SparseAverage in the life of a run: checkpoints, broken replicas, shards, groups, settings."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import thinwire as tw
from thinwire.errors import NonFinite
from thinwire.wire.agreement import digest


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 15), nn.Linear(15, 1)
        ).to(dtype)

    def loss(self, seed: int) -> Tensor:
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
        x = x.to(self.layers[0].weight.dtype)
        return (self.layers(x) - x.sum(1, keepdim=True)).square().mean()


def build(dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[Net, tw.SparseAverage]:
    net = Net(dtype)
    inner = torch.optim.AdamW(net.parameters(), lr=1e-2)
    given = {"fraction": 0.25, "delay": 5, **settings}
    return net, tw.SparseAverage(inner, buffers=net.buffers(), **given)


def steps_of(net: Net, optimizer: tw.SparseAverage, first: int, last: int, parts: int = 2) -> None:
    """Each step from two micro-batches, accumulated."""
    for step in range(first, last):
        for part in range(parts):
            net.loss(1000 * step + 10 * optimizer.wire.rank + part).backward()
        optimizer.step()
        optimizer.zero_grad()


def equal(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def copied(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {k: copied(v) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(copied(v) for v in tree)
    return tree


SETTINGS: dict[str, dict[str, Any]] = {
    "ema": {"steps": 30},
    "delta, int8, every 2": {"correction": "delta", "every": 2, "codec": tw.codecs.Int8()},
    "overwrite": {"correction": "overwrite"},
    "long": {"delay": 11, "codec": tw.codecs.Dense(torch.bfloat16)},
    "blocking": {"delay": 0},
}


def resumed() -> dict[str, tuple[int, bool, bool, bool]]:
    """Straight through against saved with rounds in the air, and resumed."""
    tw.init()
    answers = {}
    for name, settings in SETTINGS.items():
        net, optimizer = build(**settings)
        steps_of(net, optimizer, 0, 13)
        weights, state = copied(net.state_dict()), copied(optimizer.state_dict())
        steps_of(net, optimizer, 13, 30)
        again, second = build(**settings)
        again.load_state_dict(weights)
        second.load_state_dict(state)
        steps_of(again, second, 13, 30)
        same = equal(net, again)
        apart = len(set(optimizer.wire.gather_bytes(digest(net.parameters())))) > 1
        optimizer.finish()
        second.finish()
        finished = equal(net, again)
        digests = optimizer.wire.gather_bytes(digest([*net.parameters(), *net.buffers()]))
        answers[name] = (
            len(state["method"]["flights"]),
            same and apart,
            finished,
            len(set(digests)) == 1,
        )
    return answers


def test_resuming_with_rounds_in_the_air_is_bit_exact(ranks) -> None:
    in_air = {"ema": 5, "delta, int8, every 2": 2, "overwrite": 5, "long": 11, "blocking": 0}
    for answers in ranks(2, resumed):
        for name, (flights, same, finished, one) in answers.items():
            assert flights == in_air[name], name
            assert same, f"{name}: another run than the uninterrupted one"
            assert finished, name
            assert one, f"{name}: finish() must leave all replicas equal"


def regrown(saved: list[Any]) -> tuple[float, Any]:
    """Two replicas' states taken up by whatever number of replicas runs this."""
    tw.init()
    net, optimizer = build(steps=30)
    if not saved:
        steps_of(net, optimizer, 0, 13)
        return 0.0, (copied(net.state_dict()), copied(optimizer.state_dict()))
    weights, state = saved[optimizer.wire.rank % len(saved)]
    net.load_state_dict(weights)
    optimizer.load_state_dict(state)
    steps_of(net, optimizer, 13, 30)
    with optimizer.consensus():
        loss = float(net.loss(5).detach())
    return loss, len(optimizer.flights)


def test_resuming_with_another_number_of_replicas(ranks) -> None:
    saved = [state for _, state in ranks(2, regrown, [])]
    for replicas, in_air in ((1, 0), (3, 5)):
        answers = ranks(replicas, regrown, saved)
        losses = {loss for loss, _ in answers}
        assert len(losses) == 1, "inside consensus() all replicas hold the same model"
        assert losses.pop() < 3.0, "the loss at the start is above 6"
        assert [flights for _, flights in answers] == [in_air] * replicas


def consensus_case() -> tuple[bool, bool, int, bool]:
    tw.init()
    net, optimizer = build()
    steps_of(net, optimizer, 0, 9)
    before = copied(net.state_dict())
    own = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    mean = tw.Wire().mean(own.clone()).wait()
    sent = optimizer.account.bytes
    with optimizer.consensus():
        inside = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
        digests = tw.Wire().gather_bytes(digest([*net.parameters(), *net.buffers()]))
    restored = all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    quiet = sent == optimizer.account.bytes
    optimizer.drain()
    return torch.equal(inside, mean), restored, len(set(digests)), quiet


def test_consensus_holds_the_mean_and_gives_the_own_weights_back(ranks) -> None:
    for is_mean, restored, kinds, quiet in ranks(3, consensus_case):
        assert is_mean
        assert restored
        assert kinds == 1
        assert quiet, "evaluation is no part of what the method costs"


# -- broken replicas -----------------------------------------------------------------------------


def gradient_case() -> tuple[bool, int, list[float]]:
    """One NaN gradient on one replica: that replica takes no step, and nobody hears of it."""
    tw.init()
    net, optimizer = build()
    for step in range(20):
        net.loss(step).backward()
        if step == 7 and optimizer.wire.rank == 1:
            next(net.parameters()).grad[3, 2] = torch.nan  # type: ignore[index]
        optimizer.step()
        optimizer.zero_grad()
    optimizer.finish()
    weights = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    return bool(torch.isfinite(weights).all()), optimizer.account.skipped, optimizer.flights


def weight_case() -> tuple[int, str, bool]:
    """A NaN among one replica's weights: its rounds are dropped by all, and it does not spread."""
    tw.init()
    weight = nn.Parameter(torch.ones(40))
    optimizer = tw.SparseAverage(torch.optim.SGD([weight], lr=0.1), fraction=0.25, delay=2)
    with torch.no_grad():
        weight[3] = weight[3] + 1
    for step in range(20):
        if step == 1 and optimizer.wire.rank == 1:
            with torch.no_grad():
                weight[3] = torch.nan
        weight.grad = weight.detach().clone().nan_to_num_()
        optimizer.step()
    skipped = optimizer.account.skipped
    own = bool(torch.isfinite(weight).all())
    with torch.no_grad():
        weight.fill_(torch.nan) if optimizer.wire.rank == 1 else None
    message = ""
    try:
        for _ in range(20):
            weight.grad = torch.zeros(40)
            optimizer.step()
    except NonFinite as error:
        message = str(error)
    optimizer.drain()
    return skipped, message, own


def both_broken() -> tuple[Any, Any]:
    return gradient_case(), weight_case()


def test_what_is_not_finite_is_dropped_by_all_alike_and_never_spreads(ranks) -> None:
    answers = ranks(2, both_broken)
    assert [gradient for gradient, _ in answers] == [(True, 0, []), (True, 1, [])]
    first, second = (weight for _, weight in answers)
    assert first[0] == second[0] in (4, 5), "the rounds of that coordinate, one in four"
    assert [finite for _, _, finite in (first, second)] == [True, False]
    assert "8 rounds" in first[1]
    assert first[1] == second[1]
    assert "rank 1 is not finite" in first[1]


def scaled_case() -> tuple[bool, int, int]:
    """A GradScaler whose gradients overflow on one rank in one step: rounds must stay in step."""
    tw.init()
    runs = []
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for use in (None, scaler):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = tw.SparseAverage(inner, fraction=0.5, delay=2)
        for step in range(9):
            generator = torch.Generator().manual_seed(10 * step + optimizer.wire.rank)
            loss = model(torch.randn(8, 4, generator=generator)).square().mean()
            broken = step == 4 and optimizer.wire.rank == 1
            (loss if use is None else use.scale(loss)).backward()
            if broken:
                model.weight.grad.fill_(float("inf"))  # type: ignore[union-attr]
            optimizer.step() if use is None else (use.step(optimizer), use.update())
            optimizer.zero_grad()
        optimizer.finish()
        runs.append((model, optimizer))
    (plain, _), (scaled, last) = runs
    pairs = zip(plain.parameters(), scaled.parameters(), strict=True)
    close = all(torch.allclose(a, b, atol=1e-6) for a, b in pairs)
    digests = last.wire.gather_bytes(digest(scaled.parameters()))
    return close, len(set(digests)), last.rounds


def test_grad_scaler_overflows_on_one_replica_alone(ranks) -> None:
    for close, kinds, rounds in ranks(2, scaled_case):
        assert close
        assert kinds == 1
        assert rounds == 9


def bf16_case() -> tuple[set[torch.dtype], float, int, float]:
    tw.init()
    net, optimizer = build(torch.bfloat16)
    first = float(net.loss(5).detach())
    steps_of(net, optimizer, 0, 30)
    held = optimizer.average_bytes
    optimizer.finish()
    return {p.dtype for p in net.parameters()}, float(net.loss(5).detach()) / first, held, first


def test_bf16_weights_are_averaged_in_fp32_and_memory_is_as_documented(ranks) -> None:
    numel = sum(p.numel() for p in Net().parameters())
    for dtypes, share, held, _ in ranks(2, bf16_case):
        assert dtypes == {torch.bfloat16}
        assert share < 0.6
        in_air = 2 * 5 * 4 * numel / 4  # own and mean, of 5 rounds, 4 bytes, a quarter
        assert held == pytest.approx(4 * numel + in_air + 2 * numel / 4, rel=0.05)


# -- shards and groups ---------------------------------------------------------------------------


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5), nn.Linear(5, 2))


def mlp_loss(model: nn.Module, worker: int, step: int) -> Tensor:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + worker))
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def sharded(mesh: DeviceMesh, fraction: float) -> list[Tensor]:
    """2 replicas x 2 shards; each rank reads its own data, as in any FSDP run."""
    model = mlp()
    for layer in model:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = tw.SparseAverage(inner, fraction=fraction, delay=3, group=mesh["replica"])
    for step in range(14):
        mlp_loss(model, dist.get_rank(), step).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.finish()
    return [p.full_tensor().detach().clone() for p in model.parameters()]  # type: ignore


def two_axes(mesh: DeviceMesh) -> tuple[int, int, int]:
    """Two models in one process, each averaged along its own axis, step by step in turn."""
    kinds, optimizers = [], []
    for axis, seed in (("replica", 1), ("shard", 2)):
        torch.manual_seed(seed)
        model = nn.Linear(8, 8)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizers.append(tw.SparseAverage(inner, fraction=0.1, delay=4, group=mesh[axis]))
    for step, optimizer in itertools.product(range(12), optimizers):
        for parameter in optimizer.param_groups[0]["params"]:
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    for optimizer in optimizers:
        optimizer.finish()
        weights = optimizer.param_groups[0]["params"]
        kinds.append(len(set(tw.Wire().gather_bytes(digest(weights)))))
    return kinds[0], kinds[1], optimizers[0].account.transfers


def mesh_case() -> tuple[list[Tensor], list[Tensor], tuple[int, int, int]]:
    tw.init()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    return sharded(mesh, 1.0), sharded(mesh, 0.2), two_axes(mesh)


def unsharded() -> list[Tensor]:
    """The same two replicas, each whole on one rank: its batch is that of the two shards."""
    tw.init()
    model = mlp()
    optimizer = tw.SparseAverage(
        torch.optim.AdamW(model.parameters(), lr=1e-2), fraction=1.0, delay=3
    )
    for step in range(14):
        halves = [mlp_loss(model, 2 * dist.get_rank() + shard, step) for shard in range(2)]
        (sum(halves) / 2).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    optimizer.finish()
    return [p.detach().clone() for p in model.parameters()]


def test_shards_and_several_groups_in_one_process(ranks) -> None:
    split, whole = ranks(4, mesh_case), ranks(2, unsharded)[0]
    for everything, some, (replica_kinds, shard_kinds, transfers) in split:
        for got, wanted in zip(everything, whole, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
        for got, wanted in zip(some, split[0][1], strict=True):
            assert torch.equal(got, wanted), "replicas differ after finish()"
        assert replica_kinds == shard_kinds == 2, "one model for each of the two other positions"
        assert transfers == 12 + 1


# -- settings ------------------------------------------------------------------------------------

BAD: list[tuple[dict[str, Any], str]] = [
    ({"fraction": 0.0}, r"fraction=\.\.\.\) takes a number in \(0, 1\], got 0.0"),
    ({"fraction": 1.5}, "fraction"),
    ({"fraction": float("nan")}, "fraction"),
    ({"fraction": "5%"}, "fraction"),
    ({"fraction": 1e-7}, "rounds"),
    ({"delay": -1}, "delay.* whole number >= 0, got -1"),
    ({"delay": 2.5}, "delay"),
    ({"every": 0}, "every.* whole number >= 1, got 0"),
    ({"correction": "average"}, "correction.* one of ema, delta, overwrite, got 'average'"),
    ({"landing": "soon"}, "landing.* one of step, arrival, got 'soon'"),
    ({"steps": 0}, "steps"),
    ({"ema": (0.5,)}, "ema"),
    ({"ema": (0.5, 0.0)}, "ema"),
    ({"codec": "int8"}, "codec"),
    ({"codec": tw.codecs.ErrorFeedback(tw.codecs.Int4())}, "no error feedback.*use Int4"),
    ({"seed": 0.5}, "seed"),
]


@pytest.mark.parametrize(("settings", "message"), BAD)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    inner = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ValueError, match=message):
        tw.SparseAverage(inner, **settings)


def mismatched() -> list[str]:
    """What differs on rank 2 is named on every rank, at the first step; and after a resumption."""
    tw.init()
    odd = tw.Wire().rank == 2
    messages = []
    for settings in ({"seed": 1}, {"fraction": 0.5}, {"delay": 1}):
        net, optimizer = build(**(settings if odd else {}))
        net.loss(0).backward()
        with pytest.raises(ValueError, match="differs between ranks") as error:
            optimizer.step()
        messages.append(str(error.value))
    net, optimizer = build()
    steps_of(net, optimizer, 0, 3)
    state = copied(optimizer.state_dict())
    state["method"]["rounds"] += odd
    net, optimizer = build()
    optimizer.load_state_dict(state)
    with pytest.raises(ValueError, match="'rounds' differs") as error:
        optimizer.step()
    return [*messages, str(error.value)]


def test_replicas_with_other_settings_are_named_before_anything_is_averaged(ranks) -> None:
    for messages in ranks(3, mismatched):
        for name, message in zip(("seed", "fraction", "delay", "rounds"), messages, strict=True):
            assert f"'{name}'" in message
            assert "rank 2" in message


def test_a_state_of_other_settings_or_parameters_is_refused() -> None:
    _, optimizer = build()
    state = optimizer.state_dict()
    for settings, message in (({"fraction": 0.1}, "parts=4"), ({"seed": 9}, "seed=0")):
        with pytest.raises(ValueError, match=message):
            build(**settings)[1].load_state_dict(copied(state))
    method = copied(state)["method"]
    method["rate"] = torch.zeros(3)
    with pytest.raises(ValueError, match="one for 3 values"):
        build()[1].engine.load_method_state(method)

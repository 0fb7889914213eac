"""Local updates in a training loop: resume, consensus, buffers, bfloat16, lost values, memory."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire.wire.codecs import ErrorFeedback, Int4

NUMEL, LR = 50, 0.05


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 1)
        )

    def loss(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(8, 6, generator=generator)
        return (self.layers(x) - x.sum(1, keepdim=True)).square().mean()


def build(kind: str, **more: Any) -> tuple[Net, tw.LocalUpdates]:
    torch.manual_seed(0)
    net = Net()
    inner = torch.optim.AdamW(net.parameters(), lr=1e-2)
    preset = getattr(tw, kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return net, preset(inner, buffers=net.buffers(), **more)


def steps_of(net: Net, optimizer: tw.LocalUpdates, first: int, last: int) -> None:
    for step in range(first, last):
        net.loss(1000 * step + optimizer.wire.rank).backward()
        optimizer.step()
        optimizer.zero_grad()


PRESETS: dict[str, dict[str, Any]] = {
    "LocalSGD": {"every": 4},
    "SlowMo": {"every": 4},
    "DiLoCo": {"every": 4},
    "StreamingDiLoCo": {"every": 6, "fragments": 3, "delay": 1},
    "CO2": {"every": 4, "codec": ErrorFeedback(Int4())},
    "Eager": {"every": 4},
    "Overlapped": {"every": 4, "fragments": 2, "codec": ErrorFeedback(Int4())},
}


def resumed(kind: str, settings: dict[str, Any], stop: int, end: int) -> tuple[bool, bool, bool]:
    """Straight through against saved mid-round, with a flight in the air, and resumed."""
    tw.init()
    net, optimizer = build(kind, **settings)
    steps_of(net, optimizer, 0, stop)
    saved = {k: v.clone() for k, v in net.state_dict().items()}, optimizer.state_dict()
    buffer_copy = _deep_clone(saved[1])
    steps_of(net, optimizer, stop, end)

    again, second = build(kind, **settings)
    again.load_state_dict(saved[0])
    second.load_state_dict(buffer_copy)
    steps_of(again, second, stop, end)
    same = all(torch.equal(a, b) for a, b in _pairs(net, again))
    optimizer.finish()
    second.finish()
    equal = all(torch.equal(a, b) for a, b in _pairs(net, again))
    digests = optimizer.wire.gather_bytes(tw.wire.agreement.digest(net.parameters()))
    return same, equal, len(set(digests)) == 1


def _pairs(a: nn.Module, b: nn.Module):
    return zip(a.state_dict().values(), b.state_dict().values(), strict=True)


def _deep_clone(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {k: _deep_clone(v) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_deep_clone(v) for v in tree)
    return tree


@pytest.mark.parametrize("kind", PRESETS)
def test_resume_mid_round_with_a_flight_in_the_air_is_bit_exact(ranks, kind: str) -> None:
    for same, finished, equal in ranks(2, resumed, kind, PRESETS[kind], 9, 21):
        assert same
        assert finished
        assert equal, "finish() must leave all replicas equal"


def regrown(kind: str, settings: dict[str, Any], saved: list[Any]) -> tuple[float, Any]:
    """Two replicas' states taken up by whatever number of replicas runs this."""
    tw.init()
    net, optimizer = build(kind, **settings)
    if not saved:
        steps_of(net, optimizer, 0, 9)
        return 0.0, (net.state_dict(), _deep_clone(optimizer.state_dict()))
    weights, state = saved[optimizer.wire.rank % len(saved)]
    net.load_state_dict(weights)
    optimizer.load_state_dict(state)
    steps_of(net, optimizer, 9, 21)
    with optimizer.consensus():
        loss = float(net.loss(5).detach())
    return loss, None


@pytest.mark.parametrize("kind", ["CO2", "Overlapped"])
@pytest.mark.parametrize("replicas", [1, 3])
def test_resume_with_another_number_of_replicas(ranks, kind: str, replicas: int) -> None:
    saved = [state for _, state in ranks(2, regrown, kind, PRESETS[kind], [])]
    losses = [loss for loss, _ in ranks(replicas, regrown, kind, PRESETS[kind], saved)]
    assert len(set(losses)) == 1, "inside consensus() all replicas hold the same model"
    straight = 6.0  # the loss at the start is above 6
    assert losses[0] < straight


def consensus_case() -> tuple[bool, bool, list[bytes]]:
    tw.init()
    net, optimizer = build("Overlapped", every=4)
    steps_of(net, optimizer, 0, 6)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    own = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    mean = optimizer.wire.mean(own.clone()).wait()
    with optimizer.consensus():
        inside = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
        digest = tw.wire.agreement.digest([*net.parameters(), *net.buffers()])
        digests = optimizer.wire.gather_bytes(digest)
    restored = all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    return torch.equal(inside, mean), restored, digests


def test_consensus_holds_the_mean_and_gives_the_own_weights_back(ranks) -> None:
    for is_mean, restored, digests in ranks(3, consensus_case):
        assert is_mean
        assert restored
        assert len(set(digests)) == 1


def buffer_case(kind: str) -> list[Tensor]:
    tw.init()
    net, optimizer = build(kind, every=4)
    steps_of(net, optimizer, 0, 12)
    optimizer.finish()
    return [b.clone() for b in net.buffers()]


@pytest.mark.parametrize("kind", ["LocalSGD", "Overlapped"])
def test_batch_norm_statistics_travel_with_the_rounds(ranks, kind: str) -> None:
    first, second = ranks(2, buffer_case, kind)
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b)


def bf16_case() -> tuple[Tensor, int]:
    tw.init()
    weights = nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
    optimizer = tw.Overlapped(torch.optim.SGD([weights], lr=1e-2), every=2)
    for _ in range(40):
        weights.grad = torch.full_like(weights, 0.3)
        optimizer.step()
    anchor = optimizer.fragments[0].anchor
    assert anchor.dtype == torch.float32
    return anchor.clone(), optimizer.outer_bytes


def test_bf16_weights_keep_an_fp32_anchor(ranks) -> None:
    """Steps of 0.003 are below the spacing of bf16 above 1: only the anchor can add them up."""
    for anchor, nbytes in ranks(2, bf16_case):
        assert float(anchor.mean()) < 0.97
        assert nbytes == 16 * 1000


def memory_case() -> dict[str, float]:
    tw.init()
    weights = nn.Parameter(torch.zeros(1000))
    inner = torch.optim.SGD([weights], lr=0.1)
    kinds = {"CO2": 12, "Overlapped": 16}
    return {kind: getattr(tw, kind)(inner).outer_bytes / 1000 for kind in kinds}


def test_outer_state_takes_12_and_16_bytes_per_parameter(ranks) -> None:
    for sizes in ranks(2, memory_case):
        assert sizes == {"CO2": 12.0, "Overlapped": 16.0}


def untouched_case() -> tuple[bool, int]:
    """The payload is private: training between launch and landing must not change it."""
    tw.init()
    weights = nn.Parameter(torch.zeros(5))
    optimizer = tw.CO2(torch.optim.SGD([weights], lr=1.0), every=3)
    sent = None
    for step in range(1, 6):
        weights.grad = torch.full((5,), float(optimizer.wire.rank + 1))
        optimizer.step()
        if step == 3:
            flight = optimizer.fragments[0].flight
            assert flight is not None
            sent = flight.wait().clone()  # landing early changes nothing
    assert sent is not None
    flight = optimizer.fragments[0].flight
    assert flight is not None
    return torch.equal(flight.wait(), sent), optimizer.account.transfers


def test_the_payload_is_not_written_between_launch_and_landing(ranks) -> None:
    for same, transfers in ranks(2, untouched_case):
        assert same
        assert transfers > 0


def poisoned_case(kind: str) -> tuple[bool, float, int]:
    tw.init()
    weights = nn.Parameter(torch.ones(20))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = getattr(tw, kind)(torch.optim.SGD([weights], lr=0.1), every=2)
    for step in range(20):
        weights.grad = weights.detach().clone()
        if step == 7 and optimizer.wire.rank == 1:
            weights.grad[3] = float("nan")
        optimizer.step()
    optimizer.finish()
    finite = bool(torch.isfinite(weights).all())
    return finite, float(weights.detach().norm()), int(optimizer.account.skipped)


@pytest.mark.parametrize("kind", ["LocalSGD", "CO2", "Overlapped"])
def test_one_replicas_nan_costs_its_own_step_and_never_spreads(ranks, kind: str) -> None:
    answers = ranks(2, poisoned_case, kind)
    assert [skipped for _, _, skipped in answers] == [0, 1]
    for finite, norm, _ in answers:
        assert finite
        assert norm < 4.47, "training must have gone on"


def scaled_case() -> tuple[bool, bool, int]:
    """A GradScaler whose gradients overflow on one rank in one step: rounds must stay in step."""
    tw.init()
    torch.manual_seed(0)
    plain, scaled = nn.Linear(4, 1), nn.Linear(4, 1)
    scaled.load_state_dict(plain.state_dict())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    runs = []
    for model, use in ((plain, None), (scaled, scaler)):
        optimizer = tw.Overlapped(torch.optim.SGD(model.parameters(), lr=0.1), every=3)
        for step in range(9):
            generator = torch.Generator().manual_seed(10 * step + optimizer.wire.rank)
            loss = model(torch.randn(8, 4, generator=generator)).square().mean()
            broken = step == 4 and optimizer.wire.rank == 1
            if use is None:
                loss.backward()
                if broken:
                    optimizer.zero_grad()
                optimizer.step()
            else:
                use.scale(loss).backward()
                if broken:
                    next(model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
                use.step(optimizer)
                use.update()
            optimizer.zero_grad()
        runs.append(optimizer)
    for optimizer in runs:
        optimizer.finish()
    close = all(
        torch.allclose(a, b, atol=1e-6)
        for a, b in zip(plain.parameters(), scaled.parameters(), strict=True)
    )
    digests = runs[1].wire.gather_bytes(tw.wire.agreement.digest(scaled.parameters()))
    return close, len(set(digests)) == 1, runs[1].rounds


def test_grad_scaler_overflows_on_one_replica_alone(ranks) -> None:
    for close, equal, rounds in ranks(2, scaled_case):
        assert close
        assert equal
        assert rounds == 3

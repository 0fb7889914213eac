"""GradientAverage against the same training in one process on all replicas' data."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import thinwire as tw
from thinwire.errors import UsageError
from thinwire.wire.codecs import Codec, ErrorFeedback, Int4, Int8, parse

Weights = list[Tensor]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def data(rank: int, step: int, n: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(n, 6, generator=generator), torch.randn(n, 3, generator=generator)


def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (net(x) - y).square().mean()


def weights(net: nn.Module) -> Weights:
    return [p.detach().clone() for p in net.parameters()]


def oracle(inner: Callable[[Any], torch.optim.Optimizer], replicas: int, steps: int) -> Weights:
    """One process, the concatenated batch."""
    net = model()
    optimizer = inner(net.parameters())
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(steps):
        parts = [data(rank, step) for rank in range(replicas)]
        optimizer.zero_grad()
        loss_of(net, *(torch.cat(part) for part in zip(*parts, strict=True))).backward()
        optimizer.step()
        scheduler.step()
    return weights(net)


def train(
    inner: Callable[[Any], torch.optim.Optimizer], codec: str, steps: int, how: str = "plain"
) -> tuple[Weights, dict[str, float]]:
    tw.init()
    net = model()
    optimizer = tw.GradientAverage(inner(net.parameters()), codec=parse(codec))
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(steps):
        x, y = data(optimizer.wire.rank, step)

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(net, x, y)
            loss.backward()
            return loss

        if how == "closure":
            before = loss_of(net, x, y).item()
            assert optimizer.step(closure).item() == before
        elif how == "accumulate":
            optimizer.zero_grad()
            for half in (slice(0, 2), slice(2, 4)):
                (loss_of(net, x[half], y[half]) / 2).backward()
            optimizer.step()
        else:
            closure()
            optimizer.step()
        scheduler.step()
    return weights(net), optimizer.account.snapshot()


def assert_same_everywhere(answers: list[Any]) -> Weights:
    for other in answers[1:]:
        assert all(torch.equal(a, b) for a, b in zip(answers[0][0], other[0], strict=True))
    return answers[0][0]


@pytest.mark.parametrize(
    ("inner", "replicas", "how"),
    [
        (sgd, 2, "plain"),
        (adamw, 3, "plain"),
        (sgd, 3, "accumulate"),
        (adamw, 2, "closure"),
    ],
)
def test_equals_one_process_on_all_the_data(ranks, inner, replicas: int, how: str) -> None:
    answers = ranks(replicas, train, inner, "fp32", 5, how)
    got = assert_same_everywhere(answers)
    torch.testing.assert_close(got, oracle(inner, replicas, 5), rtol=1e-4, atol=1e-6)
    for _, account in answers:
        assert (account["steps"], account["skipped"]) == (5, 0)


@pytest.mark.parametrize(("codec", "limit"), [("int8", 0.02), ("int4+ef", 0.2), ("bf16", 0.02)])
def test_a_codec_comes_close_and_keeps_replicas_equal(ranks, codec: str, limit: float) -> None:
    got = assert_same_everywhere(ranks(3, train, sgd, codec, 6))
    exact, start = oracle(sgd, 3, 6), weights(model())
    moved = sum((a - b).square().sum() for a, b in zip(exact, start, strict=True)).sqrt()
    off = sum((a - b).square().sum() for a, b in zip(got, exact, strict=True)).sqrt()
    assert 0 < off < limit * moved


def clipped() -> tuple[Weights, list[float]]:
    tw.init()
    net = model()
    optimizer = tw.GradientAverage(sgd(net.parameters()))
    norms = []
    for step in range(4):
        optimizer.zero_grad()
        loss_of(net, *data(optimizer.wire.rank, step)).backward()
        assert optimizer.average()
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.1).item())
        before = optimizer.account.transfers
        optimizer.step()
        assert optimizer.account.transfers == before, "averaged once"
    return weights(net), norms


def test_average_then_clip_then_step(ranks) -> None:
    got = assert_same_everywhere(ranks(2, clipped))
    net = model()
    optimizer = sgd(net.parameters())
    for step in range(4):
        optimizer.zero_grad()
        x, y = (torch.cat(part) for part in zip(data(0, step), data(1, step), strict=True))
        loss_of(net, x, y).backward()
        assert nn.utils.clip_grad_norm_(net.parameters(), 0.1) > 0.1, "the test must clip"
        optimizer.step()
    torch.testing.assert_close(got, weights(net), rtol=1e-4, atol=1e-6)


def scaled(how: str, bad_rank: int, bad_step: int) -> tuple[Weights, dict[str, float], list[float]]:
    """GradScaler; on one rank, at one step, the loss overflows."""
    tw.init()
    net = model()
    optimizer = tw.GradientAverage(sgd(net.parameters()))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scales = []
    for step in range(5):
        optimizer.zero_grad()
        loss = loss_of(net, *data(optimizer.wire.rank, step))
        if (optimizer.wire.rank, step) == (bad_rank, bad_step):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if how != "step":
            scaler.unscale_(optimizer)
        if how == "clip":
            optimizer.average()
            nn.utils.clip_grad_norm_(net.parameters(), 1e6)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return weights(net), optimizer.account.snapshot(), scales


@pytest.mark.parametrize("how", ["step", "unscale", "clip"])
def test_an_overflow_on_one_rank_is_skipped_by_all(ranks, how: str) -> None:
    answers = ranks(2, scaled, how, 1, 2)
    got = assert_same_everywhere(answers)
    for _, account, _ in answers:
        assert (account["steps"], account["skipped"]) == (5, 1)
    net = model()
    optimizer = sgd(net.parameters())
    for step in (0, 1, 3, 4):
        optimizer.zero_grad()
        x, y = (torch.cat(part) for part in zip(data(0, step), data(1, step), strict=True))
        loss_of(net, x, y).backward()
        optimizer.step()
    torch.testing.assert_close(got, weights(net), rtol=1e-4, atol=1e-6)
    # Each replica's scale is its own: the one that overflowed backs off, gradients agree all the
    # same.
    assert answers[0][2] == [1024, 2048, 2048, 4096, 4096]
    assert answers[1][2] == [1024, 2048, 1024, 1024, 2048]


def scaled_average() -> None:
    net = model()
    optimizer = tw.GradientAverage(sgd(net.parameters()))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(net, *data(0, 0))).backward()
    optimizer.average()
    before = weights(net)
    with pytest.raises(RuntimeError, match=r"call scaler.unscale_\(optimizer\) before"):
        scaler.step(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(net), strict=True))


def test_averaging_gradients_with_the_scale_in_them_is_refused() -> None:
    scaled_average()


def nan_step() -> tuple[Weights, list[bool], float]:
    tw.init()
    net = model()
    optimizer = tw.GradientAverage(sgd(net.parameters()), codec=ErrorFeedback(Int8()))
    finite = []
    for step in range(3):
        optimizer.zero_grad()
        x, y = data(optimizer.wire.rank, step)
        if (optimizer.wire.rank, step) == (1, 1):
            y[0, 0] = float("nan")
        loss_of(net, x, y).backward()
        finite.append(optimizer.average())
        optimizer.step()
    return weights(net), finite, optimizer.account.skipped


def test_one_replicas_nan_is_skipped_by_all(ranks) -> None:
    answers = ranks(3, nan_step)
    assert all(w.isfinite().all() for w in assert_same_everywhere(answers))
    assert [(finite, skipped) for _, finite, skipped in answers] == [([True, False, True], 1)] * 3


class Partly(nn.Module):
    """Which of its branches is used depends on the caller."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always = nn.Parameter(torch.randn(4))
        self.sometimes = nn.Parameter(torch.randn(4))
        self.never = nn.Parameter(torch.randn(4))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)

    def forward(self, sometimes: bool) -> Tensor:
        total = self.always.square().sum()
        return total + self.sometimes.square().sum() if sometimes else total


def partly(used: list[list[bool]]) -> Weights:
    tw.init()
    net = Partly()
    optimizer = tw.GradientAverage(adamw(net.parameters()))
    for on in used[optimizer.wire.rank]:
        optimizer.zero_grad()
        net(on).backward()
        optimizer.step()
    assert net.never.grad is None
    return weights(net)


@pytest.mark.parametrize(
    "used", [[[True, False, True], [False, False, True]], [[False, False, True], [False] * 3]]
)
def test_parameters_without_gradients(ranks, used: list[list[bool]]) -> None:
    """None on some replicas is zero there; None on all of them is none, and never decays."""
    answers = [(w,) for w in ranks(2, partly, used)]
    got = assert_same_everywhere(answers)
    net = Partly()
    optimizer = adamw(net.parameters())
    for pair in zip(*used, strict=True):
        optimizer.zero_grad()
        sum(net(on) / 2 for on in pair).backward()  # type: ignore[union-attr]
        optimizer.step()
    torch.testing.assert_close(got, weights(net))
    start = Partly()
    assert torch.equal(got[2], start.never)
    assert torch.equal(got[3], start.frozen)


def sixteen_bits(dtype: torch.dtype) -> tuple[Weights, list[torch.dtype]]:
    tw.init()
    net = model().to(dtype)
    optimizer = tw.GradientAverage(sgd(net.parameters()))
    for step in range(3):
        optimizer.zero_grad()
        x, y = data(optimizer.wire.rank, step)
        loss_of(net, x.to(dtype), y.to(dtype)).backward()
        optimizer.step()
    return weights(net), [p.grad.dtype for p in net.parameters() if p.grad is not None]


def test_bfloat16_parameters(ranks) -> None:
    answers = ranks(2, sixteen_bits, torch.bfloat16)
    got = assert_same_everywhere(answers)
    assert {w.dtype for w in got} == set(answers[0][1]) == {torch.bfloat16}
    torch.testing.assert_close(
        [w.float() for w in got],
        assert_same_everywhere(ranks(2, sixteen_bits, torch.float32)),
        rtol=0.05,
        atol=0.02,
    )


def test_float64_gradients_are_not_rounded(ranks) -> None:
    got = assert_same_everywhere(ranks(2, sixteen_bits, torch.float64))
    net = model().double()
    optimizer = sgd(net.parameters())
    for step in range(3):
        optimizer.zero_grad()
        x, y = (torch.cat(part).double() for part in zip(data(0, step), data(1, step), strict=True))
        loss_of(net, x, y).backward()
        optimizer.step()
    torch.testing.assert_close(got, weights(net), rtol=1e-12, atol=1e-14)


def different_start(average_first: bool) -> tuple[str, int]:
    world = tw.init()
    net = model(seed=int(world.rank == 1))
    optimizer = tw.GradientAverage(sgd(net.parameters()))
    loss_of(net, *data(0, 0)).backward()
    with pytest.raises(UsageError) as caught:
        optimizer.average() if average_first else optimizer.step()
    return str(caught.value), optimizer.account.bytes


@pytest.mark.parametrize("average_first", [False, True])
def test_replicas_that_start_apart_are_refused_before_anything_is_sent(
    ranks, average_first: bool
) -> None:
    size = sum(p.nbytes for p in model().parameters())
    for message, sent in ranks(3, different_start, average_first):
        assert "the weights at the first step differ between ranks" in message
        assert "on ranks 0, 2; " in message
        assert "on rank 1)" in message
        assert sent < size, "digests only"


def different_settings(what: str) -> str:
    world = tw.init()
    net = model()
    odd = world.rank == 1
    codec: Codec = Int4() if odd and what == "codec" else Int8()
    if odd and what == "frozen":
        net[0].weight.requires_grad_(False)  # type: ignore[index, union-attr]
    optimizer = tw.GradientAverage(sgd(net.parameters()), codec=codec)
    loss_of(net, *data(0, 0)).backward()
    with pytest.raises(UsageError) as caught:
        optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("codec", "setting 'codec' differs between ranks: \"Int8(block=256)\" on rank 0"),
        ("frozen", "setting 'parameter.0' differs between ranks: \"torch.float32 (16, 6)\" on"),
    ],
)
def test_replicas_that_would_not_match_are_refused(ranks, what: str, expected: str) -> None:
    for message in ranks(2, different_settings, what):
        assert message.startswith(expected), message


def resumed(codec: str, at: int) -> Weights:
    """Five steps; before step `at` everything is saved, loaded into new objects and goes on."""
    tw.init()
    net: nn.Module = model()
    optimizer = tw.GradientAverage(adamw(net.parameters()), codec=parse(codec))
    for step in range(5):
        if step == at:
            file = io.BytesIO()
            torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.seek(0)
            saved = torch.load(file, weights_only=True)
            net = model(seed=9)
            optimizer = tw.GradientAverage(adamw(net.parameters()), codec=parse(codec))
            net.load_state_dict(saved["net"])
            optimizer.load_state_dict(saved["optimizer"])
        optimizer.zero_grad()
        loss_of(net, *data(optimizer.wire.rank, step)).backward()
        optimizer.step()
    return weights(net)


@pytest.mark.parametrize("codec", ["fp32", "int4+ef"])
def test_resume_is_bit_exact(ranks, codec: str) -> None:
    whole, broken = ranks(2, resumed, codec, -1), ranks(2, resumed, codec, 3)
    for ours, theirs in zip(whole, broken, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))

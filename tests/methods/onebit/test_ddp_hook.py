"""The DDP hook: PyTorch's own DDP and optimizer, one bit on the wire."""

import math

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.conftest import Ranks
from thinwire.wire.agreement import digest


def build(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 30), nn.Linear(30, 1)).to(
        dtype
    )


def train(dense_steps: int, steps: int, dtype: torch.dtype) -> tuple[bytes, list[int], float, int]:
    rank = tw.init().rank
    ddp = DistributedDataParallel(build(dtype), bucket_cap_mb=0.005)
    hook = tw.hooks.one_bit(ddp, dense_steps=dense_steps)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
    sent, loss = [], 0.0
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(16, 20, generator=generator).to(dtype)
        before = hook.account.bytes
        value = (ddp(x) - x[:, :1] * 2).square().mean()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        sent.append(hook.account.bytes - before)
        loss = float(value.detach())
    return digest(ddp.parameters()), sent, loss, len(hook._errors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replicas_stay_equal_and_send_bits(ranks: Ranks, dtype: torch.dtype) -> None:
    answers = ranks(2, train, 3, 8, dtype)
    assert len({same for same, _, _, _ in answers}) == 1
    numel = sum(p.numel() for p in build().parameters())
    for _, sent, _, buckets in answers:
        assert sent[:3] == [4 * numel] * 3
        assert buckets > (dtype == torch.float32)
        # each bucket is padded to 16 values, and has two scales of four bytes
        assert all(numel / 8 <= s <= numel / 8 + buckets * (2 + 8) for s in sent[3:])


def test_it_learns(ranks: Ranks) -> None:
    start = train_alone(0)
    for _, _, loss, _ in ranks(2, train, 2, 150, torch.float32):
        assert loss < 0.5 * start


def train_alone(step: int) -> float:
    x = torch.randn(16, 20, generator=torch.Generator().manual_seed(step))
    return float((build()(x) - x[:, :1] * 2).square().mean().detach())


def poisoned() -> tuple[bool, bool]:
    rank = tw.init().rank
    ddp = DistributedDataParallel(build())
    tw.hooks.one_bit(ddp, dense_steps=1)
    for step in range(3):
        loss = ddp(torch.ones(2, 20)).sum()
        bad = step == 2 and rank == 1
        (loss * (math.nan if bad else 1.0)).backward()
        if step < 2:
            ddp.zero_grad()
    gradients = [p.grad for p in ddp.parameters()]
    found = not all(bool(g.isfinite().all()) for g in gradients)
    ddp.zero_grad()
    ddp(torch.ones(2, 20)).sum().backward()
    return found, all(bool(p.grad.isfinite().all()) for p in ddp.parameters())


def test_a_bad_gradient_of_one_rank_is_seen_by_all_and_forgotten(ranks: Ranks) -> None:
    assert ranks(2, poisoned) == [(True, True), (True, True)]


def test_bad_arguments() -> None:
    with pytest.raises(
        ValueError,
        match=r"module=...\) takes a torch DistributedDataParallel.*got a model \(Sequential\)",
    ):
        tw.hooks.one_bit(build())  # type: ignore[arg-type]


def scaled(scales: list[float]) -> list[torch.Tensor]:
    """A fixed gradient under a loss scale that changes; what every step gets, unscaled."""
    tw.init()
    layer = nn.Linear(8, 1, bias=False)
    nn.init.zeros_(layer.weight)
    scaler = torch.amp.GradScaler("cpu", init_scale=scales[0])
    ddp = DistributedDataParallel(layer)
    tw.hooks.one_bit(ddp, dense_steps=1, scaler=scaler)
    x = torch.arange(1.0, 9.0).view(1, 8)
    got = []
    for scale in scales:
        scaler.scale(torch.ones(1))  # it makes its scale at first use
        scaler.update(scale)
        layer.weight.grad = None
        scaler.scale(ddp(x).sum()).backward()
        got.append(layer.weight.grad.detach() / scale)
    return got


def test_errors_do_not_depend_on_the_loss_scale(ranks: Ranks) -> None:
    constant = ranks(2, scaled, [4.0] * 8)
    changing = ranks(2, scaled, [4.0, 4.0, 1024.0, 1024.0, 2.0, 2.0, 65536.0, 1.0])
    for one, other in zip(constant, changing, strict=True):
        torch.testing.assert_close(one, other)

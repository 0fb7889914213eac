"""PyTorch's own methods in the trainer: the arithmetic is theirs, the count is ours."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import Ranks
from tests.train.methods.test_registry import build, one_step, weights
from thinwire.errors import UsageError
from thinwire.train.config import parse
from thinwire.train.methods.registry import find_method
from thinwire.train.methods.replica import Replica
from thinwire.wire import world
from thinwire.wire.collectives import all_reduce_bytes

PEERS = ["ddp-fp16", "powersgd", "post-local-sgd"]


def wide(name: str, **settings: Any) -> Replica:
    """A model with a matrix that is worth compressing."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.LayerNorm(64))
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    method = find_method(name)
    return method.build(model, inner, method.settings(**settings), None)


def step(replica: Replica, rank: int, number: int, scale: float = 1.0) -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * number + rank))
    with replica.accumulating(last=True):
        (replica.module(x).square().mean() * scale).backward()
    replica.step(0.0)
    replica.optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize("name", PEERS)
def test_alone_each_is_the_inner_optimizer(name: str) -> None:
    replica, plain = build(name), build("none")
    for scale in (1.0, 2.0):
        assert one_step(replica, scale, clip=0.5) == one_step(plain, scale, clip=0.5)
    assert all(map(torch.equal, weights(replica), weights(plain)))
    assert replica.account.bytes == 0


def flat(replica: Replica) -> torch.Tensor:
    return torch.cat([w.flatten() for w in weights(replica)])


def courses() -> dict[str, Any]:
    """Weights and bytes after each of six steps; a skip; what a checkpoint brings back."""
    rank = world.init(timeout=20).rank
    found: dict[str, Any] = {}
    # A rank of 64 leaves nothing to compress, so everything is sent whole.
    cases = {
        "ddp": ("ddp", {}),
        "fp16": ("ddp-fp16", {}),
        "whole": ("powersgd", {"rank": 64, "dense_steps": 2}),
        "rank 2": ("powersgd", {"rank": 2, "dense_steps": 2}),
        "local": ("post-local-sgd", {"every": 3}),
        "later": ("post-local-sgd", {"every": 3, "dense_steps": 2}),
    }
    for title, (name, settings) in cases.items():
        replica = wide(name, **settings)
        step(replica, rank, 0, scale=0.0)  # as the trainer primes DDP
        start = replica.account.bytes
        for number in range(6):
            step(replica, rank, number)
            found[f"{title} {number}"] = flat(replica)
        found[f"{title} bytes"] = replica.account.bytes - start
        found[f"{title} exposed"] = replica.account.exposed
        with replica.consensus():
            found[f"{title} consensus"] = flat(replica)
        state = replica.state()
        other = wide(name, **settings)
        step(other, rank, 0, scale=0.0)
        other.load_state(*state, same_replicas=True)
        for number in (6, 7, 8):
            step(replica, rank, number)
            step(other, rank, number)
        found[f"{title} resumed"] = torch.equal(flat(replica), flat(other))
        step(replica, rank, 9, scale=float("nan") if rank == 0 else 1.0)
        step(replica, rank, 10)
        found[f"{title} finite"] = bool(flat(replica).isfinite().all())
    return found


def test_each_does_what_it_is_called(ranks: Ranks) -> None:
    one, other = ranks(2, courses)
    size = one["ddp 0"].numel()
    dense = all_reduce_bytes(4 * size, 2)
    for title in ("ddp", "fp16", "whole", "rank 2", "local", "later"):
        assert one[f"{title} resumed"], title
        assert one[f"{title} finite"], title
        assert one[f"{title} exposed"] > 0, title
    for number in range(6):
        assert torch.equal(one[f"ddp {number}"], other[f"ddp {number}"])
        for title in ("fp16", "whole", "rank 2"):
            assert torch.equal(one[f"{title} {number}"], other[f"{title} {number}"]), title
        assert torch.allclose(one[f"fp16 {number}"], one[f"ddp {number}"], atol=1e-3)
        assert torch.allclose(one[f"whole {number}"], one[f"ddp {number}"], atol=1e-6)
    assert torch.allclose(one["rank 2 1"], one["ddp 1"], atol=1e-6)  # still dense
    assert not torch.allclose(one["rank 2 5"], one["ddp 5"], atol=1e-6)
    assert one["ddp bytes"] == 6 * dense
    assert one["fp16 bytes"] == 3 * dense
    assert one["whole bytes"] == 6 * dense
    low_rank = all_reduce_bytes(4 * (2 * 2 * 64 + 2 * 64), 2)
    assert one["rank 2 bytes"] == 2 * dense + 4 * low_rank
    _check_local(one, other, dense)


def _check_local(one: dict[str, Any], other: dict[str, Any], dense: int) -> None:
    """The priming step counts for the averager too: it averages after it and every third."""
    for number in range(6):
        together = number in (2, 5)
        assert torch.equal(one[f"local {number}"], other[f"local {number}"]) == together, number
    assert one["local bytes"] == 2 * dense
    mean = (one["local 4"] + other["local 4"]) / 2
    assert not torch.allclose(one["local 5"], one["local 4"])
    assert torch.allclose(one["local consensus"], one["local 5"])
    assert mean.shape == one["local 5"].shape
    assert torch.equal(one["later 0"], other["later 0"])
    assert torch.allclose(one["later 0"], one["ddp 0"], atol=1e-6)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--method", "powersgd", "--rank", "0"], "--rank takes a number >= 1"),
        (["--method", "powersgd", "--dense-steps", "1"], "--dense-steps takes a number >= 2"),
        (["--method", "powersgd", "--min-compression", "0"], "--min-compression takes a number >"),
        (["--method", "post-local-sgd", "--every", "1"], "--every takes a number of steps >= 2"),
        (["--method", "post-local-sgd", "--dense-steps", "-1"], "--dense-steps takes a number >="),
        (["--method", "ddp-fp16", "--bucket-mb", "0"], "--bucket-mb takes a number > 0"),
        (["--method", "powersgd", "--shards", "2"], "powersgd keeps each replica whole"),
    ],
)
def test_bad_settings(flags: list[str], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse(flags)
    assert said in str(refused.value)

"""Buckets: their order, their launch behind the backward pass, and what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.conftest import Ranks
from thinwire.methods.overlap.bucket import arrange


class Net(nn.Module):
    """Parameters are registered in another order than the backward pass produces gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(16, 1)
        self.first = nn.Linear(6, 16)
        self.middle = nn.Linear(16, 16)

    def loss(self, seed: int) -> Tensor:
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
        hidden = self.middle(torch.tanh(self.first(x)))
        return (self.last(torch.tanh(hidden)) - x.sum(1, keepdim=True)).square().mean()


def build(kind: str = "OneBitAdam", **settings: Any) -> tuple[Net, Any]:
    torch.manual_seed(0)
    net = Net()
    settings = {"lr": 1e-2, "freeze_at": 4, "bucket_mb": 0.0001} | settings
    return net, getattr(tw, kind)(net.parameters(), **settings)


def train(net: Net, optimizer: Any, steps: int, micro: int = 1) -> None:
    rank = optimizer.wire.rank
    for step in range(steps):
        for part in range(micro - 1):
            with optimizer.accumulating():
                net.loss(1000 * step + 10 * part + rank).backward()
        net.loss(1000 * step + 500 + rank).backward()
        optimizer.step()
        optimizer.zero_grad()


def digest_of(kind: str, overlap: bool, micro: int, clip: float | None) -> tuple[bytes, dict, list]:
    tw.init()
    net, optimizer = build(kind, overlap=overlap, clip=clip)
    early: list[int] = []
    reducer = optimizer.engine.reducer
    launch_rest = reducer.launch_rest
    reducer.launch_rest = lambda: (early.append(reducer.launched), launch_rest())
    train(net, optimizer, 8, micro)
    return tw.wire.agreement.digest(net.parameters()), optimizer.account.snapshot(), early


@pytest.mark.parametrize("kind", ["OneBitAdam", "OneBitLamb"])
@pytest.mark.parametrize("micro", [1, 3])
def test_overlap_changes_when_and_not_what(ranks: Ranks, kind: str, micro: int) -> None:
    late = ranks(2, digest_of, kind, False, micro, None)
    soon = ranks(2, digest_of, kind, True, micro, None)
    assert {d for d, _, _ in late} == {d for d, _, _ in soon}
    assert len({d for d, _, _ in soon}) == 1
    for (_, one, _), (_, other, early) in zip(late, soon, strict=True):
        assert one["bytes"] == other["bytes"]
        assert one["transfers"] == other["transfers"]
        assert early == [0] + [3] * 7, "all buckets are in the air before step(), but at the first"


def test_with_clip_only_the_compressed_stage_waits_for_the_norm(ranks: Ranks) -> None:
    for _, _, early in ranks(2, digest_of, "OneBitAdam", True, 1, 1.0):
        assert early == [0, 3, 3, 3, 0, 0, 0, 0]


def order_of_buckets() -> list[list[int]]:
    tw.init()
    net, optimizer = build()
    if optimizer.wire.rank == 1:  # another order there: rank 0's counts
        optimizer.engine.reducer.hooks.order |= dict.fromkeys([1, 3, 5, 0, 2, 4])
    train(net, optimizer, 1)
    return [bucket.indices for bucket in optimizer.buckets]


def test_buckets_follow_the_first_backward_pass_of_rank_0(ranks: Ranks) -> None:
    one, other = ranks(2, order_of_buckets)
    assert one == other
    layers = [index // 2 for bucket in one for index in bucket]
    assert layers == [0, 0, 2, 2, 1, 1], "last, middle, first"
    assert len(one) == 3


def uneven() -> tuple[bytes, int]:
    """On each rank another part of the model takes no part in the pass."""
    rank = tw.init().rank
    net, optimizer = build()
    x = torch.ones(2, 16)
    for step in range(8):
        if (step + rank) % 2:
            net.last(x * (step + 1)).sum().backward()
        else:
            net.middle(net.first(x[:, :6])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return tw.wire.agreement.digest(net.parameters()), optimizer.account.transfers


def test_ranks_that_use_other_layers_still_meet(ranks: Ranks) -> None:
    one, other = ranks(2, uneven)
    assert one == other


def misuse() -> list[str]:
    tw.init()
    texts = []
    net, optimizer = build()
    train(net, optimizer, 2)
    net.loss(1).backward()
    with pytest.raises(RuntimeError, match=r"second backward pass.*accumulating\(\)") as info:
        net.loss(2).backward()
    texts.append(str(info.value))

    net, optimizer = build()
    train(net, optimizer, 2)
    net.loss(1).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
    with pytest.raises(RuntimeError, match=r"changed after they had been sent.*use clip="):
        optimizer.step()

    net, optimizer = build()
    train(net, optimizer, 2)
    net.loss(1).backward()
    optimizer.found_inf = torch.tensor(0.0)  # as GradScaler does
    with pytest.raises(RuntimeError, match=r"GradScaler's scale.*overlap=False"):
        optimizer.step()
    return texts


def test_what_overlap_cannot_honour_is_refused_with_the_fix(ranks: Ranks) -> None:
    one, other = ranks(2, misuse)
    assert one == other


def without_overlap() -> bool:
    """Accumulation and clipping in the user's own loop, as with any torch optimizer."""
    tw.init()
    net, optimizer = build(overlap=False)
    for step in range(6):
        net.loss(step).backward()
        net.loss(step + 100).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return all(bool(p.isfinite().all()) for p in net.parameters())


def test_without_overlap_any_loop_works(ranks: Ranks) -> None:
    assert ranks(2, without_overlap) == [True, True]


def test_sizes_of_buckets() -> None:
    parameters = [torch.zeros(250_000) for _ in range(12)]  # 1 MB each
    sizes = [len(b) for b in arrange(range(12), parameters, ["a"] * 12, None)]
    assert sizes == [3, 3, 3, 3], "about four"
    sizes = [len(b) for b in arrange(range(12), parameters, ["a"] * 12, 5.0)]
    assert sizes == [5, 5, 2]
    kinds = ["a", "b"] * 6
    assert arrange(range(12), parameters, kinds, 25.0) == [[*range(0, 12, 2)], [*range(1, 12, 2)]]


def test_hooks_let_the_optimizer_go() -> None:
    import gc
    import weakref

    net, optimizer = build()
    seen = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert seen() is None
    net.loss(0).backward()

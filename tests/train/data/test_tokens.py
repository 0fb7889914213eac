"""Windows, the global order, the replicas' shares of it, masks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from thinwire.errors import UsageError
from thinwire.train.data.order import permute
from thinwire.train.data.tokens import (
    IGNORED,
    Batches,
    Windows,
    mask_tokens,
    validation_batches,
)

CONTEXT = 4


def ramp(count: int) -> np.ndarray:
    """Tokens 0, 1, 2, ... so that a window's first token says which window it is."""
    return np.arange(count * CONTEXT + 1, dtype=np.uint16)


def window_ids(x: torch.Tensor) -> list[int]:
    return (x[:, 0] // CONTEXT).tolist()


def read(replicas: int, steps: int, count: int = 64, batch: int = 2, position: int = 0):
    """Windows read per step and replica, and the position afterwards."""
    readers = [
        Batches([ramp(count)], CONTEXT, batch, r, replicas, seed=3, position=position)
        for r in range(replicas)
    ]
    steps_read = [[window_ids(reader.next()[0]) for reader in readers] for _ in range(steps)]
    assert len({reader.position for reader in readers}) == 1
    return steps_read, readers[0].position


def test_targets_are_the_next_tokens():
    x, y = Batches([ramp(10)], CONTEXT, 3, 0, 1, seed=0).next()
    assert x.shape == y.shape == (3, CONTEXT)
    assert x.dtype == y.dtype == torch.int64
    assert torch.equal(y, x + 1)


def test_an_epoch_reads_every_window_once_and_replicas_share_none():
    steps, position = read(replicas=4, steps=8, count=64, batch=2)
    assert position == 64
    seen = [window for step in steps for replica in step for window in replica]
    assert sorted(seen) == list(range(64))


def test_epochs_and_seeds_differ():
    indices = np.arange(100, dtype=np.int64)
    first = permute(indices, 100, 5, np.zeros_like(indices))
    second = permute(indices, 100, 5, np.ones_like(indices))
    other = permute(indices, 100, 6, np.zeros_like(indices))
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, other)
    assert not np.array_equal(first, indices)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 63, 64, 65, 1000, 4097])
def test_permute_is_one_to_one(size: int):
    indices = np.arange(size, dtype=np.int64)
    for seed in (0, -1, 2**63):
        out = permute(indices, size, seed, np.full_like(indices, 2))
        assert sorted(out.tolist()) == list(range(size))


def test_permute_scatters_neighbours_over_a_large_range():
    size = 10_000_000
    out = permute(np.arange(4096, dtype=np.int64), size, 1, np.zeros(4096, np.int64))
    assert len(np.unique(out)) == 4096
    counts, _ = np.histogram(out, bins=16, range=(0, size))
    assert counts.min() > 180  # 256 expected, standard deviation 15.5
    assert counts.max() < 335


def test_position_resumes_the_order_exactly():
    whole, _ = read(replicas=2, steps=6)
    _, position = read(replicas=2, steps=3)
    rest, _ = read(replicas=2, steps=3, position=position)
    assert rest == whole[3:]


def test_position_can_be_set():
    reader = Batches([ramp(64)], CONTEXT, 2, 0, 1, seed=3)
    first, second = reader.next(), reader.next()
    reader.position = 2
    assert torch.equal(reader.next()[0], second[0])
    assert not torch.equal(first[0], second[0])


def test_another_number_of_replicas_goes_on_in_the_same_order():
    alone, _ = read(replicas=1, steps=12)
    _, position = read(replicas=2, steps=3)
    rest, _ = read(replicas=3, steps=2, position=position)
    assert [w for step in rest for share in step for w in share] == [
        w for step in alone[6:] for share in step for w in share
    ]


def test_a_step_across_the_epoch_boundary_goes_on_with_the_next_order():
    steps, _ = read(replicas=1, steps=8, count=5, batch=2)  # 16 windows of 5: three epochs
    seen = [w for step in steps for share in step for w in share]
    for epoch in range(3):
        assert sorted(seen[5 * epoch : 5 * epoch + 5]) == list(range(5))


def test_windows_never_cross_arrays():
    arrays = [ramp(2), ramp(1)[:3], ramp(3) + 100]  # the second is shorter than a window
    windows = Windows(arrays, CONTEXT)
    assert len(windows) == 5
    rows = windows.read(np.arange(5))
    assert rows[:, 0].tolist() == [0, 4, 100, 104, 108]
    assert torch.equal(rows[:, 1:], rows[:, :-1] + 1)


def test_no_window_is_refused():
    with pytest.raises(UsageError, match="smaller --context"):
        Windows([ramp(1)[:4]], CONTEXT)


def test_replica_out_of_range_is_refused():
    with pytest.raises(ValueError, match="replica"):
        Batches([ramp(4)], CONTEXT, 1, 2, 2, seed=0)


@pytest.mark.parametrize("limit", [1, 5, 40, 1000])
@pytest.mark.parametrize("mask_vocab", [None, 300])
def test_validation_windows_do_not_depend_on_replicas(limit: int, mask_vocab: int | None):
    def everything(replicas: int) -> torch.Tensor:
        rows = [
            torch.cat([x, y], dim=1)
            for r in range(replicas)
            for x, y in validation_batches(
                [ramp(50)], CONTEXT, 3, r, replicas, limit, mask_vocab=mask_vocab
            )
        ]
        return torch.cat(rows)

    assert len(everything(1)) == min(limit, 50)
    assert torch.equal(everything(1), everything(4))


def test_validation_is_spread_over_the_tokens():
    (x, _), *_ = validation_batches([ramp(100)], CONTEXT, 8, 0, 1, limit=4)
    assert window_ids(x) == [0, 25, 50, 75]


def test_masking_follows_bert():
    x = torch.randint(100, (400, 100), generator=torch.Generator().manual_seed(0))
    inputs, targets = mask_tokens(x, 100, generator=torch.Generator().manual_seed(1))
    chosen = targets != IGNORED
    assert torch.equal(targets[chosen], x[chosen])
    assert torch.equal(inputs[~chosen], x[~chosen])
    assert chosen.float().mean().item() == pytest.approx(0.15, abs=0.01)
    masked = inputs[chosen] == 100
    kept = inputs[chosen] == x[chosen]
    assert masked.float().mean().item() == pytest.approx(0.8, abs=0.02)
    assert kept.float().mean().item() == pytest.approx(0.101, abs=0.02)  # 1 of 100 noises is equal
    assert inputs.max() == 100


def test_a_mask_is_always_there():
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        _, targets = mask_tokens(torch.zeros(2, dtype=torch.long), 9, generator=generator)
        assert (targets != IGNORED).any()


def test_masks_resume_and_do_not_depend_on_replicas():
    def rows(replicas: int, position: int, steps: int) -> torch.Tensor:
        readers = [
            Batches([ramp(64)], CONTEXT, 2, r, replicas, 3, position, mask_vocab=300)
            for r in range(replicas)
        ]
        return torch.cat([torch.cat(b.next(), dim=1) for _ in range(steps) for b in readers])

    whole = rows(replicas=1, position=0, steps=8)
    assert torch.equal(rows(replicas=2, position=8, steps=2), whole[8:16])
    assert (whole[:, :CONTEXT] == 300).any()

"""Each coordinate once in a cycle, the same on all ranks; each round has its share of a tensor."""

import pytest
import torch
from torch import Tensor

from thinwire.methods.sparse.subsets import Subsets, parts_of

SIZES = [1, 7, 0, 20, 21, 63, 1000]


def masks(partition: Subsets, sizes: list[int], number: int) -> list[Tensor]:
    """For each tensor how often each of its values is in the round."""
    counts = [torch.zeros(size) for size in sizes]
    subset = partition.subset(number)
    before = subset.read(counts, torch.empty(subset.numel))
    subset.write(before + 1, counts)
    return counts


@pytest.mark.parametrize("parts", [1, 2, 20, 300])
def test_every_coordinate_has_its_turn_exactly_once_in_a_cycle(parts: int) -> None:
    partition = Subsets(SIZES, parts, seed=5)
    for cycle in range(2):
        seen = [torch.zeros(size) for size in SIZES]
        for turn in range(parts):
            for total, mask in zip(
                seen, masks(partition, SIZES, cycle * parts + turn), strict=True
            ):
                total += mask
                assert abs(int(mask.sum()) - total.numel() / parts) < 1, "not its share"
        assert all(torch.equal(total, torch.ones_like(total)) for total in seen)


def test_subsets_follow_from_the_seed_alone_and_change_with_the_cycle() -> None:
    one, same, other = (Subsets(SIZES, 20, seed) for seed in (5, 5, 6))
    late = Subsets(SIZES, 20, 5)
    assert torch.equal(_flat(late, 47), _flat(one, 47)), "whatever was asked for before"
    for number in range(25):
        assert torch.equal(_flat(one, number), _flat(same, number))
    assert one.fingerprint() == same.fingerprint() != other.fingerprint()
    assert not torch.equal(_flat(one, 3), _flat(other, 3))
    assert not any(torch.equal(_flat(one, 3), _flat(one, 20 + k)) for k in range(20))


def test_turns_are_uniform_and_independent_between_rows() -> None:
    """400 cycles of C = 4: by chance alone, counts of 100 have a standard deviation of 9."""
    partition = Subsets([8], 4, seed=0)
    counts = torch.zeros(4, 8)
    together = torch.zeros(8, 8)
    for number in range(4 * 400):
        mask = _flat(partition, number)
        counts[number % 4] += mask
        together += torch.outer(mask, mask)
    assert int((counts - 100).abs().max()) < 45
    across = together[:4, 4:]  # a quarter of the 400 cycles have any two of them together
    assert int((across - 100).abs().max()) < 45
    assert float(together[:4, :4].sum()) == 1600, "two of one row are never in the same round"


def test_memory_is_a_byte_for_each_row_and_old_cycles_are_forgotten() -> None:
    small, large = Subsets([6000], 20, 0), Subsets([6000], 300, 0)
    small.subset(0)
    large.subset(0)
    assert small.nbytes() == 6000 // 20
    assert large.nbytes() == 2 * 6000 // 300
    small.subset(20)
    assert small.nbytes() == 2 * 6000 // 20
    small.forget(before=19)
    assert small.nbytes() == 2 * 6000 // 20
    small.forget(before=20)
    assert small.nbytes() == 6000 // 20


def test_values_are_read_and_written_in_logical_order_whatever_the_layout() -> None:
    plain = torch.arange(24.0).view(4, 6)
    turned = plain.t().contiguous().t()  # the same values, other strides
    half = plain.to(torch.bfloat16)
    assert not turned.is_contiguous()
    subset = Subsets([24], 5, 0).subset(1)
    got = [subset.read([t], torch.empty(subset.numel)) for t in (plain, turned, half)]
    assert torch.equal(got[0], got[1])
    assert torch.equal(got[0], got[2])
    for tensor in (plain, turned, half):
        subset.write(-got[0], [tensor])
    assert torch.equal(plain, turned)
    assert torch.equal(plain, half.float())
    assert int((plain < 0).sum()) in (4, 5)


def test_parts_of_a_fraction() -> None:
    fractions = {
        1.0: 1,
        0.5: 2,
        0.05: 20,
        0.1: 10,
        1 / 3: 3,
        1 / 49: 49,
        0.3: 4,
        0.7: 2,
        0.001: 1000,
    }
    assert {fraction: parts_of(fraction) for fraction in fractions} == fractions


def _flat(partition: Subsets, number: int) -> Tensor:
    return torch.cat(masks(partition, partition.sizes, number))

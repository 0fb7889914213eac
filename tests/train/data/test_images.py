"""Images: both sides of a set, the replicas' shares of it, and what is refused."""

import importlib.util
import sys

import numpy as np
import pytest
import torch

from thinwire.errors import UsageError
from thinwire.train.data.images import ImageBatches, Images, load_digits, split, validation_images

HAS_SKLEARN = importlib.util.find_spec("sklearn") is not None


def numbered(count: int) -> Images:
    """Images whose label says which one it is."""
    return Images(torch.zeros(count, 1, 2, 2), torch.arange(count))


@pytest.mark.skipif(not HAS_SKLEARN, reason="digits come with scikit-learn: thinwire[images]")
def test_digits_are_scaled_and_split_the_same_way_every_time() -> None:
    digits, again = load_digits(), load_digits()
    assert (len(digits.train), len(digits.validation)) == (1438, 359)
    assert digits.digest == again.digest
    assert load_digits(0.5).digest != digits.digest
    assert digits.train.pixels.shape[1:] == (1, 8, 8)
    assert (digits.train.pixels.min(), digits.train.pixels.max()) == (0, 1)
    assert digits.shape.classes == 10
    for side in (digits.train, digits.validation):
        assert side.labels.bincount().min() > 0.05 * len(side)


def test_a_split_leaves_out_nothing_and_shares_nothing() -> None:
    for share, kept in ((0.2, 20), (1e-9, 1), (1 - 1e-9, 99)):
        both = split(numbered(100), share)
        assert len(both.validation) == kept
        found = torch.cat([both.train.labels, both.validation.labels])
        assert found.sort().values.equal(torch.arange(100))
    with pytest.raises(UsageError, match="between 0 and 1, got 1"):
        split(numbered(100), 1.0)


def test_an_epoch_reads_every_image_once_by_any_number_of_replicas() -> None:
    read = {}
    for replicas, batch in ((1, 12), (2, 6), (3, 4)):
        readers = [ImageBatches(numbered(24), batch, r, replicas, seed=5) for r in range(replicas)]
        read[replicas] = [torch.cat([r.next()[1] for r in readers]).tolist() for _ in range(4)]
        assert {reader.position for reader in readers} == {48}
    assert read[1] == read[2] == read[3]
    first, second = np.array(read[1]).reshape(2, 24)
    assert sorted(first) == sorted(second) == list(range(24))
    assert list(first) != list(second)


def test_validation_is_the_same_by_any_number_of_replicas() -> None:
    for replicas in (1, 2, 5):
        shares = [validation_images(numbered(30), 4, r, replicas, 10) for r in range(replicas)]
        labels = torch.cat([y for share in shares for _, y in share])
        assert labels.tolist() == list(range(0, 30, 3))


def test_without_scikit_learn_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(UsageError, match=r"pip install 'thinwire\[images\]'"):
        load_digits()

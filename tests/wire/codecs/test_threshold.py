"""Threshold against its plain definition: what is sent, what is kept, how many bytes it takes."""

import io
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire as tw
from tests.conftest import Ranks
from tests.wire.codecs.threshold_oracle import Mean, Stream, is_refresh, pieces_of
from thinwire.wire.codecs import Codec, ErrorFeedback, Threshold, parse
from thinwire.wire.codecs.selection import select
from thinwire.wire.codecs.sparse import Levels, Places

SIZES = [3000, 100, 7000, 255, 256]


def values(seed: int, numel: int = sum(SIZES), spread: float = 1.0) -> Tensor:
    """Heavy-tailed, as gradients are; `spread` moves the scale."""
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(numel, generator=generator) ** 3


def through(codec: Threshold, x: Tensor) -> tuple[Tensor, Tensor]:
    """(what a payload of one rank stands for, the payload), settled as after a finite flight."""
    split = codec.split(x.numel(), 1)
    payload = codec.encode_worker(x.clone(), split)
    out = codec.decode(payload, split, 0, torch.full_like(x, 9.0))
    codec.settle(True)
    return out, payload


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("density", "refresh"), [(0.01, 1000), (0.05, 6), (0.3, 4), (1.0, 1000)])
def test_equals_its_definition(density: float, refresh: int, momentum: float) -> None:
    codec = Threshold(density, refresh, value_bits=32, momentum=momentum, sizes=SIZES)
    oracle = Stream(pieces_of(SIZES), density, refresh)
    for step in range(20):
        x = values(step, spread=0.3 if step > 12 else 1.0)  # the count falls away at 13
        got, _ = through(codec, x)
        torch.testing.assert_close(got, oracle.send(x, momentum), rtol=1e-4, atol=1e-4)
        assert codec.worker.error is not None
        torch.testing.assert_close(codec.worker.error, oracle.error, rtol=1e-4, atol=1e-4)
        assert codec.share == sum(oracle.counts) / sum(s for s in SIZES if s >= 256)


def test_thresholds_are_searched_for_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    from thinwire.wire.codecs import selection

    searches: list[int] = []
    search = selection.kth_largest
    monkeypatch.setattr(
        selection, "kth_largest", lambda v, k: (searches.append(step), search(v, k))[1]
    )
    codec = Threshold(0.02, 32, sizes=[20_000])
    for step in range(1, 100):
        through(codec, torch.randn(20_000, generator=torch.Generator().manual_seed(step)))
    due = [s for s in range(1, 100) if is_refresh(s, 32)]
    assert due == [1, 2, 4, 8, 16, 32, 64, 96]
    assert set(due) <= set(searches)
    assert len(searches) < 20, searches


@pytest.mark.parametrize("change", [20.0, 0.02])
def test_a_count_that_runs_away_is_caught_in_the_same_step(change: float) -> None:
    codec = Threshold(0.01, sizes=[50_000])
    for step in range(5):  # the next refresh is due at step 8
        through(codec, values(step, 50_000))
    for step in (5, 6):
        _, _ = through(codec, values(step, 50_000, change))
        assert 0.005 <= codec.share <= 0.01


def test_density_is_held_while_the_gradients_change_a_thousandfold() -> None:
    codec = Threshold(0.01, sizes=[40_000])
    for step in range(120):
        through(codec, values(step, 40_000, 10 ** (-step / 40)))
        assert 0.005 <= codec.share <= 0.01, step


def test_the_kth_of_many_equal_values_and_of_zeros() -> None:
    ones = torch.ones(1000)
    found, threshold, finite = select(ones, 10, None)
    assert (found.numel(), threshold, finite) == (10, 1.0, True)
    zeros = torch.zeros(1000)
    found, threshold, finite = select(zeros, 10, None)
    assert (found.numel(), finite) == (0, True)
    found, _, _ = select(zeros, 10, threshold)
    assert found.numel() == 0
    few = zeros.clone()
    few[[7, 300]] = torch.tensor([-2.0, 1e-30])
    assert select(few, 10, None)[0].tolist() == [7, 300]


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16, 32])
def test_nothing_is_lost_only_late(bits: int) -> None:
    codec = Threshold(0.02, value_bits=bits, sizes=SIZES)
    given = returned = torch.zeros(sum(SIZES))
    for step in range(30):
        given = given + values(step)
        got, payload = through(codec, values(step))
        returned = returned + got
    assert codec.worker.error is not None
    torch.testing.assert_close(returned + codec.worker.error, given, rtol=1e-4, atol=1e-3)
    assert payload.shape[0] == 1


def test_a_step_that_is_skipped_leaves_no_trace() -> None:
    codecs = [Threshold(0.02, momentum=0.5, sizes=SIZES) for _ in range(2)]
    for step in range(6):
        for codec in codecs:
            through(codec, values(step))
        codecs[0].encode_worker(values(99, spread=50.0), codecs[0].split(sum(SIZES), 1))
        codecs[0].settle(False)
    one, other = (through(codec, values(100)) for codec in codecs)
    assert torch.equal(one[1], other[1])
    assert torch.equal(one[0], other[0])


@pytest.mark.parametrize("where", [10, 3050, 5000])  # a large tensor, a small one, the next large
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("bits", [1, 4, 32])
def test_what_is_not_finite_arrives_as_such(bad: float, bits: int, where: int) -> None:
    codec = Threshold(0.02, value_bits=bits, sizes=SIZES)
    through(codec, values(0))
    x = values(1)
    x[where] = bad
    split = codec.split(x.numel(), 1)
    payload = codec.encode_worker(x.clone(), split)
    assert not codec.decode(payload, split, 0, x).isfinite().all()


# -- bytes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "most", "nbytes"),
    [(100_000, 1000, 391 + 1000), (100_000, 100, 2 * (2 + 100)), (100_000, 30_000, 12_500)],
    ids=["bytes", "shorts", "bitmap"],
)
def test_places_take_the_shortest_form(part: int, most: int, nbytes: int) -> None:
    places = Places(part, most)
    assert places.nbytes == nbytes
    for count in (most, most // 2, 1, 0):
        generator = torch.Generator().manual_seed(count)
        chosen = torch.randperm(part, generator=generator)[:count].sort().values
        packed = torch.zeros(nbytes, dtype=torch.uint8)
        places.pack(chosen, packed)
        assert torch.equal(places.unpack(packed), chosen)
    assert nbytes <= 4 * most or most == 30_000


def test_a_block_that_is_full_keeps_its_last_for_later() -> None:
    places = Places(2560, 300)
    crowd = torch.cat([torch.arange(256), torch.tensor([2559])])
    admitted = places.admit(crowd)
    assert torch.equal(admitted, crowd[crowd != 255])
    packed = torch.zeros(places.nbytes, dtype=torch.uint8)
    places.pack(admitted, packed)
    assert torch.equal(places.unpack(packed), admitted)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_levels_keep_signs_and_come_closer_with_bits(bits: int) -> None:
    x = values(3, 1000)
    owner = torch.arange(1000) // 500
    levels = Levels(bits)
    codes, ranges = levels.encode(x, owner, 2)
    packed = torch.zeros(levels.nbytes(1000), dtype=torch.uint8)
    levels.pack(codes, packed)
    assert packed.numel() == 1000 * bits // 8
    got = levels.decode(levels.unpack(packed, 1000), owner, ranges)
    assert torch.equal(got.sign(), x.sign())
    off = (got - x).norm() / x.norm()
    assert off < {1: 1.1, 2: 0.7, 4: 0.16, 8: 0.01}[bits]


def test_bytes_of_a_payload() -> None:
    """1 % of a million values in 4 bits, beside two small tensors: 100 times less than float32."""
    sizes = [1_000_000, 100, 60]
    codec = Threshold(0.01, sizes=sizes)
    _, payload = through(codec, values(0, sum(sizes)))
    blocks = -(-sum(sizes) // 256)
    assert payload.numel() == 4 + (blocks + 10_000) + 10_000 // 2 + 2 * 160
    assert 4 * sum(sizes) / payload.numel() > 200


# -- among ranks -----------------------------------------------------------------------------------


def means(steps: int, settings: dict[str, Any], resume_at: int = -1) -> tuple[list[Tensor], int]:
    tw.init()
    wire = tw.Wire()
    codec = Threshold(sizes=SIZES, **settings)
    got = []
    for step in range(steps):
        if step == resume_at:
            file = io.BytesIO()
            torch.save(codec.state_dict(), file)
            file.seek(0)
            codec = Threshold(sizes=SIZES, **settings)
            codec.load_state_dict(torch.load(file, weights_only=True))
        x = values(100 * step + wire.rank)
        got.append(wire.mean(x, codec).wait().clone())
    return got, wire.account.bytes


@pytest.mark.parametrize("size", [2, 3])
def test_the_mean_equals_its_definition(ranks: Ranks, size: int) -> None:
    settings = {"density": 0.02, "value_bits": 32, "momentum": 0.5}
    answers = ranks(size, means, 9, settings)
    oracle = Mean(size, SIZES, 0.02, momentum=0.5)
    for step in range(9):
        expected = oracle.of([values(100 * step + rank) for rank in range(size)])
        for got, _ in answers:
            torch.testing.assert_close(got[step], expected, rtol=1e-5, atol=1e-6)
            assert torch.equal(got[step], answers[0][0][step]), "the same bits everywhere"
    codec = Threshold(sizes=SIZES, **settings)
    split = codec.split(sum(SIZES), 1 if size == 2 else size)
    width = codec.encode_worker(values(0), split).shape[1]
    sent = width if size == 2 else 2 * (size - 1) * width
    assert {bytes for _, bytes in answers} == {9 * sent}, "counted to the byte"


@pytest.mark.parametrize("size", [2, 3])
def test_a_loaded_memory_goes_on_bit_for_bit(ranks: Ranks, size: int) -> None:
    settings = {"density": 0.02, "momentum": 0.5}
    for ours, theirs in zip(
        ranks(size, means, 8, settings), ranks(size, means, 8, settings, 5), strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(ours[0], theirs[0], strict=True))


def portable(steps: int, settings: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
    """(the state all ranks can start from, what this rank still owes to the mean)."""
    tw.init()
    wire = tw.Wire()
    codec = Threshold(sizes=SIZES, **settings)
    total = torch.zeros(sum(SIZES))
    for step in range(steps):
        total += wire.mean(values(100 * step + wire.rank), codec).wait()
    state = codec.portable_state(lambda x: wire.mean(x).wait(), wire.size, wire.rank)
    return state, total


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3)])
def test_other_numbers_of_ranks_start_from_what_is_owed(
    ranks: Ranks, before: int, after: int
) -> None:
    """What was returned and what every rank now owes make up what was given."""
    answers = ranks(before, portable, 6, {"density": 0.02})
    given = sum(values(100 * s + r) for s in range(6) for r in range(before)) / before
    for state, total in answers:
        torch.testing.assert_close(total + state["error"], given, rtol=1e-4, atol=1e-3)
        assert torch.equal(state["error"], answers[0][0]["error"])
    codec = Threshold(0.02, sizes=SIZES)
    codec.load_portable_state(answers[0][0], after, 0)
    codec.require(sum(SIZES), after, 0)
    assert codec.steps == 6


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"density": 0}, r"density=...\) takes a number in \(0, 1\], got 0"),
        ({"density": 1.5}, r"density=...\) takes a number in \(0, 1\], got 1.5"),
        ({"density": float("nan")}, r"density=...\) takes a number in \(0, 1\], got nan"),
        ({"density": "1%"}, r"density=...\) takes a number in \(0, 1\], got '1%'"),
        ({"refresh": 0}, r"refresh=...\) takes a whole number >= 1, got 0"),
        ({"refresh": 2.5}, r"refresh=...\) takes a whole number >= 1, got 2.5"),
        ({"value_bits": 3}, r"value_bits=...\) takes one of 1, 2, 4, 8, 16, 32, got 3"),
        ({"momentum": 1.0}, r"momentum=...\) takes a number in \[0, 1\), got 1.0"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Threshold(**settings)


def test_one_stream_only() -> None:
    codec = Threshold(0.1)
    through(codec, values(0, 1000))
    with pytest.raises(ValueError, match="a buffer of 1000 values and was given 999"):
        codec.take_off(999, 2, 0)
    with pytest.raises(ValueError, match="one layer keeps all of the error"):
        ErrorFeedback(codec)  # type: ignore[arg-type]
    assert codec.fresh([500, 500]).worker.error is None
    assert repr(codec) == repr(codec.fresh())
    assert not isinstance(codec, Codec)
    assert parse("threshold:0.05").density == 0.05  # type: ignore[union-attr]

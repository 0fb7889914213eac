"""Every codec against a loop over blocks that anybody can check by hand."""

import math

import pytest
import torch
from torch import Tensor

from thinwire.errors import UsageError
from thinwire.wire.codecs import NAMES, Codec, Dense, ErrorFeedback, Feedback, Int4, Int8, parse

SIZES = [1, 7, 255, 256, 257, 1000, 40001]
QUANTIZERS: list[Int8 | Int4] = [Int8(), Int4(), Int8(64), Int4(8)]
DENSE = [Dense(t) for t in (torch.float32, torch.float64, torch.bfloat16, torch.float16)]


def values(numel: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    # Blocks of very different magnitude: a scale of the wrong block would show.
    return torch.randn(numel, generator=generator) * torch.linspace(-9, 9, numel).exp()


def roundtrip(codec: Codec, x: Tensor, rows: int) -> Tensor:
    part = codec.part(x.numel(), rows)
    payload = codec.encode(x, rows, part)
    assert payload.dtype == torch.uint8
    assert payload.shape == (rows, codec.payload_bytes(part))
    return codec.decode(payload, part, torch.empty_like(x))


def oracle(x: Tensor, rows: int, block: int, levels: int) -> tuple[Tensor, Tensor]:
    """(values after the codec, scale of each value), one block at a time."""
    out, scales = torch.empty_like(x), torch.empty_like(x)
    align = block if x.numel() >= rows * block else 8
    part = math.ceil(x.numel() / (rows * align)) * align
    for row in range(rows):
        for start in range(row * part, (row + 1) * part, block):
            cut = slice(start, min(start + block, (row + 1) * part, x.numel()))
            if cut.start >= cut.stop:
                continue
            scale = x[cut].abs().max() / levels
            scales[cut] = scale
            out[cut] = (x[cut] * (1 / scale)).round() * scale if scale > 0 else 0.0
    return out, scales


@pytest.mark.parametrize("codec", QUANTIZERS, ids=repr)
@pytest.mark.parametrize("numel", SIZES)
def test_quantisers_do_what_the_loop_does(codec: Int8 | Int4, numel: int) -> None:
    x = values(numel)
    for rows in range(1, 6):
        expected, scales = oracle(x, rows, codec.block, codec.levels)
        got = roundtrip(codec, x, rows)
        assert torch.equal(got, expected)
        assert ((got - x).abs() <= scales / 2 * (1 + 1e-5)).all()
        assert torch.equal(roundtrip(codec, x.clone(), rows), got), "the same input, the same bits"


@pytest.mark.parametrize("codec", DENSE, ids=repr)
@pytest.mark.parametrize("numel", SIZES)
def test_dense_rounds_once(codec: Dense, numel: int) -> None:
    x = values(numel)
    for rows in range(1, 6):
        assert torch.equal(roundtrip(codec, x, rows), x.to(codec.dtype).to(torch.float32))


@pytest.mark.parametrize("numel", SIZES)
def test_payload_bytes_by_hand(numel: int) -> None:
    for rows in range(1, 6):
        part = Dense().part(numel, rows)
        assert part == math.ceil(numel / rows)
        assert Dense().payload_bytes(part) == 4 * part
        assert Dense(torch.bfloat16).payload_bytes(part) == 2 * part
        for codec, per_byte in ((Int8(), 1), (Int4(), 2)):
            align = codec.block if numel >= rows * codec.block else 8
            part = codec.part(numel, rows)
            assert part % align == 0
            assert part * rows >= numel
            assert (part - align) * rows < numel, "no more padding than needed"
            blocks = math.ceil(part / codec.block)
            assert codec.payload_bytes(part) == 4 * blocks + part // per_byte


def test_bits_per_value() -> None:
    assert Dense().bits == 32
    assert Dense(torch.bfloat16).bits == 16
    assert Int8().bits == 8 + 32 / 256
    assert Int4().bits == 4 + 32 / 128
    assert Int4(64).bits == 4 + 32 / 64


@pytest.mark.parametrize("codec", [*QUANTIZERS, *DENSE], ids=repr)
def test_zeros_and_blocks_of_zeros(codec: Codec) -> None:
    assert torch.equal(roundtrip(codec, torch.zeros(1000), 3), torch.zeros(1000))
    x = torch.zeros(1024)
    x[512:] = 1.0
    assert torch.equal(roundtrip(codec, x, 1), x)


@pytest.mark.parametrize("codec", QUANTIZERS, ids=repr)
@pytest.mark.parametrize("size", [1e-45, 1e-40, 1e-38, 1e-36, 1e-35])
def test_denormals_stay_small_and_finite(codec: Int8 | Int4, size: float) -> None:
    """Below the smallest normal scale a value may be lost, but not grow or turn into a NaN."""
    x = torch.full((512,), size)
    x[::2] *= -1
    got = roundtrip(codec, x, 2)
    assert got.isfinite().all()
    assert (got.abs() <= x.abs() * 1.5).all()
    if size / codec.levels >= torch.finfo(torch.float32).tiny:
        torch.testing.assert_close(got, x, rtol=0.01, atol=0)


@pytest.mark.parametrize("codec", [*QUANTIZERS, *DENSE], ids=repr)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("numel", [40, 3000, 99_000])
def test_a_value_that_is_not_finite_survives_in_its_row_alone(
    codec: Codec, bad: float, numel: int
) -> None:
    rows = 3
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    clean = roundtrip(codec, x, rows)
    part = codec.part(numel, rows)
    spot = part + 3  # in row 1
    x[spot] = bad
    got = roundtrip(codec, x, rows)
    assert not math.isfinite(got[spot])
    others = torch.ones(numel, dtype=torch.bool)
    others[part : 2 * part] = False
    assert torch.equal(got[others], clean[others])


@pytest.mark.parametrize("codec", QUANTIZERS, ids=repr)
def test_coding_twice_changes_nothing(codec: Codec) -> None:
    once = roundtrip(codec, values(5000), 2)
    torch.testing.assert_close(roundtrip(codec, once, 2), once, rtol=1e-6, atol=0)


def test_float64_values_are_quantised_too() -> None:
    x = values(1000).double()
    assert torch.equal(roundtrip(Int8(), x, 2).float(), roundtrip(Int8(), x.float(), 2))


def test_bad_settings_are_refused_with_their_name() -> None:
    with pytest.raises(ValueError, match=r"Int8\(block=...\) takes a multiple of 8, got 12"):
        Int8(12)
    with pytest.raises(ValueError, match=r"Int4\(block=...\) takes a multiple of 8, got 0"):
        Int4(block=0)
    with pytest.raises(ValueError, match=r"Dense\(dtype=...\) takes one of torch.float32.*int32"):
        Dense(torch.int32)


def test_equal_settings_make_equal_codecs() -> None:
    assert Int8() == Int8(256) != Int8(64)
    assert Dense() == Dense(torch.float32) != Dense(torch.bfloat16)
    assert repr(Int4()) == "Int4(block=128)"


def test_codecs_by_name() -> None:
    assert parse("fp32") == Dense()
    assert parse("bf16") == Dense(torch.bfloat16)
    assert parse("fp16") == Dense(torch.float16)
    assert parse("int8") == Int8()
    coded = parse("int4+ef")
    assert isinstance(coded, ErrorFeedback)
    assert coded.codec == Int4()
    assert parse("int4+ef") is not coded, "each has its own memory"
    for name in NAMES:
        assert isinstance(parse(name), Codec | Feedback)


@pytest.mark.parametrize("name", ["int3", "", "int8+", "int8+xx", "+ef", "INT8", "int8 ", "ef"])
def test_unknown_names_are_answered_with_the_known_ones(name: str) -> None:
    with pytest.raises(UsageError, match=r"unknown codec .*takes one of fp32, bf16.*int4\+ef"):
        parse(name)

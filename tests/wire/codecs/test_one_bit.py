"""OneBit against its formula, the two implementations against each other, and on the wire."""

import math

import pytest
import torch
from torch import Tensor

import thinwire as tw
from thinwire.wire.codecs import ErrorFeedback, OneBit, one_bit, parse

SIZES = [1, 7, 8, 9, 1000, 40001, 200_003]


def values(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def oracle(x: Tensor) -> Tensor:
    """||x|| / sqrt(d) * sign(x) with sign(0) = +1."""
    if x.numel() == 0:
        return x.clone()
    scale = (x.double().square().sum() / x.numel()).sqrt().to(x.dtype)
    return torch.where(x >= 0, scale, -scale)


def roundtrip(x: Tensor, rows: int) -> Tensor:
    codec = OneBit()
    part = codec.part(x.numel(), rows)
    payload = codec.encode(x, rows, part)
    assert payload.shape == (rows, codec.payload_bytes(part))
    return codec.decode(payload, part, torch.full_like(x, 7.0))


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_the_codec_equals_its_formula(numel: int, rows: int) -> None:
    x = values(numel)
    torch.testing.assert_close(roundtrip(x, rows), oracle(x), rtol=1e-6, atol=0)
    torch.testing.assert_close(roundtrip(x.double(), rows), oracle(x.double()), rtol=1e-6, atol=0)


def test_zero_counts_as_positive_and_padding_does_not_count() -> None:
    x = torch.tensor([0.0, -0.0, -3.0])
    assert torch.equal(roundtrip(x, 4), torch.tensor([1.0, 1.0, -1.0]) * math.sqrt(3))
    assert torch.equal(roundtrip(torch.zeros(100), 3), torch.zeros(100))


def test_the_norm_is_kept_however_long_the_buffer() -> None:
    """A float32 sum of many squares stops growing; the scale must not."""
    x = values(3_000_001)
    assert float(roundtrip(x, 2).double().norm()) == pytest.approx(
        float(x.double().norm()), rel=1e-6
    )


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_tensor_operations_and_numpy_give_the_same_bytes(numel: int, rows: int) -> None:
    x, codec = values(numel, seed=numel), OneBit()
    part = codec.part(numel, rows)
    payload = codec.encode(x, rows, part)
    signs = torch.zeros(rows, part // 8, dtype=torch.uint8)
    scale = one_bit._pack(x, signs, part)
    assert torch.equal(signs, payload[:, 4:])
    scales = payload[:, :4].clone(memory_format=torch.contiguous_format).view(torch.float32)
    torch.testing.assert_close(scale.expand(rows, 1), scales, rtol=1e-4, atol=0)
    out = torch.empty_like(x)
    one_bit._unpack(signs, scales, out)
    assert torch.equal(out, codec.decode(payload, part, torch.empty_like(x)))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("numel", [9, 70_000])
def test_one_bad_value_poisons_the_whole_buffer(bad: float, numel: int) -> None:
    x = values(numel)
    x[numel // 2] = bad
    assert not roundtrip(x, 3).isfinite().any()
    signs = torch.zeros(3, OneBit().part(numel, 3) // 8, dtype=torch.uint8)
    assert not one_bit._pack(x, signs, OneBit().part(numel, 3)).isfinite()


def test_payload_by_hand() -> None:
    codec = OneBit()
    assert codec.part(17, 2) == 16
    assert codec.payload_bytes(16) == 2 + 4
    assert codec.bits == pytest.approx(1, abs=1e-4)
    payload = codec.encode(torch.tensor([1.0, -1, 1, -1, 1, -1, 1, -1, 1]), 2, 8)
    one = [0, 0, 128, 63]  # 1.0 as little-endian float32
    assert payload.tolist() == [[*one, 0b10101010], [*one, 0b10000000]]
    assert parse("onebit") == codec


def test_error_feedback_brings_the_sum_of_what_was_sent_close_to_what_was_given() -> None:
    """The norm-preserving scale with feedback: a constant comes out right in the mean."""
    codec = ErrorFeedback(OneBit())
    x, total = values(1000), torch.zeros(1000)
    part = codec.codec.part(1000, 1)
    for _ in range(400):
        payload = codec.worker.encode(codec.codec, x, 1, part, 1.0)
        codec.settle(True)
        total += codec.codec.decode(payload, part, torch.empty(1000))
    assert float((total / 400 - x).norm() / x.norm()) < 0.1


def two_phase(numel: int, steps: int) -> tuple[list[Tensor], Tensor, Tensor, int]:
    tw.init()
    wire, codec = tw.Wire(), ErrorFeedback(OneBit())
    means = [wire.mean(values(numel, 10 * s + wire.rank), codec).wait() for s in range(steps)]
    owner = torch.empty(0) if codec.owner.error is None else codec.owner.error
    assert codec.worker.error is not None
    return means, codec.worker.error, owner, wire.account.bytes


def dense_oracle(size: int, numel: int, steps: int) -> list[Tensor]:
    """The two-phase mean with both errors, all ranks in one process."""
    part = math.ceil(numel / (8 * size)) * 8
    errors = [torch.zeros(numel) for _ in range(size)]
    chunks = torch.zeros(numel).split(part)
    owners = [c.clone() for c in chunks]
    results = []
    for step in range(steps):
        sent = []
        for rank in range(size):
            z = values(numel, 10 * step + rank) + errors[rank]
            sent.append(oracle(z))
            errors[rank] = z - sent[-1]
        mean = torch.stack(sent).mean(0)
        out = []
        for index, chunk in enumerate(mean.split(part)):
            a = chunk + owners[index]
            out.append(oracle(a))
            owners[index] = a - out[-1]
        results.append(torch.cat(out))
    return results


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("numel", [1, 7, 1000, 40001])
def test_the_mean_on_real_ranks(ranks, size: int, numel: int) -> None:
    steps = 3
    answers = ranks(size, two_phase, numel, steps)
    expected = dense_oracle(size, numel, steps)
    for means, _, _, _ in answers:
        assert all(torch.equal(a, b) for a, b in zip(means, answers[0][0], strict=True))
        for got, wanted in zip(means, expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=2e-5, atol=1e-6)
    padded = math.ceil(numel / (8 * size)) * 8 * size
    each = 2 * (size - 1) * padded // (8 * size) + 8 * (size - 1)
    assert [sent for *_, sent in answers] == [steps * each] * size
    given = torch.stack([values(numel, 10 * s + r) for s in range(steps) for r in range(size)])
    kept = torch.stack([worker for _, worker, _, _ in answers]).mean(0)
    kept += torch.cat([owner for _, _, owner, _ in answers])
    torch.testing.assert_close(sum(answers[0][0]) + kept, given.sum(0) / size, rtol=1e-4, atol=1e-4)

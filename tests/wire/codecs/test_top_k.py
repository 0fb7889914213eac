"""TopK against its plain definition, and SparseLoCo against a round written out."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.conftest import Ranks
from tests.methods.local import local_oracle as oracle
from thinwire.wire.codecs import ErrorFeedback, TopK, parse

NUMEL, LR = 3000, 0.05


def values(seed: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) ** 3


def largest(x: Tensor, chunk: int, k: int) -> Tensor:
    """x where it is among the k largest of its chunk, zero elsewhere."""
    out = torch.zeros_like(x)
    for start in range(0, x.numel(), chunk):
        part = x[start : start + chunk]
        places = part.abs().argsort(descending=True)[:k]
        out[start + places] = part[places]
    return out


def through(codec: TopK, x: Tensor, rows: int) -> Tensor:
    part = codec.part(x.numel(), rows)
    payload = codec.encode(x, rows, part)
    assert payload.shape == (rows, codec.payload_bytes(part))
    return codec.decode(payload, part, torch.full_like(x, 9.0))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("numel", "chunk", "k"), [(4096, 512, 8), (5120, 1024, 300)])
def test_equals_its_definition(numel: int, chunk: int, k: int, rows: int) -> None:
    x = values(numel, numel)
    got = through(TopK(chunk, k, value_bits=32), x, rows)
    assert torch.equal(got, largest(x, chunk, k))


def test_a_small_buffer_and_a_short_last_row() -> None:
    codec = TopK(1024, 64, value_bits=32)
    for numel in (1, 7, 100, 1500):
        x = values(numel, numel)
        got = through(codec, x, 2)
        sent = got != 0
        assert sent.any()
        assert torch.equal(got[sent], x[sent])
    assert through(codec, torch.zeros(0), 2).numel() == 0


def test_bits_and_bytes() -> None:
    codec = TopK()
    assert codec.payload_bytes(4096) == 4 + 16 + 64 + 16
    assert codec.bits == pytest.approx(8 * 100 / 4096)
    x = values(1, 8192)
    exact, coarse = largest(x, 4096, 64), through(codec, x, 1)
    assert torch.equal(exact.sign(), coarse.sign())
    assert (exact - coarse).norm() < 0.5 * exact.norm()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_arrives_as_such(bad: float) -> None:
    x = values(2, 8192)
    x[5000] = bad
    assert not through(TopK(), x, 2).isfinite().all()


def test_bad_settings() -> None:
    for settings, message in [
        ({"chunk": 100}, r"chunk=...\) takes a multiple of 256, got 100"),
        ({"k": 0}, r"k=...\) takes a whole number of 1 to 4096, got 0"),
        ({"k": 5000}, r"k=...\) takes a whole number of 1 to 4096, got 5000"),
        ({"value_bits": 3}, r"value_bits=...\) takes one of 1, 2, 4"),
    ]:
        with pytest.raises(ValueError, match=message):
            TopK(**settings)
    assert isinstance(parse("topk+ef"), ErrorFeedback)


def sparseloco(steps: int, replicas: int, codec: TopK) -> tuple[Tensor, int]:
    tw.init()
    weights = nn.Parameter(oracle.start_point(NUMEL))
    feedback = ErrorFeedback(codec, decay=0.95)
    optimizer = tw.SparseLoCo(torch.optim.SGD([weights], lr=LR), every=3, codec=feedback)
    gradient = oracle.quadratic(replicas, NUMEL)
    for step in range(1, steps + 1):
        weights.grad = gradient(optimizer.wire.rank, step, weights.detach())
        optimizer.step()
    return weights.detach().clone(), optimizer.account.bytes


def published(replicas: int, compress: Callable[[Tensor], Tensor]) -> Tensor:
    """x = x - mean_i C[own_i + 0.95 e_i], every 3 steps: one compression, of each rank's own."""
    gradient, x = oracle.quadratic(replicas, NUMEL), oracle.start_point(NUMEL)
    errors = [torch.zeros(NUMEL) for _ in range(replicas)]
    for turn in range(5):
        sent = []
        for i in range(replicas):
            y = x.clone()
            for step in range(3 * turn + 1, 3 * turn + 4):
                y = y - LR * gradient(i, step, y)
            z = (x - y) + 0.95 * errors[i]
            sent.append(compress(z))
            errors[i] = z - sent[i]
        x = x - torch.stack(sent).mean(0)
    return x


@pytest.mark.parametrize("replicas", [2, 4])
def test_sparseloco_equals_its_published_definition(ranks: Ranks, replicas: int) -> None:
    wanted = published(replicas, lambda z: largest(z, 256, 16))
    exact = TopK(256, 16, value_bits=32)
    for got, _ in ranks(replicas, sparseloco, 15, replicas, exact):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_two_bits_are_taken_once_on_four_ranks(ranks: Ranks) -> None:
    """And top-k twice, in two phases, is another method with half of the bytes."""
    codec = TopK(256, 16)
    wanted = published(4, lambda z: through(codec, z, 1))
    once = ranks(4, sparseloco, 15, 4, codec)
    twice = ranks(4, sparseloco, 15, 4, TopK(256, 16, gather=False))
    for got, _ in once:
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    assert (twice[0][0] - wanted).norm() > 1e-2 * wanted.norm()
    payload = codec.payload_bytes(codec.part(NUMEL, 1))
    rounds = 5
    assert [sent for _, sent in once] == [rounds * 3 * payload] * 4
    assert max(sent for _, sent in twice) < 0.7 * once[0][1]


def test_the_preset() -> None:
    optimizer = tw.SparseLoCo(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    codec = optimizer.fragments[0].codec
    assert (
        repr(codec)
        == "ErrorFeedback(TopK(chunk=4096, k=64, value_bits=2, gather=True), decay=0.95)"
    )
    assert (optimizer.outer.lr, optimizer.outer.momentum, optimizer.delay) == (1.0, 0.0, 0)

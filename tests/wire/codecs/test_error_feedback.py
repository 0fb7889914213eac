"""ErrorFeedback: what a codec loses is sent later, and a skipped step leaves no trace."""

import io

import pytest
import torch
from torch import Tensor

import thinwire as tw
from thinwire.wire.codecs import ErrorFeedback, Int4, Int8


def values(seed: int, numel: int = 1000) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def send(codec: ErrorFeedback, x: Tensor) -> Tensor:
    """What arrives of a worker's payload, settled as after a finite flight."""
    part = codec.codec.part(x.numel(), 1)
    payload = codec.worker.encode(codec.codec, x, 1, part, codec.decay)
    codec.settle(True)
    return codec.codec.decode(payload, part, torch.empty_like(x))


@pytest.mark.parametrize("decay", [1.0, 0.5, 0.0])
def test_the_kept_error_follows_its_definition(decay: float) -> None:
    codec = ErrorFeedback(Int4(), decay=decay)
    error = torch.zeros(1000)
    for step in range(4):
        x = values(step)
        z = x + decay * error
        got = send(codec, x)
        error = z - got
        assert codec.worker.error is not None
        torch.testing.assert_close(codec.worker.error, error)


def test_nothing_is_lost_only_late() -> None:
    codec = ErrorFeedback(Int4())
    given = sum(values(step) for step in range(20))
    returned = sum(send(codec, values(step)) for step in range(20))
    assert codec.worker.error is not None
    torch.testing.assert_close(returned + codec.worker.error, given, rtol=1e-4, atol=1e-4)


def test_a_step_that_is_skipped_leaves_the_memory_as_it_was() -> None:
    codec = ErrorFeedback(Int8())
    send(codec, values(0))
    assert codec.worker.error is not None
    before = codec.worker.error.clone()
    codec.worker.encode(codec.codec, values(1), 1, 1024, codec.decay)
    codec.settle(False)
    assert torch.equal(codec.worker.error, before)


def test_bad_settings() -> None:
    for decay in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match=r"decay=...\) takes a number in \[0, 1\]"):
            ErrorFeedback(Int8(), decay=decay)
    with pytest.raises(ValueError, match="one layer"):
        ErrorFeedback(ErrorFeedback(Int8()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"codec=...\) takes a codec such as"):
        ErrorFeedback("int8")  # type: ignore[arg-type]


def refusals() -> list[str]:
    tw.init()
    wire = tw.Wire()
    codec = ErrorFeedback(Int4())
    flight = wire.mean(values(wire.rank), codec)
    with pytest.raises(RuntimeError, match="second payload while its first is still in the air"):
        wire.mean(values(wire.rank), codec)
    flight.wait()
    with pytest.raises(ValueError, match="error of 1000 values and was given 999") as wrong:
        wire.mean(values(wire.rank, 999), codec)
    wire.mean(values(wire.rank), codec).wait()  # and it works on
    for transfer in (
        lambda: wire.exchange(values(0), [1 - wire.rank], [0.5], codec=codec),  # type: ignore[arg-type]
        lambda: wire.send(values(0), 1 - wire.rank, codec=codec),  # type: ignore[arg-type]
        lambda: wire.recv(values(0), 1 - wire.rank, codec=codec),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match="only mean takes error feedback"):
            transfer()
    assert wire.account.transfers == 2
    return [str(wrong.value)]


def test_misuse_is_refused_at_the_call_on_every_rank_alike(ranks) -> None:
    first, second = ranks(2, refusals)
    assert first == second


def resumed(steps: int, at: int) -> list[Tensor]:
    """Means with error feedback, the memory saved and loaded before step `at`."""
    tw.init()
    wire = tw.Wire()
    codec = ErrorFeedback(Int4(), decay=0.9)
    means = []
    for step in range(steps):
        if step == at:
            file = io.BytesIO()
            torch.save(codec.state_dict(), file)
            file.seek(0)
            codec = ErrorFeedback(Int4(), decay=0.9)
            codec.load_state_dict(torch.load(file, weights_only=True))
        means.append(wire.mean(values(10 * step + wire.rank), codec).wait())
    return means


def test_saved_and_loaded_memory_goes_on_bit_for_bit(ranks) -> None:
    whole = ranks(3, resumed, 4, -1)
    for at in (0, 2):
        broken = ranks(3, resumed, 4, at)
        for ours, theirs in zip(whole, broken, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def foreign_state() -> str:
    tw.init()
    wire = tw.Wire()
    codec = ErrorFeedback(Int4())
    codec.load_state_dict({"worker": torch.zeros(1000), "owner": torch.zeros(1000)})
    with pytest.raises(ValueError, match="as many ranks as saved it") as refused:
        wire.mean(values(0), codec)
    assert wire.account.transfers == 0, "before anything is sent"
    return str(refused.value)


def test_the_memory_of_another_number_of_ranks_is_refused(ranks) -> None:
    first, second = ranks(2, foreign_state)
    assert "keeps the owner error of 1000 values and was given 512" in first
    assert "keeps the owner error of 1000 values and was given 488" in second

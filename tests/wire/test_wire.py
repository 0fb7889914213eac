"""Transfers over real process groups, each against a plain computation of the same thing."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import thinwire as tw
from thinwire.wire.codecs import Codec, Dense, ErrorFeedback, Int4, Int8

SIZES = [1, 7, 1000, 40001]
CODECS: list[Codec] = [Dense(torch.bfloat16), Dense(torch.float16), Int8(), Int4()]


def payload(rank: int, numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * seed + rank))


def oracle_mean(inputs: list[Tensor], codec: Codec) -> Tensor:
    """The two-phase mean in one process: code each part, average it, code the average."""
    n, numel = len(inputs), inputs[0].numel()
    part = codec.part(numel, n)
    result = torch.empty(numel)
    for owner in range(n):
        cut = slice(min(owner * part, numel), min((owner + 1) * part, numel))
        width = cut.stop - cut.start
        coded = []
        for x in inputs:
            padded = torch.zeros(n * part)
            padded[:numel] = x
            rows = codec.encode(padded, n, part)
            coded.append(codec.decode(rows[owner : owner + 1], part, torch.empty(width)))
        mean = torch.stack(coded).sum(0) / n
        again = codec.encode(mean, 1, part)
        result[cut] = codec.decode(again, part, torch.empty(width))
    return result


def means(numel: int, codecs: list[Codec]) -> tuple[list[Tensor], int]:
    tw.init()
    wire = tw.Wire()
    return [wire.mean(payload(wire.rank, numel), codec).wait() for codec in codecs], wire.size


@pytest.mark.parametrize("n", [2, 3, 4])
def test_mean_equals_the_oracle_and_is_bit_identical(ranks, n: int) -> None:
    for numel in SIZES:
        answers = ranks(n, means, numel, [Dense(), *CODECS])
        inputs = [payload(rank, numel) for rank in range(n)]
        for index, codec in enumerate([Dense(), *CODECS]):
            results = [results[index] for results, _ in answers]
            for other in results[1:]:
                assert torch.equal(results[0], other), f"{codec} differs between ranks"
            if index == 0:
                torch.testing.assert_close(results[0], torch.stack(inputs).mean(0))
            else:
                torch.testing.assert_close(results[0], oracle_mean(inputs, codec))


def parts(numel: int, codec: Codec) -> list[Tensor]:
    """The phases of a mean one by one, and both with an owner's hand in between."""
    tw.init()
    wire = tw.Wire()
    part = 256 * -(-numel // (256 * wire.size))
    x = payload(wire.rank, numel)
    scattered = wire.scatter_mean(x.clone(), part, codec).wait()
    gathered = wire.gather(scattered.clone(), part, codec).wait()
    turned = wire.mean(x.clone(), codec, owner=lambda mean: mean.mul_(-2)).wait()
    return [scattered, gathered, turned, wire.mean(x.clone(), Dense()).wait()]


@pytest.mark.parametrize("codec", [Dense(), Dense(torch.bfloat16), Int8()], ids=repr)
def test_the_phases_of_a_mean_alone(ranks, codec: Codec) -> None:
    n, tolerance = 3, {"rtol": 0.02, "atol": 0.06} if codec != Dense() else {}
    for numel in (1, 40001):
        part = 256 * -(-numel // (256 * n))
        answers = ranks(n, parts, numel, codec)
        mean = torch.stack([payload(rank, numel) for rank in range(n)]).mean(0)
        for rank, (scattered, gathered, turned, dense) in enumerate(answers):
            own = slice(rank * part, (rank + 1) * part)
            torch.testing.assert_close(scattered[own], mean[own], **tolerance)
            assert torch.equal(scattered[: own.start], payload(rank, numel)[: own.start])
            torch.testing.assert_close(gathered, mean, **tolerance)
            torch.testing.assert_close(turned, -2 * mean, **tolerance)
            torch.testing.assert_close(dense, mean)
            assert torch.equal(gathered, answers[0][1])
            assert torch.equal(turned, answers[0][2])


def counted(numel: int) -> list[int]:
    tw.init()
    sent = []
    for codec in [Dense(), *CODECS]:
        wire = tw.Wire()
        wire.mean(payload(wire.rank, numel), codec).wait()
        sent.append(wire.account.bytes)
    return sent


@pytest.mark.parametrize("n", [2, 3])
def test_bytes_are_what_the_algorithm_sends(ranks, n: int) -> None:
    numel = 30_000
    part = -(-numel // n)
    blocks8, blocks4 = -(-part // 256), -(-part // 128)
    expected = [
        2 * (n - 1) * numel * 4 // n,
        2 * (n - 1) * part * 2,
        2 * (n - 1) * part * 2,
        2 * (n - 1) * blocks8 * (256 + 4),
        2 * (n - 1) * blocks4 * (64 + 4),
    ]
    assert ranks(n, counted, numel) == [expected] * n


def feedback(rounds: int, numel: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tw.init()
    wire = tw.Wire()
    codec = ErrorFeedback(Int4())
    given, returned = torch.zeros(numel), torch.zeros(numel)
    for step in range(rounds):
        x = payload(wire.rank, numel, seed=step)
        given += x
        returned += wire.mean(x.clone(), codec).wait()
    owner = codec.owner.error
    assert codec.worker.error is not None
    assert owner is not None
    return given, returned, codec.worker.error, owner


def test_error_feedback_conserves(ranks) -> None:
    answers = ranks(3, feedback, 5, 1000)
    given = torch.stack([a[0] for a in answers]).mean(0)
    worker = torch.stack([a[2] for a in answers]).mean(0)
    owner = torch.cat([a[3] for a in answers])
    torch.testing.assert_close(answers[0][1] + worker + owner, given, rtol=1e-4, atol=1e-5)


def one_bad_replica(value: float) -> tuple[list[bool], bool]:
    tw.init()
    wire = tw.Wire()
    finite = []
    for codec in [Dense(), *CODECS]:
        x = payload(wire.rank, 1000)
        if wire.rank == 1:
            x[700] = value
        flight = wire.mean(x, codec)
        flight.wait()
        finite.append(flight.finite)
    codec = ErrorFeedback(Int4())
    wire.mean(payload(wire.rank, 1000), codec).wait()
    assert codec.worker.error is not None
    before = codec.worker.error.clone()
    x = payload(wire.rank, 1000, seed=1)
    x[3] = value if wire.rank == 0 else 0.0
    wire.mean(x, codec).wait()
    return finite, torch.equal(before, codec.worker.error)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_replicas_non_finite_value_is_seen_by_all(ranks, value: float) -> None:
    for finite, error_kept in ranks(3, one_bad_replica, value):
        assert finite == [False] * 5
        assert error_kept, "a skipped step must leave the error feedback as it was"


def ring_exchange(codec: Codec | None) -> tuple[Tensor, int]:
    tw.init()
    wire = tw.Wire()
    ring = [(wire.rank - 1) % wire.size, (wire.rank + 1) % wire.size]
    flight = wire.exchange(payload(wire.rank, 5000), ring, [0.25, 0.25], codec=codec)
    return flight.wait(), wire.account.bytes


def test_exchange_mixes_with_neighbours_only(ranks) -> None:
    answers = ranks(4, ring_exchange, None)
    inputs = [payload(rank, 5000) for rank in range(4)]
    for rank, (mixed, sent) in enumerate(answers):
        expected = 0.5 * inputs[rank] + 0.25 * (inputs[rank - 1] + inputs[(rank + 1) % 4])
        torch.testing.assert_close(mixed, expected)
        assert sent == 2 * 5000 * 4


def relay_along(numel: int) -> tuple[Tensor | None, float]:
    """Rank r sends to r + 1, with receives posted before the sends they depend on."""
    tw.init()
    wire = tw.Wire()
    received = None
    flights = []
    if wire.rank > 0:
        received = torch.empty(numel)
        flights.append(wire.recv(received, wire.rank - 1, codec=Int8()))
        flights[0].wait()
    if wire.rank < wire.size - 1:
        message = payload(0, numel) if received is None else received.clone()
        wire.send(message, wire.rank + 1, codec=Int8()).wait()
    return received, wire.agree([wire.rank + 0.5], "sum")[0]


def test_send_and_recv_between_neighbours(ranks) -> None:
    answers = ranks(3, relay_along, 1000)
    assert answers[0][0] is None
    scale = payload(0, 1000).abs().max() / 127
    assert (answers[1][0] - payload(0, 1000)).abs().max() <= scale / 2 * 1.001
    torch.testing.assert_close(answers[2][0], answers[1][0])  # coding twice changes nothing
    assert [total for _, total in answers] == [4.5] * 3


def many_in_the_air(rounds: int) -> list[float]:
    tw.init()
    wire = tw.Wire()
    codecs = [Dense(), Int8(), Dense(torch.bfloat16)]
    flights = [
        wire.mean(torch.full((100,), float(wire.rank + i)), codecs[i % 3]) for i in range(rounds)
    ]
    return [flight.wait()[0].item() for flight in flights]


def test_flights_in_the_air_at_once_keep_their_order(ranks) -> None:
    for answer in ranks(2, many_in_the_air, 30):
        assert answer == pytest.approx([i + 0.5 for i in range(30)], rel=0.02)


def subgroups() -> tuple[list[int], float, list[bytes]]:
    tw.init()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    wire = tw.Wire(mesh["replica"])
    mean = wire.mean(torch.tensor([float(dist.get_rank())])).wait().item()
    with pytest.raises(ValueError, match=r"mesh\['replica'\]"):
        tw.Wire(mesh)
    return wire.ranks, mean, wire.gather_bytes(b"x" * dist.get_rank())


def test_a_wire_along_one_dimension_of_a_mesh(ranks) -> None:
    answers = ranks(4, subgroups)
    assert [a[0] for a in answers] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [a[1] for a in answers] == [1.0, 2.0, 1.0, 2.0]
    assert answers[3][2] == [b"x", b"xxx"]


def test_a_world_of_one_needs_no_group() -> None:
    tw.init()
    wire = tw.Wire()
    x = torch.randn(10)
    assert torch.equal(wire.mean(x.clone(), Int4()).wait(), x)
    assert wire.agree([3.0]) == [3.0]
    assert wire.gather_bytes(b"abc") == [b"abc"]
    assert torch.equal(wire.gather(torch.ones(3), 3).wait(), torch.ones(3))
    assert torch.equal(wire.scatter_mean(torch.ones(3), 3).wait(), torch.ones(3))
    assert torch.equal(
        wire.mean(torch.ones(3), owner=lambda mean: mean * 4).wait(), torch.full((3,), 4.0)
    )
    for part in (2, 513):  # too small, and no whole blocks
        with pytest.raises(ValueError, match=r"gather of 512 values over 1 ranks takes parts of"):
            wire.gather(torch.ones(512), part, Int8())
    assert wire.account.bytes == 0
    tw.shutdown()


def test_bad_input_is_refused_before_anything_is_sent() -> None:
    wire = tw.Wire()
    with pytest.raises(ValueError, match="float32"):
        wire.mean(torch.zeros(4, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="flat"):
        wire.mean(torch.zeros(2, 2))
    with pytest.raises(ValueError, match="codec takes"):
        wire.mean(torch.zeros(4), "int8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="distinct ranks"):
        wire.exchange(torch.zeros(4), [5], [0.5])
    with pytest.raises(ValueError, match="cannot exchange"):
        wire.send(torch.zeros(4), 0)

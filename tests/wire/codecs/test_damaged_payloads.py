"""Bytes that no encoder has made: decoded to something or refused, in bounds, on the right rank."""

import random
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import Tensor

import thinwire as tw
from tests.conftest import Ranks
from thinwire.errors import BadPayload
from thinwire.pipeline.sparse_activations import Activations, ThresholdSelector
from thinwire.wire.codecs import Codec
from thinwire.wire.codecs.sparse import Places

C = tw.codecs
SENTINEL = 12345.0
CODECS: dict[str, Callable[[], Codec]] = {
    "float32": C.Dense,
    "bfloat16": lambda: C.Dense(torch.bfloat16),
    "int8": C.Int8,
    "int4": C.Int4,
    "one-bit": C.OneBit,
    "top-k": C.TopK,
    "top-k in shorts": lambda: C.TopK(chunk=65536, k=64),
    "top-k as a bitmap": lambda: C.TopK(chunk=256, k=100, value_bits=8),
    "top-k of all": lambda: C.TopK(chunk=256, k=256, value_bits=16),
    "activations": lambda: Activations(0.05, 4, ThresholdSelector(10), None),
}


def damage(payload: Tensor, draw: random.Random) -> Tensor:
    """Some bits turned, a stretch of noise, or noise alone."""
    damaged = payload.clone()
    flat = damaged.view(-1)
    kind = draw.choice(["bits", "stretch", "noise", "ones", "zeros"])
    if kind == "bits":
        for _ in range(draw.randint(1, 8)):
            flat[draw.randrange(flat.numel())] ^= 1 << draw.randrange(8)
    elif kind == "stretch":
        at = draw.randrange(flat.numel())
        stretch = flat[at : at + draw.randint(1, 64)]
        stretch.copy_(
            torch.frombuffer(bytearray(draw.randbytes(stretch.numel())), dtype=torch.uint8)
        )
    elif kind == "noise":
        noise = bytearray(draw.randbytes(flat.numel()))
        flat.copy_(torch.frombuffer(noise, dtype=torch.uint8))
    else:
        flat.fill_(255 if kind == "ones" else 0)
    return damaged


def guarded(numel: int) -> tuple[Tensor, Tensor]:
    """Room for so many values, and all the memory around it."""
    around = torch.full((numel + 2000,), SENTINEL)
    return around[1000 : 1000 + numel], around


def require_in_bounds(around: Tensor) -> None:
    assert bool((around[:1000] == SENTINEL).all())
    assert bool((around[-1000:] == SENTINEL).all())


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize(("numel", "rows"), [(10_000, 1), (10_000, 3), (70_000, 1), (40, 2)])
def test_any_bytes_are_decoded_or_refused(name: str, numel: int, rows: int) -> None:
    codec = CODECS[name]()
    rows = 1 if name == "activations" else rows
    x = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    part = codec.part(numel, rows)
    payload = codec.encode(x, rows, part)
    draw = random.Random(f"{name} {numel} {rows}")
    for _ in range(60):
        out, around = guarded(numel)
        damaged = damage(payload, draw)
        before = damaged.clone()
        with suppress(BadPayload):
            codec.decode(damaged, part, out)
        require_in_bounds(around)
        assert torch.equal(damaged, before)


@pytest.mark.parametrize("bits", [1, 4, 16])
@pytest.mark.parametrize("density", [0.002, 0.05, 0.5])
@pytest.mark.parametrize("rows", [1, 3])
def test_any_bytes_of_thresholds(bits: int, density: float, rows: int) -> None:
    """The last row of three is shorter than its form."""
    sizes = [60_000, 100, 9_901]
    codec = C.Threshold(density, 10, value_bits=bits, sizes=sizes)
    x = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(1))
    split = codec.split(x.numel(), rows)
    payload = codec.encode_worker(x.clone(), split)
    draw = random.Random(f"{bits} {density} {rows}")
    for _ in range(40):
        out, around = guarded(x.numel())
        with suppress(BadPayload):
            codec.decode(damage(payload, draw), split, 0, out)
        require_in_bounds(around)


@pytest.mark.parametrize(
    ("part", "most", "form", "said"),
    [
        (10_000, 500, lambda p: p[:40].fill_(255), "values where 500 fit"),
        (10_000, 500, lambda p: (p[:1].fill_(2), p[40:42].fill_(7)), "do not ascend"),
        (10_000, 500, lambda p: (p[39:40].fill_(1), p[40:41].fill_(255)), "place 10239 in a row"),
        (10_000, 5_000, lambda p: p.fill_(255), "10000 values where 5000 fit"),
    ],
)
def test_what_is_refused(part: int, most: int, form: Callable[[Tensor], object], said: str) -> None:
    places = Places(part, most)
    packed = torch.zeros(places.nbytes, dtype=torch.uint8)
    assert places.unpack(packed).numel() == 0
    form(packed)
    with pytest.raises(BadPayload, match=said):
        places.unpack(packed)


# -- over the wire ---------------------------------------------------------------------------------


class Liar(C.TopK):
    """Encodes as TopK does, and then spoils it."""

    def encode(self, x: Tensor, rows: int, part: int) -> Tensor:
        return torch.full_like(super().encode(x, rows, part), 255)


def lied_to(call: str) -> tuple[str, str]:
    world = tw.init(timeout=20)
    group = torch.distributed.new_group(list(range(world.size)))
    wire = tw.Wire(group, name="gradients")
    codec = Liar() if world.rank == 1 else C.TopK()
    x = torch.randn(20_000)
    flights = {
        "mean": lambda: wire.mean(x, codec),
        "exchange": lambda: wire.exchange(x, [1 - world.rank], [0.5], codec=codec),
        "message": lambda: (
            wire.send(x, 0, codec=codec) if world.rank else wire.recv(x, 1, codec=codec)
        ),
        "gather": lambda: wire.gather(x, codec.part(x.numel(), world.size), codec),
        "scatter": lambda: wire.scatter_mean(x, codec.part(x.numel(), world.size), codec),
    }
    try:
        flights[call]().wait()
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        torch.distributed.barrier()
    return "", ""


@pytest.mark.parametrize(
    ("call", "size"),
    [("mean", 2), ("mean", 3), ("exchange", 2), ("message", 2), ("gather", 2), ("scatter", 2)],
)
def test_who_sent_it_is_named_where_it_is_waited_for(ranks: Ranks, call: str, size: int) -> None:
    kind, message = ranks(size, lied_to, call)[0]
    assert kind == "BadPayload"
    assert "rank 0 cannot decode what rank 1 sent in" in message
    transfer = "a message" if call == "message" else "transfer 1"
    assert f"{transfer} of 'gradients'" in message
    assert "values where" in message


def owners_part() -> str:
    """The second phase of a mean: rank 2's own part is spoilt, and rank 0 has it among all."""
    world = tw.init(timeout=20)

    class Late(C.TopK):
        def encode(self, x: Tensor, rows: int, part: int) -> Tensor:
            encoded = super().encode(x, rows, part)
            return torch.full_like(encoded, 255) if rows == 1 and world.rank == 2 else encoded

    wire = tw.Wire(name="deltas")
    try:
        wire.mean(torch.randn(30_000), Late()).wait()
    except BadPayload as error:
        return str(error)
    finally:
        torch.distributed.barrier()
    return ""


def test_an_owner_that_spoils_its_part_is_named(ranks: Ranks) -> None:
    for rank, message in enumerate(ranks(3, owners_part)):
        assert f"rank {rank} cannot decode what rank 2 sent in transfer 1 of 'deltas'" in message


def cut_by_noise() -> str:
    world = tw.init(timeout=20)
    cut = tw.Cut(density=0.1)
    if world.rank == 1:
        wire, clean = cut.wire, cut.wire.all_to_all
        wire.all_to_all = lambda rows: clean(rows.fill_(255))  # type: ignore[method-assign]
    try:
        cut(torch.randn(2, 5000))
    except BadPayload as error:
        return str(error)
    return ""


def test_a_cut_names_the_rank(ranks: Ranks) -> None:
    assert "cannot decode what rank 1 sent to a Cut" in ranks(2, cut_by_noise)[0]

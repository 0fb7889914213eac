"""What a rank announces, or writes into the store, is looked at before it is believed."""

import json
import resource
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import thinwire as tw
from tests.conftest import Ranks
from thinwire.errors import UsageError
from thinwire.pipeline.channel import TensorSpec
from thinwire.pipeline.shape_inference import ShapeInference
from thinwire.wire import transfers
from thinwire.wire.agreement import require_same
from thinwire.wire.heartbeat import Heartbeat
from thinwire.wire.wire import MOST_GATHERED

ESCAPE = "\x1b]0;owned\x07"


def memory() -> int:
    """The most that this process has held, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def announce(wire: tw.Wire, length: int) -> None:
    """As gather_bytes does, but with any length."""
    carrier = wire._carrier
    assert carrier is not None
    rows = torch.zeros(wire.size, 1, dtype=torch.int64)
    own = torch.tensor([length])
    carrier.launch(rows, lambda b: transfers.gather_rows(b, own, carrier.group), sent=8).wait()


def announced(length: int) -> tuple[str, int]:
    tw.init(timeout=20)
    wire = tw.Wire(name="control")
    before = memory()
    if wire.rank == 1:
        announce(wire, length)
        return "", 0
    with pytest.raises(UsageError) as refused:
        wire.gather_bytes(b"settings")
    return str(refused.value), memory() - before


@pytest.mark.parametrize("length", [6 << 30, MOST_GATHERED + 1, -1, -(1 << 63)])
def test_a_length_beyond_measure_is_refused(ranks: Ranks, length: int) -> None:
    message, grown = ranks(2, announced, length)[0]
    assert f"rank 1 would send {length} bytes to every rank of wire 'control'" in message
    assert str(MOST_GATHERED) in message
    assert grown < 64 << 20


def gathered() -> tuple[list[list[bytes]], str, list[bytes]]:
    tw.init(timeout=20)
    wire = tw.Wire()
    mine = [b"", bytes([wire.rank]) * (3 * wire.rank), b"x" * 100_000 if wire.rank else b""]
    found = [wire.gather_bytes(payload) for payload in mine]
    with pytest.raises(UsageError) as refused:
        wire.gather_bytes(bytes(MOST_GATHERED + 1) if wire.rank == 2 else b"")
    return found, str(refused.value), wire.gather_bytes(b"after")


def test_lengths_of_any_kind_are_gathered(ranks: Ranks) -> None:
    for found, refused, after in ranks(3, gathered):
        assert found[0] == [b""] * 3
        assert found[1] == [b"", b"\1" * 3, b"\2" * 6]
        assert [len(text) for text in found[2]] == [0, 100_000, 100_000]
        assert "rank 2 would send" in refused
        assert after == [b"after"] * 3, "all have refused it, so the wire is in step"


def strange_settings(text: bytes) -> str:
    tw.init(timeout=20)
    wire = tw.Wire()
    if wire.rank == 1:
        wire.gather_bytes(b"another digest")
        wire.gather_bytes(text)
        return ""
    with pytest.raises(UsageError) as refused:
        require_same(wire, {"lr": 0.1})
    return str(refused.value)


@pytest.mark.parametrize("text", [b"[" * 100_000, b"\xff", b"3", b"{"])
def test_settings_that_are_none(ranks: Ranks, text: bytes) -> None:
    message = ranks(2, strange_settings, text)[0]
    assert "the settings that rank 1 sent cannot be read" in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (json.dumps({"lr": ESCAPE}).encode(), "\\x1b]0;owned\\x07 on rank 1"),
        (json.dumps({"lr": "9" * 100_000}).encode(), "(100000 characters) on rank 1"),
        (json.dumps({"lr": "0.1"}).encode(), "not in what was sent of them"),
    ],
)
def test_settings_that_are_shown(ranks: Ranks, text: bytes, said: str) -> None:
    message = ranks(2, strange_settings, text)[0]
    assert said in message
    assert "\x1b" not in message
    assert len(message) < 5000


NOTE: dict[str, Any] = {"count": 1, "note": "", "host": "h", "lost": {}, "left": False}
NOTE["issued"] = {}


@pytest.mark.parametrize(
    "note",
    [
        b"[" * 100_000,
        b"\xff",
        b"[]",
        b"{}",
        b" " * (2 << 20),
        json.dumps(NOTE | {"lost": {"9": "why"}}).encode(),
        json.dumps(NOTE | {"lost": ["why"]}).encode(),
        json.dumps(NOTE | {"count": "many"}).encode(),
        json.dumps(NOTE | {"issued": {"wire": None}}).encode(),
    ],
)
def test_a_note_that_cannot_be_read_is_no_sign_of_life(note: bytes) -> None:
    """And the rank that holds the store is not blamed for it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    heart = Heartbeat(store, 1, 3, host="here", interval=0.05)
    try:
        for peer in (0, 2):
            store.set(f"{heart._prefix}{peer}", note if peer else json.dumps(NOTE))
        found = suspected(heart)
    finally:
        heart.stop()
    assert "a note that cannot be read" in found[2]
    assert "store" not in found.get(0, "")
    assert len(found[2]) < 1000


def suspected(heart: Heartbeat) -> dict[int, str]:
    with heart.watch([2]) as watch:
        end = time.monotonic() + 30
        while not (found := watch.lost()):
            assert time.monotonic() < end
            with heart._changed:
                heart._changed.wait(0.1)
    return found


def test_what_a_peer_says_moves_no_cursor() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    heart = Heartbeat(store, 1, 3, host="here", interval=0.05)
    try:
        hostile = NOTE | {"note": ESCAPE * 1000, "host": ESCAPE, "lost": {"0": ESCAPE * 1000}}
        store.set(f"{heart._prefix}2", json.dumps(hostile))
        found = suspected(heart)
    finally:
        heart.stop()
    assert found
    for words in found.values():
        assert "\x1b" not in words
        assert len(words) < 1000


@pytest.mark.parametrize(
    "numbers",
    [
        [float("nan"), 1, 4],
        [0, float("inf"), 4],
        [7, 1, 4],
        [-2, 1, 4],
        [0, 9, 4],
        [0, -1, 4],
        [0, 1, -4],
        [0, 1, 0.5],
        [0, 1, 0],
        [0, 1, 1 << 40],
        [0, 8, *[1 << 20] * 8],
        [1, 1, (2 << 30) / 8 + 1],
    ],
)
def test_a_form_that_no_stage_can_have_meant(numbers: list[float]) -> None:
    header = torch.zeros_like(TensorSpec.blank())
    header[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"a form of the numbers|a tensor of"):
        TensorSpec.read(header)


def test_forms_that_stages_send() -> None:
    for form in (TensorSpec((4, 128, 64), torch.bfloat16), TensorSpec((2 << 28,), torch.float32)):
        assert TensorSpec.read(form.header()) == form
    assert TensorSpec.read(TensorSpec.blank()) is None
    assert "make the micro-batches smaller" in str(
        TensorSpec(((2 << 28) + 1,), torch.float32).refusal()
    )


def large_form() -> str:
    """Stage 0 announces a tensor of 4 TiB, which it does not even have."""
    world = tw.init(timeout=20)
    wire = tw.Wire(name="forms")
    if world.rank == 0:
        wire.send(TensorSpec((1 << 40,), torch.float32).header(), 1).wait()
        return b"".join(wire.gather_bytes(b"")).decode()
    rehearsal = ShapeInference.__new__(ShapeInference)
    rehearsal._wire, rehearsal._stage, rehearsal._first, rehearsal._last = wire, 1, False, True
    rehearsal._known = {}
    with pytest.raises(ValueError, match="stage 0 announced a tensor of") as refused:
        rehearsal.forms(torch.zeros(2), None)
    return str(refused.value)


def test_a_stage_that_announces_too_much_is_refused_everywhere(ranks: Ranks) -> None:
    first, second = ranks(2, large_form)
    assert first == second
    assert "make the micro-batches smaller" in first

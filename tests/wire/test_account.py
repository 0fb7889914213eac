"""Bytes are counted when a flight is launched, and they are those that its phases really send."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import thinwire as tw
from tests.conftest import Ranks
from thinwire.wire import collectives
from thinwire.wire.codecs import Codec, Dense, ErrorFeedback, Feedback, Int4, Int8, OneBit, TopK
from thinwire.wire.codecs.threshold import Threshold
from thinwire.wire.flight import Flight
from thinwire.wire.wire import Wire

NUMEL = 1003  # no multiple of anything


def really_sent() -> list[int]:
    """What the collectives of this process report from now on."""
    found: list[int] = []
    for name in ("all_reduce", "all_to_all", "all_gather", "exchange", "send", "receive"):
        plain: Callable[..., Any] = getattr(collectives, name)

        def counted(*args: Any, plain: Callable[..., Any] = plain, **more: Any) -> Any:
            parts, sent = plain(*args, **more)
            found.append(sent)
            return parts, sent

        setattr(collectives, name, counted)
    return found


def launch(wire: Wire, kind: str, codec: Codec | Feedback | None) -> list[Flight]:
    flat = torch.linspace(-1, 1, NUMEL) * (wire.rank + 1)
    after, before = (wire.rank + 1) % wire.size, (wire.rank - 1) % wire.size
    if kind == "mean":
        return [wire.mean(flat, codec)]
    if kind == "owned":
        return [wire.mean(flat, codec, owner=lambda mean: mean)]
    assert not isinstance(codec, Feedback)
    if kind == "exchange":
        return [wire.exchange(flat, sorted({after, before}), [0.2] * len({after, before}))]
    if kind == "message":
        there = wire.send(flat, after, codec=codec)
        return [there, wire.recv(torch.empty(NUMEL), before, codec=codec)]
    if kind == "halves":
        part = (codec or Dense(flat.dtype)).part(NUMEL, wire.size)
        return [wire.scatter_mean(flat, part, codec), wire.gather(flat, part, codec)]
    if kind == "rows":
        return [wire.all_to_all(torch.zeros(wire.size, 17, dtype=torch.int64))]
    return [wire.poll([1.0, 2.0, 3.0])]


CODECS: dict[str, Callable[[], Codec | Feedback | None]] = {
    "plain": lambda: None,
    "bf16": lambda: Dense(torch.bfloat16),
    "int8": Int8,
    "int4+ef": lambda: ErrorFeedback(Int4()),
    "onebit": lambda: ErrorFeedback(OneBit()),
    "topk": lambda: ErrorFeedback(TopK()),
    "threshold": lambda: Threshold(0.1),
}
STATELESS = ("plain", "bf16", "int8")


def counted(cases: list[tuple[str, str]]) -> list[tuple[str, str, int, int, int]]:
    tw.init(timeout=20)
    wire = Wire()
    found = really_sent()
    told = []
    for kind, name in cases:
        before = wire.account.bytes
        found.clear()
        flights = launch(wire, kind, CODECS[name]())
        at_launch = wire.account.bytes - before
        for flight in flights:
            flight.wait()
        told.append((kind, name, at_launch, wire.account.bytes - before, sum(found)))
    return told


@pytest.mark.parametrize("size", [2, 3])
def test_what_is_counted_at_the_launch_is_what_is_sent(ranks: Ranks, size: int) -> None:
    cases = [("mean", name) for name in CODECS] + [("owned", name) for name in CODECS]
    cases += [(kind, name) for kind in ("message", "halves") for name in STATELESS]
    cases += [("exchange", "plain"), ("rows", "plain"), ("numbers", "plain")]
    for told in ranks(size, counted, cases):
        assert [case[:2] for case in told] == cases
        for kind, name, at_launch, in_the_end, really in told:
            assert at_launch == in_the_end == really > 0, (kind, name)

"""A comparison as a test of its display needs it: every kind of cell, two rates."""

import math

from thinwire.report.comparison import (
    CUT,
    DIVERGED,
    FAILED,
    Cell,
    Comparison,
    Point,
    Spread,
)

METHODS = ["none", "ddp", "overlapped", "one-bit-adam", "eager", "power<sgd>"]
RATES = ["100mbit", "10mbit"]
_SPEED = {"none": 1.0, "ddp": 0.25, "overlapped": 0.97, "one-bit-adam": 0.8, "eager": 0.9}


def curve(efficiency: float, sent: float, decay: float) -> list[Point]:
    return [
        Point(
            tokens=1000 * step,
            seconds=step / efficiency,
            bytes=sent * step,
            val_loss=2.0 + 3.0 * math.exp(-step * decay),
        )
        for step in range(1, 11)
    ]


def steps_of(method: str, efficiency: float) -> dict[str, object]:
    """Eight steps; ddp waits in each of them, the others fly behind them."""
    length = 0.2 / efficiency
    ends = [round(length * number, 4) for number in range(1, 9)]
    if method == "none":
        return {"kind": "timeline", "cycle": 3, "steps": ends, "flights": []}
    if method == "ddp":
        flights = [[end - 0.65, end - 0.01, end - 0.6, end - 0.01] for end in ends]
    else:
        flights = [[0.0, 0.5, 0.8, 0.8], [0.8, 1.4, 1.6, 1.6]]
    return {"kind": "timeline", "cycle": 3, "steps": ends, "flights": flights}


def cell(method: str, rate: str) -> Cell:
    bandwidth = {"100mbit": 12.5e6, "10mbit": 1.25e6}[rate]
    if method == "power<sgd>":
        return Cell(method, rate, bandwidth, FAILED, "RuntimeError: <gloo> has gone")
    efficiency = _SPEED[method] * (0.3 if rate == "10mbit" and method == "ddp" else 1.0)
    sent = {"none": 0.0, "ddp": 2e6, "overlapped": 1e5, "one-bit-adam": 6e4, "eager": 1e5}[method]
    found = Cell(method, rate, bandwidth, settings={} if method == "none" else {"every": "8"})
    found.tokens, found.tokens_per_s = 10_000, 1000.0 * efficiency
    found.efficiency = Spread(efficiency, 0.02)
    found.seconds, found.exposed = 10 / efficiency, 10 / efficiency - 10
    found.hidden = 3.0
    found.bytes_per_token, found.wire_bytes_per_token = sent / 250, sent / 240
    found.bytes_ratio = sent / 2e6
    found.compute_limit = 1000.0
    found.wire_limit = bandwidth / (sent / 1000) if sent else None
    found.val_loss = Spread(2.0 + 0.05 * METHODS.index(method), 0.01)
    found.curve = curve(efficiency, sent, 0.5 if method != "none" else 0.2)
    found.timeline = steps_of(method, efficiency)
    if method not in ("none", "eager"):
        found.time_to_loss = Spread(10 / efficiency * 1.1, 1.0)
        found.sooner = 40 / found.time_to_loss.value
    if method == "eager":
        found.status, found.message = DIVERGED, "step 90: the loss is not finite"
    if rate == "10mbit" and method == "ddp":
        found.status, found.computed, found.tokens = CUT, True, 2000
    return found


def sample(rates: list[str] | None = None) -> Comparison:
    rates = rates or RATES
    return Comparison(
        hosts=4,
        rates=rates,
        methods=METHODS,
        budget=10_000,
        asked=10_000,
        steps=100,
        unit="tokens",
        seeds=[0, 1],
        yardstick="none",
        baseline="ddp",
        target=Spread(2.05, 0.01),
        settings={
            "model": "gpt-0.3m",
            "data": "stdlib",
            "batch": 8,
            "context": 128,
            "delay": "10ms",
        },
        machine={"processor": "A & B <5 GHz>", "cores": "2", "torch": "2.13.0"},
        links={rate: f"4 hosts, links measured at {rate}" for rate in rates},
        cells=[cell(method, rate) for rate in rates for method in METHODS],
    )

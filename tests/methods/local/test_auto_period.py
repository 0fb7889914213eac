"""every="auto": measured, agreed on by all ranks, and at least the shortest round."""

import logging

import torch
from torch import nn

import thinwire as tw
from thinwire.methods.local.auto_period import PROBE_STEPS, SHORTEST


def measured() -> tuple[int | None, int | None, int, list[str]]:
    tw.init()
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("thinwire")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    weights = nn.Parameter(torch.zeros(1000))
    optimizer = tw.Overlapped(torch.optim.SGD([weights], lr=0.1), every="auto")
    before = None
    for step in range(4 * PROBE_STEPS):
        if step == PROBE_STEPS - 1:
            before = optimizer.every
        weights.grad = torch.ones(1000)
        optimizer.step()
    return before, optimizer.every, optimizer.account.transfers, heard


def test_the_period_is_measured_and_the_same_everywhere(ranks) -> None:
    answers = ranks(3, measured)
    assert {before for before, *_ in answers} == {None}
    periods = {period for _, period, *_ in answers}
    assert len(periods) == 1
    period = periods.pop()
    assert period is not None
    assert period >= SHORTEST
    assert len({transfers for *_, transfers, _ in answers}) == 1
    assert [len(heard) for *_, heard in answers] == [1, 0, 0]
    assert f"rounds of {period} steps" in answers[0][3][0]

"""A stage that dies, is stopped or stalls: its neighbours name it within the timeout."""

import itertools
import os
import re
import signal
import threading
import time

import pytest
from torch import nn

import thinwire as tw
from tests.pipeline import oracle
from thinwire.errors import PeerLost

TIMEOUT = 1.5


class Ends(nn.Module):
    """Passes values on until a forward after which the process is gone in one way or another."""

    def __init__(self, how: str, forwards: int) -> None:
        super().__init__()
        self.linear = nn.Linear(oracle.WIDTH, oracle.WIDTH)
        self.how, self.left = how, forwards

    def forward(self, x):
        self.left -= 1
        if self.left < 0:
            if self.how == "dies":
                os._exit(7)
            if self.how == "is stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            threading.Event().wait()  # "stalls": its heart beats, but it never comes back
        return self.linear(x)


def until_lost(victim: int, how: str) -> tuple[str, float]:
    """The error in which training ends, and the seconds since the last update."""
    world = tw.init(timeout=TIMEOUT)
    module = oracle.small_stages(world.size)[world.rank]
    if world.rank == victim:
        module = Ends(how, 6)
    pipe = tw.AsyncPipeline(module, oracle.adamw(module), loss=oracle.small_loss)
    batches = itertools.cycle(oracle.small_batches(4))
    last = time.monotonic()
    with pytest.raises(PeerLost) as caught:  # noqa: PT012
        for _ in pipe.train(batches, 1000):
            last = time.monotonic()
    return str(caught.value), time.monotonic() - last


@pytest.mark.parametrize(
    ("victim", "how"),
    [(1, "dies"), (0, "is stopped"), (2, "is stopped"), (1, "stalls")],
)
def test_a_lost_stage_is_named_by_its_neighbours(ranks, victim: int, how: str) -> None:
    answers = ranks(3, until_lost, victim, how, silent=[victim])
    for rank in {0, 1, 2} - {victim}:
        message, waited = answers[rank]
        blamed = {int(r) for r in re.findall(r"rank (\d+) \(", message)}
        assert blamed == {victim}, message
        assert waited < 10 * TIMEOUT, "loosely: the machine may be busy"

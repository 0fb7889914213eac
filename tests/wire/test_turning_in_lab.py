"""A row of two-phase means pays the delay of the network twice, not twice for each of them."""

import pytest

from tests.hosts import on_hosts
from thinwire.lab import Link

pytestmark = pytest.mark.alone

SCRIPT = """
import time
import torch, thinwire as tw
from thinwire.wire.codecs import ErrorFeedback, OneBit

tw.init()
torch.set_num_threads(1)
wire = tw.Wire()
buffers = [torch.randn(4000) for _ in range(6)]
memories = [ErrorFeedback(OneBit()) for _ in buffers]
for count in (1, 1, 6):
    wire.barrier()
    begun = time.perf_counter()
    flights = [wire.mean(x, c) for x, c in zip(buffers[:count], memories)]
    for flight in flights:
        flight.wait()
    print(json.dumps([count, time.perf_counter() - begun]))
"""


def test_first_phases_of_later_means_do_not_wait_for_second_ones() -> None:
    measured = on_hosts(SCRIPT, 2, Link.of("1gbit", delay="50ms"))
    one = min(seconds for count, seconds in measured if count == 1)
    six = max(seconds for count, seconds in measured if count == 6)
    assert one >= 0.1, "two phases of 50 ms"
    assert six < 3 * one, "one after the other they would take six times as long"

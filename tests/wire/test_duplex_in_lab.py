"""Both directions of a link at once, also when one rank comes late."""

import pytest

from tests.hosts import on_hosts
from thinwire.lab import Link

pytestmark = pytest.mark.alone

MEGABITS = 10
SCRIPT = """
import time
import torch, thinwire as tw
from thinwire.wire.codecs import Int8

tw.init()
torch.set_num_threads(1)
wire = tw.Wire()
x = torch.randn(400_000)
for late in (0, 1):
    wire.barrier()
    if wire.rank == late:
        time.sleep(0.05)
    counted, begun = wire.account.bytes, time.perf_counter()
    wire.mean(x.clone(), Int8()).wait()
    print(json.dumps([time.perf_counter() - begun, wire.account.bytes - counted]))
"""


def test_a_rank_that_comes_late_does_not_make_the_directions_take_turns() -> None:
    measured = on_hosts(SCRIPT, 2, Link.of(f"{MEGABITS}mbit", delay="1ms"))
    assert len(measured) == 4
    for seconds, sent in measured:
        alone = sent * 8 / (MEGABITS * 1e6)  # of one direction; in turns it is twice that
        assert alone < seconds < 1.5 * alone + 0.05

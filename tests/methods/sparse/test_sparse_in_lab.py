"""What sparse averaging sends, by the kernel's own count on an emulated network."""

import pytest

from tests.hosts import on_hosts
from thinwire.lab import Link

pytestmark = pytest.mark.alone

SCRIPT = """
import torch, thinwire as tw
from torch import nn

tw.init()
control = tw.Wire()
for name, fraction, codec in (
    ("all", 1.0, None), ("fp32", 0.05, None), ("bf16", 0.05, tw.codecs.Dense(torch.bfloat16))
):
    weight = nn.Parameter(torch.ones(1_000_000))
    optimizer = tw.SparseAverage(
        torch.optim.SGD([weight], lr=0.1), fraction=fraction, codec=codec, delay=3
    )
    weight.grad = torch.randn(1_000_000)
    optimizer.engine.require_same_start()  # compares settings, which is not counted
    control.barrier()
    sent = tx_bytes()
    for _ in range(20):
        optimizer.step()
    optimizer.drain()
    control.barrier()
    print(json.dumps([name, optimizer.account.bytes, tx_bytes() - sent]))
"""


def test_the_traffic_by_the_interface_counters_is_20_and_40_times_less() -> None:
    measured = on_hosts(SCRIPT, 2, Link.of("1gbit"))
    assert len(measured) == 6
    sent = {}
    for name, counted, kernel in measured:
        assert counted == pytest.approx(kernel, rel=0.05), name
        sent[name] = kernel
    assert sent["all"] / sent["fp32"] == pytest.approx(20, rel=0.05)
    assert sent["all"] / sent["bf16"] == pytest.approx(40, rel=0.05)

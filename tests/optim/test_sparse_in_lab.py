"""What sparse averaging sends, by the kernel's own count on an emulated network."""

import json
import sys

import pytest

from thinwire.errors import LabError
from thinwire.lab import Lab, Link

pytestmark = pytest.mark.alone

SCRIPT = """
import json
import torch, thinwire as tw
from torch import nn

def tx_bytes():
    for line in open("/proc/self/net/dev"):
        name, _, counts = line.partition(":")
        if name.strip() == "wire0":
            return int(counts.split()[8])
    raise SystemExit("this host has no wire0")

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
    optimizer._require_same_start()  # compares settings, which is not counted
    control.barrier()
    sent = tx_bytes()
    for _ in range(20):
        optimizer.step()
    optimizer.drain()
    control.barrier()
    print(json.dumps([name, optimizer.account.bytes, tx_bytes() - sent]))
"""


def test_the_traffic_by_the_interface_counters_is_20_and_40_times_less() -> None:
    lines: list[str] = []
    try:
        with Lab(2, Link.of("1gbit")) as lab:
            command = [sys.executable, "-c", SCRIPT]
            outcome = lab.start(command, sink=lambda line: lines.append(line.text)).wait()
    except LabError as error:
        if "cannot build its network here" not in str(error):
            raise
        pytest.skip(str(error))
    assert outcome.code == 0, lines
    measured = [json.loads(line) for line in lines if line.startswith("[")]
    assert len(measured) == 6
    sent = {}
    for name, counted, kernel in measured:
        assert counted == pytest.approx(kernel, rel=0.05), name
        sent[name] = kernel
    assert sent["all"] / sent["fp32"] == pytest.approx(20, rel=0.05)
    assert sent["all"] / sent["bf16"] == pytest.approx(40, rel=0.05)

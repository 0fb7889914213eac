"""The bytes of the compressed stage against the formula and the kernel's own count."""

import json
import math
import sys

import pytest

from thinwire.errors import LabError
from thinwire.lab import Lab, Link

HOSTS, VALUES, STEPS = 2, 4_000_001, 3  # 0.5 MB from each host in each step

SCRIPT = f"""
import json
import torch, thinwire as tw

def tx_bytes():
    for line in open("/proc/self/net/dev"):
        name, _, counts = line.partition(":")
        if name.strip() == "wire0":
            return int(counts.split()[8])
    raise SystemExit("this host has no wire0")

rank = tw.init().rank
control = tw.Wire(name="control")
for shard_state in (False, True):
    weights = torch.nn.Parameter(torch.zeros({VALUES}))
    optimizer = tw.OneBitAdam([weights], freeze_at=1, bucket_mb=25, shard_state=shard_state)
    weights.grad = torch.randn({VALUES}, generator=torch.Generator().manual_seed(rank))
    optimizer.step()
    assert optimizer.compressing
    control.barrier()
    counted, sent = optimizer.account.bytes, tx_bytes()
    for _ in range({STEPS}):
        optimizer.step()
    control.barrier()
    print(json.dumps([optimizer.account.bytes - counted, tx_bytes() - sent]))
"""


def test_the_compressed_stage_sends_what_it_says() -> None:
    lines: list[str] = []
    try:
        with Lab(HOSTS, Link.of("1gbit")) as lab:
            command = [sys.executable, "-c", SCRIPT]
            outcome = lab.start(command, sink=lambda line: lines.append(line.text)).wait()
    except LabError as error:
        if "cannot build its network here" not in str(error):
            raise
        pytest.skip(str(error))
    assert outcome.code == 0, lines
    measured = [json.loads(line) for line in lines if line.startswith("[")]
    assert len(measured) == 2 * HOSTS
    padded = math.ceil(VALUES / (8 * HOSTS)) * 8 * HOSTS
    step = 2 * (HOSTS - 1) * padded // (8 * HOSTS) + 8 * (HOSTS - 1)
    for counted, sent in measured:
        assert counted == STEPS * step
        # headers and acknowledgements, in both directions
        assert counted <= sent <= 1.02 * counted

"""The bytes of the compressed stage against the formula and the kernel's own count."""

import math

from tests.hosts import on_hosts
from thinwire.lab import Link

HOSTS, VALUES, STEPS = 2, 4_000_001, 3  # 0.5 MB from each host in each step

SCRIPT = f"""
import torch, thinwire as tw

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
    measured = on_hosts(SCRIPT, HOSTS, Link.of("1gbit"))
    assert len(measured) == 2 * HOSTS
    padded = math.ceil(VALUES / (8 * HOSTS)) * 8 * HOSTS
    step = 2 * (HOSTS - 1) * padded // (8 * HOSTS) + 8 * (HOSTS - 1)
    step += HOSTS - 1  # whether the one tensor is used
    for counted, sent in measured:
        assert counted == STEPS * step
        # headers and acknowledgements, in both directions
        assert counted <= sent <= 1.02 * counted

"""The account's bytes against the kernel's own count, on an emulated network."""

import pytest

from tests.hosts import on_hosts
from thinwire.lab import Link

pytestmark = pytest.mark.alone

SCRIPT = """
import torch, thinwire as tw
from thinwire.wire.codecs import Dense, Int4, Int8

tw.init()
wire = tw.Wire()
ahead, behind = (wire.rank + 1) % wire.size, (wire.rank - 1) % wire.size
others = sorted({ahead, behind})
weights = [0.1] * len(others)
x = torch.randn(2_500_000)  # 10 MB, and 1.3 MB in Int4

def message():
    received = torch.empty_like(x)
    flights = [wire.send(x, ahead), wire.recv(received, behind)]
    for flight in flights:
        flight.wait()

transfers = {
    "mean fp32": lambda: wire.mean(x.clone(), Dense()).wait(),
    "mean bf16": lambda: wire.mean(x.clone(), Dense(torch.bfloat16)).wait(),
    "mean int8": lambda: wire.mean(x.clone(), Int8()).wait(),
    "mean int4": lambda: wire.mean(x.clone(), Int4()).wait(),
    "exchange": lambda: wire.exchange(x.clone(), others, weights).wait(),
    "exchange int8": lambda: wire.exchange(x.clone(), others, weights, codec=Int8()).wait(),
    "message": message,
}
for name, transfer in transfers.items():
    wire.barrier()
    counted, sent = wire.account.bytes, tx_bytes()
    transfer()
    wire.barrier()  # what was sent has arrived
    print(json.dumps([name, wire.account.bytes - counted, tx_bytes() - sent]))
"""


@pytest.mark.parametrize("hosts", [2, 3])
def test_the_account_agrees_with_the_interface(hosts: int) -> None:
    measured = on_hosts(SCRIPT, hosts, Link.of("1gbit"))
    assert len(measured) == 7 * hosts
    for name, counted, sent in measured:
        assert counted > 1_000_000, name
        assert counted == pytest.approx(sent, rel=0.05), name

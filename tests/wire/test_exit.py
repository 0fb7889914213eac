"""A process of a world ends by itself: no hang, no abort, whatever the wire is doing.

These are plain interpreters with torchrun's variables, as users start them, not ranks of the
fixture, which leave by os._exit.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

SOURCE = str(Path(__file__).parents[2] / "src")


def start(script: str, size: int) -> tuple[dist.TCPStore, list[subprocess.Popen[str]]]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = []
    for rank in range(size):
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": SOURCE,
        }
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-W", "error::FutureWarning", "-c", script],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return store, ranks


def finish(rank: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = rank.communicate(timeout=100)
    return rank.returncode, out, err


@pytest.fixture
def started() -> Any:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


BEGIN = """
import torch, thinwire as tw
world = tw.init(timeout=1.5)
wire = tw.Wire()
peer = 1 - wire.rank
for codec in (None, tw.codecs.Int8()):
    assert wire.mean(torch.full((5000,), float(wire.rank)), codec).wait()[0] == 0.5
"""
ENDS = {
    "plain exit": "",
    "shutdown": "wire.close(); tw.shutdown()",
    "flights in the air": """
flight = wire.mean(torch.ones(100_000))
out, back = torch.ones(3), torch.ones(3)
sent, received = wire.send(out, peer), wire.recv(back, peer)
""",
}


@pytest.mark.parametrize("end", ENDS)
def test_a_process_that_is_done_exits_cleanly(started, end: str) -> None:
    _store, ranks = start(BEGIN + ENDS[end] + "\nprint('done')", 2)
    started += ranks
    for rank in ranks:
        assert finish(rank) == (0, "done\n", "")


def test_an_error_of_one_rank_ends_the_other_which_names_it(started) -> None:
    _store, ranks = start(BEGIN + "assert wire.rank == 0, 'bad luck'\nwire.barrier()", 2)
    started += ranks
    first, second = (finish(rank) for rank in ranks)
    assert (first[0], second[0]) == (1, 1)
    assert "PeerLost: rank 0 lost rank 1 (" in first[2]
    assert "AssertionError: bad luck" in second[2]
    for _, _, text in (first, second):
        assert "terminate called" not in text


FROZEN = """
import os, signal
if wire.rank:
    os.kill(os.getpid(), signal.SIGSTOP)
received = wire.recv(torch.ones(3), 1)
try:
    wire.barrier()
finally:
    wire.close()
    tw.shutdown()
    del wire
"""


def test_a_survivor_of_a_frozen_peer_leaves_although_its_group_cannot_be_ended(started) -> None:
    """The destructor of the group would wait for the peer."""
    _store, ranks = start(BEGIN + FROZEN, 2)
    started += ranks
    code, _, text = finish(ranks[0])
    assert code == 1
    assert "thinwire.errors.PeerLost: rank 0 lost rank 1 (" in text.rstrip().split("\n")[-1]
    assert "terminate called" not in text

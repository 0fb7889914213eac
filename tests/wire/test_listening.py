"""A run under way, and the addresses on which its processes can be reached."""

import inspect
from pathlib import Path

from tests import sockets
from tests.hosts import on_hosts
from tests.programs import Start, corpus, small, steps_done, thinwire, worker_pid  # noqa: F401
from thinwire.lab import Link

LISTENING = (
    inspect.getsource(sockets)
    + """
import thinwire as tw
tw.init()
wire = tw.Wire()
wire.barrier()
print(json.dumps(sorted(listening("self"))))
wire.barrier()
"""
)


def test_workers_of_this_machine_are_reached_from_this_machine_alone(
    thinwire: Start,
    small: list[str],
) -> None:
    run = Path.cwd() / "run"
    program = thinwire(
        "train", *small, "--steps", 100_000, "--workers", 2, "--run", run, "--eval-every", 0
    )
    program.until(lambda: steps_done(run, 1) >= 1)
    pids = [program.pid, worker_pid(run, 0), worker_pid(run, 1)]
    found = {pid: sockets.listening(pid) for pid in pids}
    assert found[pids[1]], "rank 0 keeps the store"
    assert set().union(*found.values()) == {"127.0.0.1"}, found


def test_a_host_of_the_lab_listens_on_its_own_address() -> None:
    found = on_hosts(LISTENING, 2, Link.of("1gbit"))
    assert sorted(found) == [["10.77.0.1"], ["10.77.0.2"]]

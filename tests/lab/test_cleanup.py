"""Nothing survives the launcher: no process, and so no namespace and no interface."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.lab.lab_tools import descendants, processes_in

LAUNCH = """
import json, os, signal, sys
from thinwire.lab import Lab, Link
pause = "import signal; print('up', flush=True); signal.pause()"
code = f'''
import signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {pause!r}], start_new_session=True,
                         stdout=subprocess.PIPE)
child.stdout.readline()
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(1))
print("ready")
signal.pause()
'''
hosts = []
def sink(line):
    hosts.append(line)
    if len(hosts) == 2:
        pids = [lab.pid, *(process.pid for process in job.processes)]
        inodes = [os.stat(f"/proc/{pid}/ns/net").st_ino for pid in pids]
        print(json.dumps([pids, inodes]), flush=True)
link = Link.of() if sys.argv[1] == "emulated" else None
with Lab(2, link) as lab:
    job = lab.start([sys.executable, "-c", code], sink=sink)
    outcome = job.wait()
sys.exit(outcome.code)
"""


def kill_launcher(launcher: "subprocess.Popen[str]", pids: list[int]) -> None:
    launcher.kill()


def interrupt(launcher: "subprocess.Popen[str]", pids: list[int]) -> None:
    launcher.send_signal(signal.SIGINT)


def crash_worker(launcher: "subprocess.Popen[str]", pids: list[int]) -> None:
    os.kill(pids[-1], signal.SIGUSR1)


def kill_manager(launcher: "subprocess.Popen[str]", pids: list[int]) -> None:
    os.kill(pids[0], signal.SIGKILL)


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("how", [kill_launcher, interrupt, crash_worker, kill_manager])
@pytest.mark.parametrize("network", ["emulated", "plain"])
def test_nothing_is_left(
    how: Callable[["subprocess.Popen[str]", list[int]], None], network: str
) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, network],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert launcher.stdout is not None
    pids, inodes = json.loads(launcher.stdout.readline())
    family = descendants(launcher.pid)
    assert len(family) >= 6  # both managers, two workers, a child of each
    watches = [os.pidfd_open(pid) for pid in family]
    how(launcher, pids)
    launcher.wait()
    for watch in watches:  # ready when its process has ended
        assert select.select([watch], [], [], 10)[0]
        os.close(watch)
    if network == "emulated":
        assert [processes_in(inode) for inode in inodes] == [[], [], []]
    launcher.stdout.close()

"""How jobs end: well, by a failure, by Ctrl-C."""

import os
import signal
import subprocess
import sys

import pytest

from tests.lab.lab_tools import CONNECT, MakeLab, python
from thinwire.lab import Lab, Line, Patience

LAUNCH = """
import sys
from thinwire.lab.command import LabConfig, run_lab
sys.exit(run_lab(LabConfig(hosts=2, rate="50mbit"), [sys.executable, "-c", sys.argv[1]]))
"""


def test_the_culprit_is_blamed_not_the_first_to_exit(make_lab: MakeLab) -> None:
    # Host 1 fails and tells the story, but ends only after host 0, which lost its connection.
    code = CONNECT + (
        "import traceback\n"
        "if rank == 0:\n"
        "    sock, other = connect('host1'), connect('host1')\n"
        "    assert sock.recv(1), 'connection closed by peer'\n"
        "with socket.create_server(('', 5000)) as server:\n"
        "    sock, other = server.accept()[0], server.accept()[0]\n"
        "try: raise ValueError('the real reason')\n"
        "except ValueError: traceback.print_exc()\n"
        "sock.close(); other.recv(1); sys.exit(3)\n"
    )
    outcome = make_lab(2).start(python(code), sink=lambda line: None).wait()
    assert outcome.code == 3
    assert outcome.failed is not None
    assert outcome.failed.host == 1
    assert outcome.tail[0].startswith("Traceback")
    assert outcome.tail[-1] == "ValueError: the real reason"
    assert str(outcome).splitlines()[-2:] == [
        "host1 | ValueError: the real reason",
        "host1 (rank 1) failed: exit code 3",
    ]


def test_a_killed_worker_is_blamed_before_any_traceback(make_lab: MakeLab) -> None:
    code = CONNECT + (
        "sock = accept() if rank else connect('host1')\n"
        "if rank: os.kill(os.getpid(), 9)\n"
        "assert sock.recv(1), 'connection closed by peer'\n"
    )
    outcome = make_lab(2).start(python(code), sink=lambda line: None).wait()
    assert outcome.code == 128 + 9
    assert outcome.reason == "host1 (rank 1) failed: killed by SIGKILL"


def test_a_failure_ends_even_those_that_will_not(make_lab: MakeLab) -> None:
    code = CONNECT + (
        "import signal\n"
        "if rank == 0:\n"
        "    signal.signal(signal.SIGTERM, lambda *_: print('no'))\n"
        "    sock = accept(); sock.close()\n"
        "    while True: signal.pause()\n"
        "connect('host0').recv(1); sys.exit(5)\n"
    )
    lines: list[Line] = []
    job = make_lab(2).start(python(code), sink=lines.append)
    outcome = job.wait(patience=Patience(gather=0.1, stop=0.3))
    assert outcome.code == 5
    assert [str(line) for line in lines] == ["host0 | no"]
    assert not job.running


def test_tick_is_called_while_waiting(make_lab: MakeLab) -> None:
    job = make_lab(1).start(python("import signal; signal.pause()"))
    ticks = []

    def tick() -> None:
        ticks.append(1)
        if len(ticks) == 3:
            job.signal(signal.SIGTERM)

    assert job.wait(tick).code == 0
    assert len(ticks) >= 3


def test_plain_workers_fail_alike() -> None:
    code = (
        "import os, signal\nif os.environ['RANK'] == '1': raise ValueError('boom')\nsignal.pause()"
    )
    with Lab(2, None) as lab:
        outcome = lab.start(python(code), sink=lambda line: None).wait()
    assert (outcome.code, outcome.tail[-1]) == (1, "ValueError: boom")


def launch(code: str, ready: int) -> "subprocess.Popen[str]":
    """`thinwire lab` with two hosts, once it has printed `ready` lines."""
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, code], stdout=subprocess.PIPE, text=True, env=os.environ
    )
    assert process.stdout is not None
    for _ in range(ready):
        assert process.stdout.readline().endswith("ready\n")
    return process


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"]
)
def test_an_interrupt_reaches_the_workers_and_waits_for_them(signum: int, code: int) -> None:
    worker = (
        "import signal, sys\n"
        "def end(signum, frame): print('saved', signum); sys.exit(0)\n"
        "signal.signal(signal.SIGINT, end); signal.signal(signal.SIGTERM, end)\n"
        "print('ready')\n"
        "while True: signal.pause()\n"
    )
    process = launch(worker, ready=2)
    process.send_signal(signum)
    out, _ = process.communicate()
    assert sorted(out.splitlines()) == [f"host{n} | saved {int(signum)}" for n in (0, 1)]
    assert process.returncode == code


@pytest.mark.usefixtures("namespaces")
def test_a_second_ctrl_c_kills() -> None:
    worker = (
        "import signal\n"
        "signal.signal(signal.SIGINT, lambda *_: print('got it'))\n"
        "print('ready')\n"
        "while True: signal.pause()\n"
    )
    process = launch(worker, ready=2)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline().endswith("got it\n")
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 130


@pytest.mark.usefixtures("namespaces")
def test_the_traceback_is_what_the_user_sees_last() -> None:
    code = (
        "import os, signal\nif os.environ['RANK'] == '1': raise ValueError('boom')\nsignal.pause()"
    )
    done = subprocess.run([sys.executable, "-c", LAUNCH, code], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-2:] == [
        "host1 | ValueError: boom",
        "host1 (rank 1) failed: exit code 1",
    ]

"""Real hosts. Workers act on what they receive and tests on what workers print: nothing sleeps."""

import json
import os
import signal

import pytest

from tests.lab.lab_tools import CONNECT, MakeLab, processes_in, python
from thinwire.errors import LabError, UsageError
from thinwire.lab import Lab, Line, Link


def run(lab: Lab, code: str, **settings: int) -> list[Line]:
    """Run it on every host to a good end; returns what was printed."""
    lines: list[Line] = []
    outcome = lab.start(python(code), sink=lines.append, **settings).wait()  # type: ignore[arg-type]
    assert outcome.code == 0, outcome
    return lines


def test_workers_have_their_hosts_name_and_environment(make_lab: MakeLab) -> None:
    lab = make_lab(2)
    code = (
        "import json, os, socket\n"
        "names = [socket.gethostname(), socket.gethostbyname('host1')]\n"
        "names.append(socket.gethostbyaddr('10.77.0.1')[0])\n"
        "names.append([name for _, name in socket.if_nameindex()])\n"
        "print(json.dumps([names, dict(os.environ)]))"
    )
    lines = run(lab, code, per_host=2)
    assert sorted(line.label for line in lines) == ["host0.0", "host0.1", "host1.0", "host1.1"]
    for line in lines:
        (name, resolved, reverse, interfaces), env = json.loads(line.text)
        assert name == line.label.partition(".")[0] == f"host{env['GROUP_RANK']}"
        assert resolved == lab.address(1) == "10.77.0.2"
        assert reverse == "host0"
        assert interfaces == ["lo", "wire0"]
        assert env["WORLD_SIZE"] == "4"
        assert line.label.endswith(env["LOCAL_RANK"])


def test_hosts_talk_tcp_and_the_kernel_counts_it(make_lab: MakeLab) -> None:
    lab = make_lab(2)
    code = CONNECT + (
        "sock = accept() if rank else connect('host1')\n"
        "if rank:\n"
        "    total = 0\n"
        "    while data := sock.recv(65536): total += len(data)\n"
        "    print(total)\n"
        "else:\n"
        "    sock.sendall(bytes(1_000_000)); sock.close()\n"
    )
    assert [line.text for line in run(lab, code)] == ["1000000"]
    sender, receiver = lab.counters()
    assert 1_000_000 < sender.tx_bytes < 1_050_000
    # The last acknowledgement may still be on its way.
    assert 0 <= sender.tx_bytes - receiver.rx_bytes < 200
    assert 0 <= receiver.tx_bytes - sender.rx_bytes < 200
    assert receiver.tx_bytes < 50_000


def test_every_link_is_checked(make_lab: MakeLab) -> None:
    checks = make_lab(3, Link.of("50mbit", delay="10ms")).check()
    assert [check.host for check in checks] == [0, 1, 2]
    assert not [problem for check in checks for problem in check.problems()]
    assert all(check.up_asked == check.down_asked == 50e6 for check in checks)


def test_hosts_that_differ_are_checked_in_full(make_lab: MakeLab) -> None:
    slow = Link.of("40mbit", up="10mbit", delay="20ms")
    checks = make_lab(3, Link.of("20mbit", delay="0"), overrides={1: slow}).check()
    assert [(check.up_asked, check.down_asked) for check in checks] == [
        (20e6, 20e6),
        (10e6, 40e6),
        (20e6, 20e6),
    ]
    assert [check.rtt_asked for check in checks] == pytest.approx([0.02, 0.02, 0], abs=0.001)


def test_a_changed_rate_is_seen(make_lab: MakeLab) -> None:
    lab = make_lab(2, Link.of("20mbit"))
    lab.set_link(1, Link.of("10mbit"))
    assert [check.up_asked for check in lab.check()] == [10e6, 10e6]  # host 1 takes no more
    assert lab.links is not None
    lab.links[1] = Link.of("20mbit")  # asked for, but not what the relay does
    with pytest.raises(LabError, match=r"asked 20 Mbit/s, measured (9|10)\.?\d* Mbit/s"):
        lab.check(attempts=1)


def test_partition_and_heal(make_lab: MakeLab) -> None:
    lab = make_lab(2)
    code = (
        "import os, socket\n"
        "sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); sock.bind(('', 5000))\n"
        "if os.environ['RANK'] == '1':\n"
        "    while True:\n"
        "        data, peer = sock.recvfrom(100); sock.sendto(data, peer)\n"
        "sock.settimeout(0.2)\n"
        "said = ''\n"
        "while True:\n"
        "    try:\n"
        "        sock.sendto(b'x', ('10.77.0.2', 5000)); sock.recv(100); now = 'reached'\n"
        "    except TimeoutError: now = 'silent'\n"
        "    if now != said: print(now); said = now\n"
    )
    said: list[str] = []

    def act(line: Line) -> None:
        said.append(line.text)
        if said[-2:] == ["silent", "reached"] and len(said) > 2:
            job.signal(signal.SIGTERM)
        elif line.text == "reached":
            lab.partition(1)
        elif len(said) > 1:
            lab.heal(1)

    job = lab.start(python(code), sink=act)
    assert job.wait().code == 0
    assert said[-3:] == ["reached", "silent", "reached"]


def test_a_killed_host_is_gone_and_the_others_go_on(make_lab: MakeLab) -> None:
    lab = make_lab(3)
    # Host 1 has a second process in a session of its own.
    code = CONNECT + (
        "import signal, subprocess\n"
        "pause = [sys.executable, '-c', 'import signal; print(1, flush=True); signal.pause()']\n"
        "if rank == 0:\n"
        "    sock = accept()\n"
        "    print('closed' if sock.recv(1) == b'' else 'data')\n"
        "elif rank == 1:\n"
        "    child = subprocess.Popen(pause, start_new_session=True, stdout=subprocess.PIPE)\n"
        "    child.stdout.readline()\n"
        "    sock = connect('host0'); print('joined'); signal.pause()\n"
    )
    seen: list[str] = []
    left: list[int] = []

    def act(line: Line) -> None:
        seen.append(f"{line.label} {line.text}")
        if line.text == "joined":
            inode = os.stat(f"/proc/{job.processes[1].pid}/ns/net").st_ino
            assert len(processes_in(inode)) == 2
            lab.kill(1)
            left.append(inode)

    job = lab.start(python(code), sink=act)
    outcome = job.wait()
    assert outcome.code == 0, outcome
    assert seen == ["host1 joined", "host0 closed"]
    assert processes_in(left[0]) == []


def test_one_job_at_a_time_and_then_another(make_lab: MakeLab) -> None:
    lab = make_lab(1)
    job = lab.start(python("import signal; print('here'); signal.pause()"), sink=lambda line: None)
    with pytest.raises(LabError, match="one job at a time"):
        lab.start(["true"])
    job.signal(signal.SIGTERM)
    job.wait()
    assert lab.start(["true"]).wait().code == 0
    assert lab.check() == []  # there is no other host to measure against


def test_without_emulation_workers_are_plain_processes() -> None:
    lines: list[Line] = []
    with Lab(2, None) as lab:
        code = "import os, socket; print(socket.gethostname(), os.environ['LOCAL_RANK'])"
        assert lab.start(python(code), sink=lines.append).wait().code == 0
        assert lab.address(1) == "127.0.0.1"
        for impossible in (lab.check, lab.counters, lambda: lab.partition(1)):
            with pytest.raises(LabError, match="emulates no network"):
                impossible()
    here = os.uname().nodename
    assert sorted(map(str, lines)) == [f"worker0 | {here} 0", f"worker1 | {here} 1"]


def test_bad_input_is_refused_before_anything_is_built() -> None:
    for hosts in (0, -1, 1000):
        with pytest.raises(UsageError, match="hosts: got"):
            Lab(hosts, Link.of())
    with pytest.raises(UsageError, match="host 2 does not exist"):
        Lab(2, Link.of(), overrides={2: Link.of()})
    with pytest.raises(UsageError, match="needs the emulated network"):
        Lab(2, None, overrides={1: Link.of()})


def test_bad_commands_and_hosts_are_named(make_lab: MakeLab) -> None:
    lab = make_lab(1)
    with pytest.raises(UsageError, match="no command"):
        lab.start([])
    with pytest.raises(UsageError, match="cannot run 'no-such-program'"):
        lab.start(["no-such-program"])
    with pytest.raises(UsageError, match="workers per host: got 0"):
        lab.start(["true"], per_host=0)
    with pytest.raises(UsageError, match="got 500 workers"):
        lab.start(["true"], per_host=500)
    with pytest.raises(UsageError, match="host 1 does not exist"):
        lab.kill(1)
    assert lab.start(["true"]).wait().code == 0

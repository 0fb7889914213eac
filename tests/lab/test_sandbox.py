"""The lab without root, and where it is not allowed at all.

As root, the tests make themselves an unprivileged user first: a child with private mounts gets a
/dev/net/tun and an interpreter that user may open, and drops its rights.
"""

import os
import select
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import thinwire
from tests.lab.lab_tools import descendants
from thinwire.lab import kernel

NOBODY = 65534
SOURCE = Path(str(thinwire.__file__)).parents[1]

LAB = """
import os, sys
from thinwire.lab import Lab, Link
with Lab(2, Link.of("20mbit", delay="5ms")) as lab:
    lab.check()
    code = "import getpass, os, socket; print(socket.gethostname(), os.getuid())"
    outcome = lab.start([sys.executable, "-c", code]).wait()
    print([counters.tx_bytes > 0 for counters in lab.counters()])
sys.exit(outcome.code)
"""

# A user namespace of its own in which no PID namespace may be made.
FORBID = """
import os, sys
from thinwire.lab import Lab, Link, kernel
user = os.getuid()
kernel.unshare(kernel.CLONE_NEWUSER)
kernel.write_proc("/proc/self/setgroups", "deny")
kernel.write_proc("/proc/self/uid_map", f"{user} {user} 1")
kernel.write_proc("/proc/sys/user/max_pid_namespaces", "0")
"""


def become_nobody(device: int = 0o666) -> None:
    """In the child, before exec; `device` is the mode of /dev/net/tun."""
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("", "/", "", kernel.MS_SLAVE | kernel.MS_REC)
    desk = tempfile.mkdtemp()
    kernel.mount("tmpfs", desk, "tmpfs", 0)
    open_up(Path(desk), [Path(sys.base_prefix), Path(sys.prefix), SOURCE])
    node = os.path.join(desk, "tun")
    os.mknod(node, stat.S_IFCHR, os.makedev(10, 200))
    os.chmod(node, device)
    kernel.mount(node, "/dev/net/tun", "", kernel.MS_BIND)
    kernel.detach(desk)
    os.rmdir(desk)
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    os.chdir("/")


def open_up(desk: Path, wanted: list[Path]) -> None:
    """Make directories reachable that lie below closed ones, such as /root."""
    closed = {
        next(up for up in reversed(path.parents) if not up.stat().st_mode & stat.S_IXOTH): path
        for path in wanted
        if any(not up.stat().st_mode & stat.S_IXOTH for up in path.parents)
    }
    kept = []
    for number, path in enumerate(p for p in wanted if any(up in closed for up in p.parents)):
        copy = desk / str(number)
        copy.mkdir()
        kernel.mount(str(path), str(copy), "", kernel.MS_BIND | kernel.MS_REC)
        kept.append((copy, path))
    for cover in closed:
        kernel.mount("tmpfs", str(cover), "tmpfs", 0)
        cover.chmod(0o755)
    for copy, path in kept:
        path.mkdir(parents=True, exist_ok=True)
        kernel.mount(str(copy), str(path), "", kernel.MS_BIND | kernel.MS_REC)


def run(code: str, **settings: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd="/",
        **settings,  # type: ignore[call-overload]
    )


@pytest.mark.usefixtures("namespaces")
def test_without_root() -> None:
    root = os.getuid() == 0
    done = run(LAB, preexec_fn=become_nobody if root else None)
    assert done.returncode == 0, done.stderr
    user = NOBODY if root else os.getuid()
    *lines, counted = done.stdout.splitlines()
    assert sorted(lines) == [f"host0 | host0 {user}", f"host1 | host1 {user}"]
    assert counted == "[True, True]"


@pytest.mark.usefixtures("namespaces")
@pytest.mark.skipif(os.getuid() != 0, reason="only root can take away the right to a device")
def test_a_closed_device_is_named() -> None:
    done = run(LAB, preexec_fn=lambda: become_nobody(device=0o600))
    last = done.stderr.splitlines()[-1]
    assert "tried to open /dev/net/tun: Permission denied" in last
    assert "as root: chmod 666 /dev/net/tun" in last


@pytest.mark.usefixtures("namespaces")
def test_forbidden_namespaces_are_named() -> None:
    done = run(FORBID + "Lab(2, Link.of()).open()")
    last = done.stderr.splitlines()[-1]
    assert "tried to unshare the user and PID namespaces" in last
    assert "as root: sysctl user.max_pid_namespaces=10000" in last


@pytest.mark.usefixtures("namespaces")
def test_plain_workers_need_no_namespaces_and_die_with_the_launcher() -> None:
    code = FORBID + (
        "worker = 'import signal; print(1); signal.pause()'\n"
        "lines = []\n"
        "def sink(line):\n"
        "    lines.append(line)\n"
        "    if len(lines) == 2: print('ready', flush=True)\n"
        "with Lab(2, None) as lab:\n"
        "    lab.start([sys.executable, '-c', worker], sink=sink).wait()\n"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "ready\n"
    watches = [os.pidfd_open(pid) for pid in descendants(launcher.pid)]
    assert len(watches) == 4  # the two managers and two workers
    launcher.kill()
    launcher.wait()
    for watch in watches:
        assert select.select([watch], [], [], 10)[0]
        os.close(watch)
    launcher.stdout.close()

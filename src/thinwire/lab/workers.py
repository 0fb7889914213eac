"""Workers: the processes on the hosts, as their parent in the lab sees them."""

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from thinwire.lab import kernel
from thinwire.lab.host import Host

NICENESS = 5  # so that the relay is served first on a machine with fewer cores than workers


@dataclass
class Worker:
    host: int
    pid: int  # as this process sees it
    outer: int  # as the launcher sees it
    process: subprocess.Popen[bytes]


class Workers:
    def __init__(self, hosts: Sequence[Host], alone: bool) -> None:
        self._hosts = hosts
        self._alone = alone  # whether this process is the first of its own PID namespace
        self._live: dict[int, Worker] = {}  # by the launcher's number for it

    def spawn(
        self, number: int, host: int, argv: list[str], env: dict[str, str], cwd: str, fds: list[int]
    ) -> int:
        """Start one process with stdin, stdout and stderr in `fds`; returns its outer pid."""
        read, write = os.pipe()

        def prepare() -> None:
            os.write(write, os.readlink("/proc/self").encode())
            self._enter(host)

        try:
            # preexec_fn is safe here: this process has one thread.
            process = subprocess.Popen(
                argv,
                env=env,
                cwd=cwd,
                stdin=fds[0],
                stdout=fds[1],
                stderr=fds[2],
                start_new_session=True,
                preexec_fn=prepare,
            )
            outer = int(os.read(read, 32))
        finally:
            os.close(read)
            os.close(write)
        self._live[number] = Worker(host, process.pid, outer, process)
        return outer

    def _enter(self, host: int) -> None:
        """In the child, before exec: the only time a worker has the rights for this."""
        if self._hosts:
            kernel.setns(self._hosts[host].namespace, kernel.CLONE_NEWNET)
            kernel.unshare(kernel.CLONE_NEWUTS)
            kernel.set_hostname(f"host{host}")
        for signum in (signal.SIGINT, signal.SIGTERM):
            # A shell ignores SIGINT for what it starts with `&`, and that is inherited.
            signal.signal(signum, signal.SIG_DFL)
        os.nice(NICENESS)
        kernel.die_with_parent()

    def reap(self) -> list[tuple[int, int]]:
        """(number, exit code) of workers that ended; orphans that became ours are buried too."""
        ended: list[tuple[int, int]] = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return ended
            if pid == 0:
                return ended
            for number, worker in list(self._live.items()):
                if worker.pid == pid:
                    worker.process.returncode = os.waitstatus_to_exitcode(status)
                    ended.append((number, worker.process.returncode))
                    del self._live[number]

    def signal(self, number: int, signum: int) -> None:
        worker = self._live.get(number)
        if worker is not None:  # not reaped, so the pid is still its own
            os.kill(worker.pid, signum)

    def kill_host(self, host: int) -> None:
        """SIGKILL every process of a host, those its workers started too."""
        for worker in self._live.values():
            if worker.host == host:
                with suppress(ProcessLookupError):
                    os.killpg(worker.pid, signal.SIGKILL)
        if self._hosts:
            for pid in _processes_in(self._hosts[host].inode):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def sweep(self) -> None:
        """SIGKILL everything that is left of a job."""
        for worker in self._live.values():
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
        if self._alone and os.getpid() == 1:
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # all but the first process, which is this one


def _processes_in(inode: int) -> list[int]:
    """Processes in a network namespace, by their number in this PID namespace.

    /proc still shows the outer PID namespace; NSpid's last word is the number in the inner one.
    """
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):
                if os.stat(f"/proc/{entry}/ns/net").st_ino == inode:
                    with open(f"/proc/{entry}/status") as status:
                        line = next(line for line in status if line.startswith("NSpid:"))
                    found.append(int(line.split()[-1]))
    return found

"""Lab: a network of emulated hosts and the launcher of workers on them."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import thinwire
from thinwire.errors import LabError, UsageError
from thinwire.lab.check import LinkCheck, check_links
from thinwire.lab.environment import worker_environment
from thinwire.lab.host import Counters
from thinwire.lab.job import Job, Process
from thinwire.lab.link import Link
from thinwire.lab.output import Log, Sink, print_line
from thinwire.lab.relay import address

MOST_HOSTS = 128  # select() takes descriptors below 1024, and a host holds three
MOST_WORKERS = 400  # for the same reason: the launcher holds two descriptors for each
# Not put first when it is there already: site-packages must not come before Python's own modules.
_ENTRY = """
import sys
if {root!r} not in sys.path:
    sys.path.insert(0, {root!r})
from {module} import main
main()
"""


def entry(module: str) -> list[str]:
    """The command that runs `main` of one of our modules and nothing of the user's.

    Isolated, for `-m` would let a select.py in the working directory stand in for Python's own.
    """
    root = str(Path(str(thinwire.__file__)).parents[1])
    return [sys.executable, "-I", "-c", _ENTRY.format(root=root, module=module)]


class Lab:
    """Hosts that exist between `with` and its end.

    `link=None` emulates nothing: the workers are plain processes of this machine under the same
    supervision. The thread that opens a lab must outlive it: the kernel ends the lab with it.
    """

    def __init__(
        self,
        hosts: int,
        link: Link | None,
        *,
        overrides: Mapping[int, Link] | None = None,
        seed: int = 0,
    ) -> None:
        if not 1 <= hosts <= MOST_HOSTS:
            raise UsageError(f"hosts: got {hosts}, takes 1 to {MOST_HOSTS}")
        for host in overrides or {}:
            if not 0 <= host < hosts:
                raise UsageError(f"host {host} does not exist: there are {hosts}, counted from 0")
        if link is None and overrides:
            raise UsageError("a host's own link needs the emulated network, which is off")
        self.hosts = hosts
        self.links = (
            None if link is None else [(overrides or {}).get(h, link) for h in range(hosts)]
        )
        self.pid = 0  # of the process that runs the relay
        self._seed = seed
        self._job: Job | None = None
        self._numbers = itertools.count()
        self._replies: dict[int, dict[str, Any]] = {}
        self._exits: list[tuple[int, int]] = []
        self._text = b""
        self._outer: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Lab":
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def open(self) -> None:
        """Build the hosts; LabError says what to enable where that is not allowed."""
        self.control, theirs = socket.socketpair()
        links = [asdict(link) for link in self.links or []]
        settings = {"links": links, "seed": self._seed, "launcher": os.getpid()}
        with theirs:
            self._outer = subprocess.Popen(
                [*entry("thinwire.lab.manager"), str(theirs.fileno()), json.dumps(settings)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a Ctrl-C of the terminal is for the launcher alone
            )
        try:
            while not self.pid:
                self.receive()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End every process of the lab, and with them its namespaces and interfaces."""
        self.control.close()  # the manager ends at the end of its input
        if self._job is not None:
            self._job.close()
            self._job = None
        if self._outer is not None:
            try:
                self._outer.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._outer.kill()
                self._outer.wait()
            self._outer = None
        self.pid = 0
        self._text = b""

    def start(
        self,
        argv: Sequence[str],
        *,
        per_host: int = 1,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        sink: Sink = print_line,
    ) -> Job:
        """Run a command on every host, with torchrun's environment."""
        if not argv or not argv[0]:
            raise UsageError("no command to run: write it after --")
        if per_host < 1:
            raise UsageError(f"workers per host: got {per_host}, takes 1 or more")
        if self._job is not None and self._job.running:
            raise LabError("the lab runs one job at a time, and one is running")
        if self.hosts * per_host > MOST_WORKERS:
            raise UsageError(f"got {self.hosts * per_host} workers, takes {MOST_WORKERS} at most")
        shared = {**os.environ, **(env or {})}
        shape = self.hosts, per_host, self.links is not None
        job = self._job = Job(self)
        try:
            for rank, extra in enumerate(worker_environment(*shape, shared)):
                host, local = divmod(rank, per_host)
                label = self._label(host) + (f".{local}" if per_host > 1 else "")
                self._launch(job, (host, rank, local), label, argv, {**shared, **extra}, cwd, sink)
        except BaseException:
            self._job = None
            job.abandon()
            raise
        return job

    def _launch(
        self,
        job: Job,
        place: tuple[int, int, int],
        label: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str | os.PathLike[str] | None,
        sink: Sink,
    ) -> None:
        """Start the worker of one (host, rank, local rank) and have the job listen to it."""
        number = next(self._numbers)
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        try:
            with open(os.devnull, "rb") as null:
                fds = [null.fileno(), out_end, err_end]
                pid = self.spawn(number, place[0], argv, env, cwd, fds)
        except BaseException:
            os.close(out)
            os.close(err)
            raise
        finally:
            os.close(out_end)
            os.close(err_end)
        job.add(Process(*place, pid, label), number, Log(label, sink), (out, err))

    def _label(self, host: int) -> str:
        return f"host{host}" if self.links is not None else f"worker{host}"

    def spawn(
        self,
        number: int,
        host: int,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str | os.PathLike[str] | None,
        fds: list[int],
    ) -> int:
        """One process on one host, its standard descriptors in `fds`; returns its pid."""
        where = os.fspath(cwd) if cwd is not None else os.getcwd()
        try:
            pid = self.call(
                "spawn", fds, worker=number, host=host, argv=list(argv), env=dict(env), cwd=where
            )
        except LabError as error:
            raise UsageError(f"cannot run {argv[0]!r}: {error}") from error
        return int(pid)

    def check(self, attempts: int = 3) -> list[LinkCheck]:
        """Measure every link; LabError with both figures when one is off by more than 10 %."""
        return check_links(self, self._emulated(), attempts)

    def set_link(self, host: int, link: Link) -> None:
        """Change a running host's link, from the next packet on. Its MTU stays as it was."""
        self._known(host)
        self.call("link", host=host, link=asdict(link))
        self._emulated()[host] = link

    def partition(self, host: int) -> None:
        """Cut the host off. Its processes go on, its connections hang."""
        self._known(host)
        self.call("partition", host=host, cut=True)

    def heal(self, host: int) -> None:
        self._known(host)
        self.call("partition", host=host, cut=False)

    def kill(self, host: int) -> None:
        """SIGKILL every process of the host; the job's other workers go on.

        Its peers see closed connections. Partition it first for the silence of a power cut.
        """
        self._known(host, emulated=False)
        if self._job is not None:
            self._job.expect_loss(host)
        self.call("kill", host=host)

    def counters(self) -> list[Counters]:
        """The kernel's own counts on every host's interface."""
        self._emulated()
        return [Counters(**counts) for counts in self.call("counters")]

    def address(self, host: int) -> str:
        self._known(host, emulated=False)
        return "127.0.0.1" if self.links is None else address(host)

    def _emulated(self) -> list[Link]:
        if self.links is None:
            raise LabError("this lab emulates no network (link=None)")
        return self.links

    def _known(self, host: int, emulated: bool = True) -> None:
        if emulated:
            self._emulated()
        if not 0 <= host < self.hosts:
            raise UsageError(f"host {host} does not exist: there are {self.hosts}, counted from 0")

    # The line to the manager.

    def next_number(self) -> int:
        return next(self._numbers)

    def call(self, do: str, fds: Sequence[int] = (), **arguments: Any) -> Any:
        """Have the manager do something and wait for its answer."""
        number = next(self._numbers)
        line = json.dumps({"id": number, "do": do, **arguments}).encode() + b"\n"
        try:
            sent = socket.send_fds(self.control, [line], fds) if fds else 0
            self.control.sendall(line[sent:])
        except OSError as error:
            raise LabError(f"the lab has ended: {error}") from error
        while number not in self._replies:
            self.receive()
        reply = self._replies.pop(number)
        if "error" in reply:
            raise LabError(reply["error"])
        return reply["result"]

    def receive(self, wait: bool = True) -> None:
        """Take what the manager says; `wait` for at least some of it."""
        try:
            data = self.control.recv(1 << 16, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        if not data:
            raise LabError(f"the lab's manager ended unexpectedly ({self._last_words()})")
        *lines, self._text = (self._text + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "id" in message:
                self._replies[message["id"]] = message
            elif message["event"] == "exit":
                self._exits.append((message["worker"], message["code"]))
            elif message["event"] == "ready":
                self.pid = message["pid"]
            else:
                raise LabError(message["error"])

    def _last_words(self) -> str:
        code = self._outer.poll() if self._outer is not None else None
        if code is not None and code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return "its traceback is above" if code else "it may have run out of memory"

    def take_exits(self, numbers: Container[int]) -> list[tuple[int, int]]:
        """(number, exit code) of the given processes that have ended; each is told once."""
        taken = [exited for exited in self._exits if exited[0] in numbers]
        self._exits = [exited for exited in self._exits if exited[0] not in numbers]
        return taken

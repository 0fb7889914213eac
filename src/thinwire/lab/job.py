"""Job: one command running on every host, from its start to the reason of its end."""

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING

from thinwire.lab.output import Failure, Line, Log, Reader, culprit

if TYPE_CHECKING:
    from thinwire.lab.network import Lab

_TICK = 0.1  # s
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)  # after one of ours, any end is expected
_DRAIN = 2.0  # s, for the last output of workers that have ended


@dataclass(frozen=True)
class Process:
    """One worker."""

    host: int
    rank: int
    local_rank: int
    pid: int
    label: str


@dataclass(frozen=True)
class Patience:
    """Seconds given to workers on their way out."""

    gather: float = 1.0
    """After the first failure, before the others are ended: their errors tell who was first."""
    stop: float = 5.0
    """From SIGTERM to SIGKILL when a job has failed."""
    interrupt: float = 30.0
    """From a forwarded Ctrl-C or SIGTERM to SIGKILL: time to write a checkpoint."""


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    code: int
    """For the shell: 0, the failed worker's own code, 128 + its signal, 130 or 143."""
    failed: Process | None = None
    """The worker to blame."""
    reason: str = ""
    """One line."""
    tail: list[str] = field(default_factory=list)
    """The failed worker's traceback or last lines, without its label."""

    def __str__(self) -> str:
        """What to show last: the traceback, then the reason."""
        label = f"{self.failed.label} | " if self.failed else ""
        return "\n".join([*(label + line for line in self.tail), self.reason])


class Job:
    """Made by Lab.start. Its output flows only while poll() or wait() is called."""

    def __init__(self, lab: "Lab") -> None:
        self._lab = lab
        self.processes: list[Process] = []
        self._logs: dict[int, Log] = {}  # by rank, like all below
        self._numbers: dict[int, int] = {}
        self._live: set[int] = set()
        self._signalled: set[int] = set()
        self._exits: dict[int, tuple[int, float]] = {}
        self._readers: dict[int, Reader] = {}  # by descriptor

    def add(self, process: Process, number: int, log: Log, streams: tuple[int, int]) -> None:
        self.processes.append(process)
        self._logs[process.rank] = log
        self._numbers[process.rank] = number
        self._live.add(process.rank)
        for fd, error in zip(streams, (False, True), strict=True):
            self._readers[fd] = Reader(fd, error, log)

    @property
    def running(self) -> bool:
        return bool(self._live)

    def poll(self, timeout: float = 0.0) -> bool:
        """Pass on output and take note of exits; whether any worker still runs."""
        control = self._lab.control.fileno()
        ready, _, _ = select.select([control, *self._readers], [], [], timeout)
        for fd in ready:
            if fd == control:
                self._lab.receive(wait=False)  # a sink that calls the lab may have taken it
            elif not self._readers[fd].read():
                os.close(self._readers.pop(fd).fd)
        numbers = {number: rank for rank, number in self._numbers.items()}
        for number, code in self._lab.take_exits(numbers):
            self._live.discard(numbers[number])
            self._exits[numbers[number]] = code, time.monotonic()
        return self.running

    def signal(self, signum: int, host: int | None = None) -> None:
        """Send to every worker that still runs, or to those of one host."""
        for process in self.processes:
            if process.rank in self._live and host in (None, process.host):
                if signum in _ENDING:
                    self._signalled.add(process.rank)
                number = self._numbers[process.rank]
                self._lab.call("signal", workers=[number], signum=int(signum))

    def expect_loss(self, host: int) -> None:
        """The host is killed on purpose: its end is no failure, and the others go on."""
        self._signalled |= {process.rank for process in self.processes if process.host == host}

    def wait(
        self, tick: Callable[[], None] | None = None, *, patience: Patience | None = None
    ) -> Outcome:
        """Until every worker has ended; calls `tick` about ten times a second.

        The first failure ends the others. Ctrl-C and SIGTERM are passed on; a second one kills.
        """
        patience = patience or Patience()
        with _caught() as caught:
            ending = _Ending(self, patience, caught)
            while self.poll(_TICK):
                if tick is not None:
                    tick()
                ending.step()
        self._drain()
        return ending.outcome()

    def _drain(self) -> None:
        """The rest of the output. What workers left running would hold the pipes open."""
        self._lab.call("sweep")
        deadline = time.monotonic() + _DRAIN
        while self._readers and time.monotonic() < deadline:
            self.poll(_TICK)
        self.close()

    def abandon(self) -> None:
        """End what was started of a job that could not be started whole."""
        self._lab.call("sweep")
        self.close()

    def close(self) -> None:
        for fd in list(self._readers):
            os.close(self._readers.pop(fd).fd)

    def failures(self) -> list[Failure]:
        return [
            Failure(rank, code, when, self._logs[rank].traceback_time())
            for rank, (code, when) in self._exits.items()
            if code != 0 and rank not in self._signalled
        ]

    def tail(self, rank: int) -> list[Line]:
        return self._logs[rank].tail()


class _Ending:
    """What wait() does about failures and signals, step by step."""

    def __init__(self, job: Job, patience: Patience, caught: Sequence[int]) -> None:
        self._job = job
        self._patience = patience
        self._caught = caught
        self._heeded = 0  # of the signals caught
        self._gather_until: float | None = None
        self._kill_at: float | None = None
        self._blamed: list[Failure] = []

    def step(self) -> None:
        now = time.monotonic()
        if len(self._caught) > self._heeded:
            self._interrupt(now)
        if self._kill_at is not None and now >= self._kill_at:
            self._job.signal(signal.SIGKILL)
            self._kill_at = None
        elif self._gather_until is None and not self._caught and self._job.failures():
            self._gather_until = now + self._patience.gather
        elif self._gather_until is not None and not self._blamed and now >= self._gather_until:
            self._blamed = self._job.failures()
            self._job.signal(signal.SIGTERM)
            self._kill_at = now + self._patience.stop

    def _interrupt(self, now: float) -> None:
        impatient = self._heeded > 0 or bool(self._blamed) or len(self._caught) > 1
        self._heeded = len(self._caught)
        if impatient:
            self._job.signal(signal.SIGKILL)
            return
        self._job.signal(self._caught[0])
        self._kill_at = now + self._patience.interrupt

    def outcome(self) -> Outcome:
        if self._caught and not self._blamed:
            reason = f"interrupted by {_name(self._caught[0])}"
            return Outcome(128 + self._caught[0], reason=reason)
        failures = self._blamed or self._job.failures()
        if not failures:
            return Outcome(0, reason="finished")
        failure = culprit(failures)
        process = next(p for p in self._job.processes if p.rank == failure.rank)
        if failure.code < 0:
            code, how = 128 - failure.code, f"killed by {_name(-failure.code)}"
        else:
            code, how = failure.code, f"exit code {failure.code}"
        tail = [line.text for line in self._job.tail(failure.rank)]
        return Outcome(code, process, f"{process.label} (rank {process.rank}) failed: {how}", tail)


def _name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:  # a real-time signal
        return f"signal {signum}"


@contextmanager
def _caught() -> Iterator[Sequence[int]]:
    """Collect SIGINT and SIGTERM meanwhile, in the order of their arrival."""
    signals: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield signals  # only the main thread may set handlers
        return

    def note(signum: int, frame: FrameType | None) -> None:
        signals.append(signum)

    before = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)

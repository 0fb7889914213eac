"""Output: what workers print, line by line, and which of them to blame when they fail."""

import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

KEPT = 200  # last lines of each worker, for its traceback
_LONGEST = 1 << 16  # bytes of a line that never ends
_TRACEBACK = re.compile(r"Traceback \(most recent call last\)")
_CHAINED = re.compile(r"(During handling of the above|The above exception was the direct cause)")


@dataclass(frozen=True)
class Line:
    """One line of one worker."""

    label: str  # `host2`, or `host2.1` for the second worker of a host
    text: str
    error: bool  # whether it came on stderr
    time: float  # time.monotonic() when it was read

    def __str__(self) -> str:
        return f"{self.label} | {self.text}"


Sink = Callable[[Line], None]


def print_line(line: Line) -> None:
    """The sink used when no other is given."""
    print(line, file=sys.stderr if line.error else sys.stdout, flush=True)


class Reader:
    """One of a worker's two streams."""

    def __init__(self, fd: int, error: bool, log: "Log") -> None:
        self.fd = fd
        self.error = error
        self.log = log
        self._rest = b""
        os.set_blocking(fd, False)

    def read(self) -> bool:
        """Take what is there; False at the end."""
        try:
            data = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return True
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (not data or len(self._rest) > _LONGEST):
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self.log.add(line, self.error)
        return bool(data)


class Log:
    """A worker's last lines; passes each on to the sink."""

    def __init__(self, label: str, sink: Sink) -> None:
        self.label = label
        self._sink = sink
        self._lines: deque[Line] = deque(maxlen=KEPT)

    def add(self, data: bytes, error: bool) -> None:
        # A progress bar redraws its line with \r: the last state is what a terminal would show.
        text = data.decode(errors="replace").rstrip("\r").rsplit("\r", 1)[-1]
        line = Line(self.label, text, error, time.monotonic())
        self._lines.append(line)
        self._sink(line)

    def tail(self) -> list[Line]:
        """From the last traceback on, with those it was chained to; without one, the last lines."""
        lines = [line for line in self._lines if line.error]
        starts = [i for i, line in enumerate(lines) if _TRACEBACK.search(line.text)]
        if not starts:
            return list(self._lines)[-20:]
        start = starts.pop()
        while starts and any(_CHAINED.search(line.text) for line in lines[starts[-1] : start]):
            start = starts.pop()
        return lines[start:]

    def traceback_time(self) -> float | None:
        tail = self.tail()
        if tail and _TRACEBACK.search(tail[0].text):
            return tail[0].time
        return None


@dataclass(frozen=True)
class Failure:
    """A worker that ended badly, with no signal of ours."""

    rank: int
    code: int  # negative: killed by that signal
    time: float  # when it ended
    traceback: float | None  # when its traceback began


def culprit(failures: Sequence[Failure]) -> Failure:
    """The failure that caused the others.

    The peers of a broken worker fail too ("connection closed"), and may well end before it does:
    so one killed by a signal comes first, then the earliest traceback, then the earliest exit.
    """

    def rank(failure: Failure) -> tuple[int, float]:
        if failure.code < 0:
            return 0, failure.time
        if failure.traceback is not None:
            return 1, failure.traceback
        return 2, failure.time

    return min(failures, key=rank)

"""CommThread: one thread that runs jobs in the order they were given.

gloo and nccl match collectives by the order in which a group's ranks issue them. Giving a wire one
thread to issue from makes that order the program's order, whatever the wire's callers do next, and
lets a job wait on the network (between the two phases of a compressed mean, say) while the caller
computes.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class CommThread:
    """A daemon thread started at first use; an idle one costs nothing and never delays exit."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], T]) -> "Future[T]":
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        future: Future[T] = Future()
        self._jobs.put((future, job))
        return future

    def close(self) -> None:
        """Ends the thread after the jobs already given."""
        if self._thread is not None:
            self._jobs.put(None)

    def join(self, timeout: float) -> bool:
        """Whether the thread of a closed one has ended within so many seconds."""
        if self._thread is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (entry := self._jobs.get()) is not None:
            future, job = entry
            try:
                future.set_result(job())
            except BaseException as error:  # handed to whoever waits for the job
                future.set_exception(error)
            del entry, future, job  # an idle thread must not keep the last payload alive

"""What a worker has to say to the benchmark that started it: records meanwhile, an answer last.

It travels as JSON: in a line of the worker's output that begins with MARK, or through a pipe.
"""

import json
import os
from collections.abc import Callable
from typing import Any

MARK = "benchmark: "
TOLD, ANSWER = "told", "answer"


def tell(value: Any) -> None:
    """A record, at once."""
    _send(_message(TOLD, value))


def answer(value: Any) -> None:
    """The worker's last words."""
    _send(_message(ANSWER, value))


def tell_through(send: Callable[[str], None]) -> None:
    """From now on in this process, instead of by its output."""
    global _send
    _send = send


def _message(kind: str, value: Any) -> str:
    return json.dumps([kind, int(os.environ["RANK"]), value])


def _print(message: str) -> None:
    print(MARK + message, flush=True)


_send: Callable[[str], None] = _print


class Answers:
    """Sorts the messages of all workers."""

    def __init__(self, workers: int, told: Callable[[int, Any], None] | None) -> None:
        self.by_rank: list[Any] = [None] * workers
        self._told = told

    def receive(self, message: str) -> None:
        kind, rank, value = json.loads(message)
        if kind == ANSWER:
            self.by_rank[rank] = value
        elif self._told is not None:
            self._told(rank, value)

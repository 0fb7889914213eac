"""A function of a benchmark on every host of the lab: what it says meanwhile and what it returns.

    answers = on_hosts(worker, 3, "int8", hosts=2, link=Link.of("100mbit"))    worker(3, "int8")

Each host runs it in a process of its own (worker.py), with torchrun's environment. Arguments and
answers travel as JSON. Needs no torch.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from thinwire.lab import Lab, Line, Link

ROOT = Path(__file__).resolve().parents[2]
_MARK = "benchmark: "  # before what a worker has to say to the one that started it
_TOLD, _ANSWER = "told", "answer"


def on_hosts(
    worker: Callable[..., Any],
    *arguments: Any,
    hosts: int,
    link: Link | None,
    overrides: Mapping[int, Link] | None = None,
    check: bool = False,
    told: Callable[[int, Any], None] | None = None,
    tick: Callable[[Lab], None] | None = None,
) -> list[Any]:
    """What worker(*arguments) returned, by rank.

    `link=None` is this machine's own loopback. `check` measures the links first, and ends the
    benchmark if they are off. `told` gets what a worker tells, with its rank, as it comes. `tick`
    is called about ten times a second.
    """
    mail = _Mail(hosts, told)
    with Lab(hosts, link, overrides=overrides) as lab:
        if check:
            lab.check()
        job = lab.start(command_of(worker, arguments), env=_environment(), sink=mail.receive)
        outcome = job.wait(None if tick is None else lambda: tick(lab))
    if outcome.code:
        sys.exit("\n".join([*mail.lines[-40:], str(outcome)]))
    return mail.answers


def tell(value: Any) -> None:
    """To the one that started this worker, at once."""
    _send(_TOLD, value)


def answer(value: Any) -> None:
    """As the worker's last words."""
    _send(_ANSWER, value)


def _send(kind: str, value: Any) -> None:
    print(_MARK + json.dumps([kind, int(os.environ["RANK"]), value]), flush=True)


def command_of(worker: Callable[..., Any], arguments: Sequence[Any]) -> list[str]:
    module = worker.__module__
    if module == "__main__":  # as `python -m` started it
        module = sys.modules["__main__"].__spec__.name  # type: ignore[union-attr]
    return [
        *(sys.executable, "-m", "benchmarks.harness.worker"),
        *(module, worker.__name__, json.dumps(arguments)),
    ]


def _environment() -> dict[str, str]:
    """In which a worker finds its benchmark from any folder."""
    found = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{ROOT}{os.pathsep}{found}" if found else str(ROOT)}


class _Mail:
    """Sorts what the workers print."""

    def __init__(self, hosts: int, told: Callable[[int, Any], None] | None) -> None:
        self.answers: list[Any] = [None] * hosts
        self.lines: list[str] = []
        self._told = told

    def receive(self, line: Line) -> None:
        if not line.text.startswith(_MARK):
            self.lines.append(str(line))
            print(line, file=sys.stderr, flush=True)
            return
        kind, rank, value = json.loads(line.text.removeprefix(_MARK))
        if kind == _ANSWER:
            self.answers[rank] = value
        elif self._told is not None:
            self._told(rank, value)

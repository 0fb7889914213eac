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

from benchmarks.harness.forks import on_forks
from benchmarks.harness.telling import MARK, Answers
from thinwire.lab import Lab, Line, Link

ROOT = Path(__file__).resolve().parents[2]
_KEPT = 40  # lines of output, for somebody who wants to know why it failed


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

    `link=None` is no lab but this machine's loopback, with forks of this process (forks.py).
    `check` measures the links first, and ends the benchmark if they are off. `told` gets what a
    worker tells, with its rank, as it comes. `tick` is called about ten times a second.
    """
    if link is None:
        return on_forks(worker, arguments, hosts, told)
    answers, lines = Answers(hosts, told), list[str]()

    def receive(line: Line) -> None:
        if line.text.startswith(MARK):
            answers.receive(line.text.removeprefix(MARK))
        else:
            lines.append(str(line))
            print(line, file=sys.stderr, flush=True)

    with Lab(hosts, link, overrides=overrides) as lab:
        if check:
            lab.check()
        job = lab.start(_command(worker, arguments), env=_environment(), sink=receive)
        outcome = job.wait(None if tick is None else lambda: tick(lab))
    if outcome.code:
        sys.exit("\n".join([*lines[-_KEPT:], str(outcome)]))
    return answers.by_rank


def _command(worker: Callable[..., Any], arguments: Sequence[Any]) -> list[str]:
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

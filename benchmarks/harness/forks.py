"""A function of a benchmark on several ranks of this machine: forks of this process, on loopback.

They have imported what this process has, and are in its process group, so that a signal which stops
and continues a long computation reaches them all.
"""

import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from benchmarks.harness.telling import Answers, answer, tell_through
from thinwire.lab.environment import free_port

_fork = multiprocessing.get_context("fork")


def on_forks(
    worker: Callable[..., Any],
    arguments: Sequence[Any],
    ranks: int,
    told: Callable[[int, Any], None] | None,
) -> list[Any]:
    """What worker(*arguments) returned, by rank."""
    if "torch" in sys.modules:
        import torch._dynamo  # noqa: F401  the first step of an optimizer does, in seconds
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    answers, words = Answers(ranks, told), json.dumps(arguments)
    pipes: dict[Connection, Any] = {}
    for rank in range(ranks):
        ours, theirs = _fork.Pipe(duplex=False)
        seat = place | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        process = _fork.Process(target=_rank, args=(worker, words, seat, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes[ours] = process
    processes = list(pipes.values())
    try:
        while pipes:
            for pipe in wait(list(pipes)):
                assert isinstance(pipe, Connection)
                try:
                    answers.receive(pipe.recv())
                except EOFError:
                    _require_success(pipes.pop(pipe))
    finally:
        for process in processes:
            process.terminate()
            process.join()
    return answers.by_rank


def _rank(worker: Callable[..., Any], words: str, seat: dict[str, str], pipe: Connection) -> None:
    os.environ.update(seat)
    os.dup2(2, 1)  # what it prints is no part of the benchmark's output
    tell_through(pipe.send)
    answer(worker(*json.loads(words)))


def _require_success(process: Any) -> None:
    process.join()
    if process.exitcode:
        sys.exit(f"a worker failed: exit code {process.exitcode}")

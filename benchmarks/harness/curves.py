"""The loss over steps and seconds: of runs of `thinwire train`, and when it was first reached."""

import itertools
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.hosts import on_hosts
from benchmarks.harness.learning import joined
from thinwire.train.config import parse
from thinwire.train.worker import run_worker


@dataclass(frozen=True)
class Point:
    """An evaluation: seconds of training before it, without evaluations, and what it found."""

    step: int
    seconds: float
    loss: float


def trained(flags: list[str], *, forks: int = 0) -> list[Point]:
    """Trains with these flags and returns the evaluations.

    Instead of `thinwire train`, which starts workers as the flags say, `forks` makes so many ranks
    of this process: for sizes at which the start would take longer than the training.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        words = [*flags, "--run-dir", str(run)]
        if forks:
            on_hosts(_train, words, hosts=forks, link=None)
        else:
            command = [sys.executable, "-m", "thinwire", "train", *words]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stdout + done.stderr)
        lines = (run / "metrics" / "rank-0.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [Point(r["step"], r["seconds"], r["val_loss"]) for r in records if r["kind"] == "eval"]


def _train(flags: list[str]) -> None:
    with joined():
        run_worker(parse(flags))


def seconds_to(points: list[Point], target: float) -> float:
    """Seconds of training until the loss was there."""
    return first_below(((point.seconds, point.loss) for point in points), target)


def first_below(curve: Iterable[tuple[float, float]], target: float) -> float:
    """Where the loss was there, between two evaluations by a straight line; infinity if never."""
    for (before, a), (after, b) in itertools.pairwise(curve):
        if b <= target:
            return before + (after - before) * (a - target) / (a - b) if a > target else before
    return math.inf

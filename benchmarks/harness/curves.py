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


@dataclass(frozen=True)
class Point:
    """An evaluation: seconds of training before it, without evaluations, and what it found."""

    step: int
    seconds: float
    loss: float


def trained(flags: list[str]) -> list[Point]:
    """Trains with these flags and returns the evaluations."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "thinwire", "train", *flags, "--run-dir", str(run)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        lines = (run / "metrics" / "rank-0.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [Point(r["step"], r["seconds"], r["val_loss"]) for r in records if r["kind"] == "eval"]


def seconds_to(points: list[Point], target: float) -> float:
    """Seconds of training until the loss was there."""
    return first_below(((point.seconds, point.loss) for point in points), target)


def first_below(curve: Iterable[tuple[float, float]], target: float) -> float:
    """Where the loss was there, between two evaluations by a straight line; infinity if never."""
    for (before, a), (after, b) in itertools.pairwise(curve):
        if b <= target:
            return before + (after - before) * (a - target) / (a - b) if a > target else before
    return math.inf

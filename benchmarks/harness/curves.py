"""Runs of `thinwire train` for benchmarks: the loss over time and steps, from their metrics."""

import itertools
import json
import math
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Point:
    """An evaluation: seconds of training before it, without evaluations, and what it found."""

    step: int
    seconds: float
    loss: float


def curve(flags: list[str]) -> list[Point]:
    """Trains with these flags and returns its evaluations."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "thinwire", "train", *flags, "--run", str(run)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        lines = (run / "metrics" / "rank-0.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [Point(r["step"], r["seconds"], r["val_loss"]) for r in records if r["kind"] == "eval"]


def seconds_to(points: list[Point], target: float) -> float:
    """Seconds of training until the loss was there, interpolated; infinity if it never was."""
    for a, b in itertools.pairwise(points):
        if b.loss <= target:
            if a.loss <= target:
                return a.seconds
            share = (a.loss - target) / (a.loss - b.loss)
            return a.seconds + (b.seconds - a.seconds) * share
    return math.inf

"""Does `thinwire compare` tell the truth? Its figures against a count that it has no part in.

    python -m benchmarks.lab.compare_check             2 hosts, 1M parameters, 100 Mbit/s
    python -m benchmarks.lab.compare_check --quick     0.3M parameters, fewer steps, 2 methods

First a comparison, methods in turns; at the end the same once more. Between them every method
alone, as `thinwire train` in a lab of its own, without pauses and without anything else in its
process; here a clock on the wall takes the time between two of its steps, and the kernel's counters
on the hosts' interfaces take the bytes between them. Rounds of this are interleaved with rounds of
`none`, for the same efficiency, of all rounds together; its error is half the range of the rounds.
These should agree within 5 % (with the mean of both comparisons); the two comparisons in every
digit of their losses, and in their efficiencies within the spread they print. Prints two tables
and, as its last line, one JSON object, with bytes per token of all workers: {"methods": {method:
{"efficiency": [compare, alone, error], "bytes": [account, kernel], "again": {"efficiency":
[[value, plus or minus], ...], "val_loss": [first, second]}}}}.
"""

import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.arguments import Size, Table, end, parser
from thinwire.compare import launch
from thinwire.compare.results import gather
from thinwire.lab import Lab, Link
from thinwire.report.comparison import Cell, Comparison
from thinwire.train.loop.metrics import metrics_file

METHODS = {"ddp": [], "overlapped": ["every=8"], "post-local-sgd": ["every=8"]}
DELAY, HOSTS = "5ms", 2


@dataclass(frozen=True)
class Scale:
    model: str
    batch: int
    context: int
    steps: int
    rounds: int
    methods: tuple[str, ...]
    evals: int = 6
    rate: str = "100mbit"
    check: bool = True
    """Whether the links of runs alone are measured first, as those of a comparison are."""

    @property
    def flags(self) -> list[str]:
        sizes = ["--batch", str(self.batch), "--context", str(self.context)]
        return ["--model", self.model, *sizes]


SCALES = {
    Size.FULL: Scale("gpt-1m", 4, 128, steps=128, rounds=3, methods=tuple(METHODS)),
    Size.QUICK: Scale(
        "gpt-0.3m", 4, 64, steps=32, rounds=1, methods=("ddp", "overlapped"), evals=2
    ),
    Size.TINY: Scale(
        "gpt-0.3m", 1, 16, steps=12, rounds=1, methods=("ddp",), evals=1, rate="20mbit", check=False
    ),
}


def main() -> None:
    size = parser(__doc__).parse_args().size
    scale = SCALES[size]
    with tempfile.TemporaryDirectory() as folder:
        first = compare(Path(folder) / "first", scale)
        alone = in_turns(Path(folder), scale)
        second = compare(Path(folder) / "second", scale)
    answer = show(first, second, alone, scale)
    for name, repeated in show_again(first, second, scale).items():
        answer[name]["again"] = repeated
    end({"methods": answer}, size)


def compare(run: Path, scale: Scale) -> Comparison:
    words = ["--methods", ",".join(scale.methods), "--hosts", str(HOSTS), "--rate", scale.rate]
    words += ["--delay", DELAY, "--steps", str(scale.steps), "--evals", str(scale.evals)]
    words += ["--overtime", "1", "--run-dir", str(run), *scale.flags]
    for name in scale.methods:
        words += [word for own in METHODS[name] for word in ("--set", f"{name}.{own}")]
    code = launch.compare(words)
    if code:
        sys.exit(code)
    return gather(run)


Alone = dict[str, list[tuple[float, float]]]


def in_turns(folder: Path, scale: Scale) -> Alone:
    """(tokens per second, bytes per token) of every method in every round."""
    found: Alone = {name: [] for name in ("none", *scale.methods)}
    for number in range(scale.rounds):
        for name in found:
            words = [part for word in METHODS.get(name, []) for part in _flag(word)]
            found[name].append(alone(folder / f"{name}-{number}", name, words, scale))
    return found


def _flag(word: str) -> list[str]:
    name, _, value = word.partition("=")
    return [f"--{name}", value]


def alone(run: Path, method: str, own: list[str], scale: Scale) -> tuple[float, float]:
    """Between a quarter and the last but one round of a run: whole rounds, in the steady state."""
    first, last = scale.steps // 4, scale.steps - 8
    command = [sys.executable, "-m", "thinwire", "train", "--method", method, *own, *scale.flags]
    command += ["--steps", str(scale.steps), "--eval-every", "0", "--eval-windows", "4"]
    command += ["--final-lr", "1", "--run-dir", str(run)]
    marks: dict[int, tuple[float, int]] = {}
    with Lab(HOSTS, Link.of(scale.rate, delay=DELAY)) as lab:
        if scale.check:
            lab.check()
        job = lab.start(command, sink=lambda line: None)
        while job.poll(0.002):
            done = steps_done(metrics_file(run, 0))
            for step in (first, last):
                if step not in marks and done >= step:
                    sent = sum(counters.tx_bytes for counters in lab.counters())
                    marks[step] = time.perf_counter(), sent
    if len(marks) < 2:
        sys.exit(f"{method} did not run: see thinwire train --method {method}")
    tokens = (last - first) * HOSTS * scale.batch * scale.context
    (began, before), (ended, after) = marks[first], marks[last]
    return tokens / (ended - began), (after - before) / tokens


def steps_done(path: Path) -> int:
    return path.read_bytes().count(b'"kind": "step"') if path.exists() else 0


def show(first: Comparison, second: Comparison, alone: Alone, scale: Scale) -> dict[str, Any]:
    print()
    columns = ("efficiency: compare", "alone", "off", "bytes/token: account", "kernel", "off")
    table = Table("", *columns, first=16)
    answer: dict[str, Any] = {}
    for name in scale.methods:
        cells = [cell_of(comparison, name, scale.rate) for comparison in (first, second)]
        sent = cells[0].bytes_per_token
        assert sent is not None
        shown = statistics.fmean(cell.efficiency.value for cell in cells if cell.efficiency)
        rounds = [m[0] / n[0] for m, n in zip(alone[name], alone["none"], strict=True)]
        ratio, error = _speed(alone[name]) / _speed(alone["none"]), (max(rounds) - min(rounds)) / 2
        kernel = statistics.median(sent for _, sent in alone[name])
        speeds = f"{shown:.3f}", f"{ratio:.3f} ±{error:.3f}", _off(shown, ratio)
        table.row(name, *speeds, f"{sent:.1f}", f"{kernel:.1f}", _off(sent, kernel))
        answer[name] = {
            "efficiency": [round(shown, 4), round(ratio, 4), round(error, 4)],
            "bytes": [round(sent, 2), round(kernel, 2)],
        }
    return answer


def show_again(first: Comparison, second: Comparison, scale: Scale) -> dict[str, Any]:
    """The same command twice."""
    print()
    columns = ("efficiency, first", "second", "", "val loss, first", "second", "")
    table = Table("", *columns, first=16, width=14)
    answer: dict[str, Any] = {}
    for name in scale.methods:
        cells = [cell_of(comparison, name, scale.rate) for comparison in (first, second)]
        speeds = [cell.efficiency for cell in cells if cell.efficiency]
        losses = [cell.val_loss.value for cell in cells if cell.val_loss]
        within = abs(speeds[0].value - speeds[1].value) <= sum(s.plus_minus or 0.0 for s in speeds)
        words = (f"{s.value:.3f} ±{s.plus_minus or 0.0:.3f}" for s in speeds)
        same = "the same" if losses[0] == losses[1] else "DIFFERENT"
        shown = (f"{loss:.6f}" for loss in losses)
        table.row(name, *words, "within" if within else "BEYOND", *shown, same)
        answer[name] = {
            "efficiency": [[round(s.value, 4), round(s.plus_minus or 0.0, 4)] for s in speeds],
            "val_loss": losses,
        }
    return answer


def cell_of(comparison: Comparison, name: str, rate: str) -> Cell:
    cell = comparison.cell(rate, name)
    if cell is None or None in (cell.efficiency, cell.bytes_per_token, cell.val_loss):
        sys.exit(f"{name} has no figures")
    return cell


def _speed(rounds: list[tuple[float, float]]) -> float:
    """Tokens per second of all rounds together, which read as many tokens each."""
    return statistics.harmonic_mean([speed for speed, _ in rounds])


def _off(shown: float, counted: float) -> str:
    return f"{shown / counted - 1:+.1%}"


if __name__ == "__main__":
    main()

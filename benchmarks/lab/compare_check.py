"""Does `thinwire compare` tell the truth? Its figures against a count that it has no part in.

    python benchmarks/compare_check.py             2 hosts, 1M parameters, 100 Mbit/s
    python benchmarks/compare_check.py --quick     0.3M parameters, fewer steps

First a comparison, methods in turns; at the end the same once more. Between them every method
alone, as `thinwire train` in a lab of its own, without pauses and without anything else in its
process; here a clock on the wall takes the time between two of its steps, and the kernel's counters
on the hosts' interfaces take the bytes between them. Rounds of this are interleaved with rounds of
`none`, for the same efficiency, of all rounds together; its error is half the range of the rounds.
These should agree within 5 % (with the mean of both comparisons); the two comparisons in every
digit of their losses, and in their efficiencies within the spread they print. Prints two tables
and, as its last line, one JSON object, with bytes per token of all workers:
{method: {"efficiency": [compare, alone, error], "bytes": [account, kernel],
          "again": {"efficiency": [[value, plus or minus], ...], "val_loss": [first, second]}}}
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from thinwire.compare import launch
from thinwire.compare.results import gather
from thinwire.lab import Lab, Link
from thinwire.report.comparison import Cell, Comparison
from thinwire.train.metrics import metrics_file

METHODS = {"ddp": [], "overlapped": ["every=8"], "post-local-sgd": ["every=8"]}
RATE, DELAY, HOSTS = "100mbit", "5ms", 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    model = "gpt-0.3m" if quick else "gpt-1m"
    steps, rounds = (32, 1) if quick else (128, 3)
    flags = ["--model", model, "--batch", "4", "--context", "128"]
    with tempfile.TemporaryDirectory() as folder:
        first = compare(Path(folder) / "first", flags, steps)
        alone = in_turns(Path(folder), flags, steps, rounds)
        second = compare(Path(folder) / "second", flags, steps)
    answer = show(first, second, alone)
    for name, repeated in show_again(first, second).items():
        answer[name]["again"] = repeated
    print(json.dumps(answer))


def compare(run: Path, flags: list[str], steps: int) -> Comparison:
    words = ["--methods", ",".join(METHODS), "--hosts", str(HOSTS), "--rate", RATE]
    words += ["--delay", DELAY, "--steps", str(steps), "--evals", "6", "--overtime", "1"]
    words += ["--set", *(f"{name}.{word}" for name, own in METHODS.items() for word in own)]
    code = launch.compare([*words, *flags, "--run", str(run)])
    if code:
        sys.exit(code)
    return gather(run)


def in_turns(
    folder: Path, flags: list[str], steps: int, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """(tokens per second, bytes per token) of every method in every round."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ("none", *METHODS)}
    for number in range(rounds):
        for name in found:
            words = [*flags, *(part for w in METHODS.get(name, []) for part in _flag(w))]
            found[name].append(alone(folder / f"{name}-{number}", name, words, steps))
    return found


def _flag(word: str) -> list[str]:
    name, _, value = word.partition("=")
    return [f"--{name}", value]


def alone(run: Path, method: str, flags: list[str], steps: int) -> tuple[float, float]:
    """Between a quarter and the last but one step of a run: whole rounds, in the steady state."""
    first, last = steps // 4, steps - 8
    command = [sys.executable, "-m", "thinwire", "train", "--method", method, *flags]
    command += ["--steps", str(steps), "--eval-every", "0", "--eval-windows", "4"]
    command += ["--final-lr", "1", "--run", str(run)]
    marks: dict[int, tuple[float, int]] = {}
    with Lab(HOSTS, Link.of(RATE, delay=DELAY)) as lab:
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
    tokens = (last - first) * HOSTS * 4 * 128
    (began, before), (ended, after) = marks[first], marks[last]
    return tokens / (ended - began), (after - before) / tokens


def steps_done(path: Path) -> int:
    return path.read_bytes().count(b'"kind": "step"') if path.exists() else 0


def show(
    first: Comparison, second: Comparison, alone: dict[str, list[tuple[float, float]]]
) -> dict[str, dict[str, Any]]:
    print(f"\n{'':16}{'efficiency':>32}{'bytes per token':>32}")
    print(f"{'':16}{'compare':>12}{'alone':>9}{'':11}{'account':>12}{'kernel':>12}{'':8}")
    answer: dict[str, dict[str, Any]] = {}
    for name in METHODS:
        cells = [cell_of(comparison, name) for comparison in (first, second)]
        sent = cells[0].bytes_per_token
        assert sent is not None
        told = statistics.fmean(cell.efficiency.value for cell in cells if cell.efficiency)
        rounds = [m[0] / n[0] for m, n in zip(alone[name], alone["none"], strict=True)]
        ratio, error = _speed(alone[name]) / _speed(alone["none"]), (max(rounds) - min(rounds)) / 2
        kernel = statistics.median(sent for _, sent in alone[name])
        print(
            f"{name:16}{told:12.3f}{ratio:9.3f} ±{error:.3f} {_off(told, ratio)}"
            f"{sent:9.1f}{kernel:12.1f}{_off(sent, kernel)}"
        )
        answer[name] = {
            "efficiency": [round(told, 4), round(ratio, 4), round(error, 4)],
            "bytes": [round(sent, 2), round(kernel, 2)],
        }
    return answer


def show_again(first: Comparison, second: Comparison) -> dict[str, Any]:
    """The same command twice."""
    print(f"\n{'':16}{'efficiency':>32}{'val loss':>34}")
    answer: dict[str, Any] = {}
    for name in METHODS:
        cells = [cell_of(comparison, name) for comparison in (first, second)]
        speeds = [cell.efficiency for cell in cells if cell.efficiency]
        losses = [cell.val_loss.value for cell in cells if cell.val_loss]
        within = abs(speeds[0].value - speeds[1].value) <= sum(s.plus_minus or 0.0 for s in speeds)
        words = "  ".join(f"{s.value:.3f} ±{s.plus_minus or 0.0:.3f}" for s in speeds)
        same = "the same" if losses[0] == losses[1] else "DIFFERENT"
        print(
            f"{name:16}{words:>26}{' within' if within else ' BEYOND':8}"
            f"{'  '.join(f'{loss:.6f}' for loss in losses):>22}  {same}"
        )
        answer[name] = {
            "efficiency": [[round(s.value, 4), round(s.plus_minus or 0.0, 4)] for s in speeds],
            "val_loss": losses,
        }
    return answer


def cell_of(comparison: Comparison, name: str) -> Cell:
    cell = comparison.cell(RATE, name)
    if cell is None or None in (cell.efficiency, cell.bytes_per_token, cell.val_loss):
        sys.exit(f"{name} has no figures")
    return cell


def _speed(rounds: list[tuple[float, float]]) -> float:
    """Tokens per second of all rounds together, which read as many tokens each."""
    return statistics.harmonic_mean([speed for speed, _ in rounds])


def _off(told: float, counted: float) -> str:
    return f"{told / counted - 1:+8.1%}"


if __name__ == "__main__":
    main()

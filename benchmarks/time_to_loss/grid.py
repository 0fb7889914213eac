"""The grid of docs/results.md: all methods, at three rates, on two and on four workers.

    python -m benchmarks.time_to_loss.grid            runs/grid-2 and runs/grid-4, then the page
    python -m benchmarks.time_to_loss.grid --quick    two methods, two workers, few steps; no page
    python -m benchmarks.time_to_loss.grid --workers 4 --rate 1gbit      one cell now, the fastest
    python -m benchmarks.time_to_loss.grid --workers 4 --rate 100mbit    rate first, others later
    python -m benchmarks.time_to_loss.grid --page     the page again from what was measured
    python -m benchmarks.time_to_loss.grid --rivals PYTHON    other libraries' methods too, with the
                                                              PYTHON of their environment

Runs `thinwire compare` twice (rivals/compare.py with --rivals) and puts its tables between the
marks in docs/results.md; what is written around them stays. A comparison that was interrupted goes
on, and a cell that has been run is not run again. Prints the tables and, as its last line, one JSON
object: {"workers": {workers: {rate: {method: [efficiency, sooner]}}}}.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness.arguments import Size, end, parser
from benchmarks.harness.hosts import ROOT
from thinwire.compare.records import SETTINGS
from thinwire.compare.results import gather
from thinwire.report.comparison import Comparison
from thinwire.report.comparison_table import columns, notes

PAGE = ROOT / "docs" / "results.md"
CONFIG = Path(__file__).with_suffix(".toml")
MARKS = "<!-- made by benchmarks/time_to_loss/grid.py -->", "<!-- end -->"
WORKERS = (2, 4)
QUICK = ["--methods", "ddp,overlapped", "--rate", "1gbit,100mbit", "--steps", "16", "--evals", "4"]
QUICK += ["--set", "every=8"]  # of the grid's settings, what these methods have
TINY = ["--methods", "ddp,overlapped", "--rate", "20mbit", "--steps", "2", "--evals", "1"]
TINY += ["--batch", "1", "--context", "16", "--eval-windows", "4", "--overtime", "1"]
TINY += ["--timed", "0", "--set", "every=2"]
SMALL = {Size.FULL: [], Size.QUICK: QUICK, Size.TINY: TINY}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--page", action="store_true", help="measure nothing")
    arguments.add_argument("--rivals", metavar="PYTHON", help="of an environment with the rivals")
    arguments.add_argument("--runs", default="runs", help="where the comparisons are kept")
    arguments.add_argument("--workers", type=int, choices=WORKERS, help="only so many, now")
    arguments.add_argument("--rate", help="only this one of the grid's, now")
    given = arguments.parse_args()
    if given.size is not Size.FULL:  # which nobody wants to keep, nor to go on with
        with tempfile.TemporaryDirectory() as folder:
            flags = [*SMALL[given.size], "--only", given.rate or ""]
            measure(Path(folder) / "run", given.workers or 2, flags, given.rivals)
            show({given.workers or 2: gather(Path(folder) / "run")}, given.size)
        return
    found = {}
    for workers in WORKERS:
        run = Path(given.runs) / f"grid-{workers}"
        if not given.page and given.workers in (None, workers):
            measure(run, workers, ["--only", given.rate or ""], given.rivals)
        if (run / SETTINGS).exists():
            found[workers] = gather(run)
    write("\n\n".join(section(comparison) for comparison in found.values()))
    show(found, given.size)


def measure(run: Path, workers: int, flags: list[str], rivals: str | None) -> None:
    module = "benchmarks.rivals.compare" if rivals else "thinwire"
    command = [rivals or sys.executable, "-m", module, *([] if rivals else ["compare"])]
    command += ["--config", str(CONFIG), "--hosts", str(workers), "--run-dir", str(run), *flags]
    code = subprocess.run(command).returncode
    if code not in (0, 1):  # 1: a method could not run, which the table says
        sys.exit(code)


def show(found: dict[int, Comparison], size: Size) -> None:
    print("\n\n".join(section(comparison) for comparison in found.values()))
    end({"workers": {workers: figures(found[workers]) for workers in found}}, size)


def section(comparison: Comparison) -> str:
    """One number of workers: a table for each rate."""
    parts = [f"### {comparison.hosts} workers"]
    for rate in comparison.rates:
        parts.append(f"**{rate}**, {comparison.links.get(rate, '')}")
        parts.append(table(comparison, rate))
        parts += [f"- {line}" for line in notes(comparison, rate)]
    return "\n\n".join(parts).replace("\n\n- ", "\n- ")


def table(comparison: Comparison, rate: str) -> str:
    shown = columns(comparison)
    lines = ["| " + " | ".join(name for name, _ in shown) + " |"]
    lines.append("|---" + "|---:" * (len(shown) - 1) + "|")
    cells = sorted(comparison.at(rate), key=lambda cell: -(cell.sooner or 0.0))
    for cell in cells:
        lines.append("| " + " | ".join(show(cell) for _, show in shown) + " |")
    return "\n".join(lines)


def write(text: str) -> None:
    page = PAGE.read_text()
    pattern = re.escape(MARKS[0]) + ".*?" + re.escape(MARKS[1])
    made = f"{MARKS[0]}\n\n{text}\n\n{MARKS[1]}"
    PAGE.write_text(re.sub(pattern, lambda _: made, page, flags=re.S))


def figures(comparison: Comparison) -> dict[str, dict[str, list[float | None]]]:
    return {
        rate: {
            cell.method: [
                None if cell.efficiency is None else round(cell.efficiency.value, 3),
                None if cell.sooner is None else round(cell.sooner, 3),
            ]
            for cell in comparison.at(rate)
        }
        for rate in comparison.rates
    }


if __name__ == "__main__":
    main()

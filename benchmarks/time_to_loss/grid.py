"""The grid of docs/results.md: all methods, at three rates, on two and on four workers.

    python benchmarks/grid.py                       runs/grid-2 and runs/grid-4, then the page
    python benchmarks/grid.py --quick               two methods, two rates, few steps; no page
    python benchmarks/grid.py --workers 4 --rate 1gbit      one cell of the grid now, the fastest
    python benchmarks/grid.py --workers 4 --rate 100mbit    rate first; the others another time
    python benchmarks/grid.py --page                the page again from what was measured
    python benchmarks/grid.py --peers PYTHON        other libraries' methods too: peers/compare.py

Runs `thinwire compare` twice and puts its tables between the marks in docs/results.md; what is
written around them stays. A comparison that was interrupted goes on, and a cell that has been run
is not run again. Prints the tables and, as its last line, one JSON object:
{workers: {rate: {method: [efficiency, sooner]}}}.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

from thinwire.compare.records import SETTINGS
from thinwire.compare.results import gather
from thinwire.report.comparison import Comparison
from thinwire.report.comparison_table import columns, notes

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "results.md"
CONFIG = ROOT / "benchmarks" / "grid.toml"
WORKERS = (2, 4)
QUICK = ["--methods", "ddp,overlapped", "--rate", "1gbit,100mbit", "--steps", "16", "--evals", "4"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--page", action="store_true", help="measure nothing")
    parser.add_argument("--peers", metavar="PYTHON", help="of an environment with the peers in it")
    parser.add_argument("--runs", default="runs", help="where the comparisons are kept")
    parser.add_argument("--workers", type=int, choices=WORKERS, help="only so many, now")
    parser.add_argument("--rate", help="only this one of the grid's, now")
    given = parser.parse_args()
    found = {}
    for workers in WORKERS:
        run = Path(given.runs) / f"grid-{workers}{'-quick' if given.quick else ''}"
        if not given.page and given.workers in (None, workers):
            flags = [*(QUICK if given.quick else []), "--only", given.rate or ""]
            measure(run, workers, flags, given.peers)
        if (run / SETTINGS).exists():
            found[workers] = gather(run)
    text = "\n\n".join(section(comparison) for comparison in found.values())
    print(text)
    if not given.quick:
        write(text)
    print(json.dumps({str(workers): figures(found[workers]) for workers in found}))


def measure(run: Path, workers: int, flags: list[str], peers: str | None) -> None:
    command = [sys.executable, "-m", "thinwire", "compare"]
    if peers:
        command = [peers, str(ROOT / "benchmarks" / "peers" / "compare.py")]
    command += ["--config", str(CONFIG), "--hosts", str(workers), "--run", str(run), *flags]
    code = subprocess.run(command).returncode
    if code not in (0, 1):  # 1: a method could not run, which the table says
        sys.exit(code)


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
    marks = "<!-- made by benchmarks/grid.py -->", "<!-- end -->"
    pattern = re.escape(marks[0]) + ".*?" + re.escape(marks[1])
    made = f"{marks[0]}\n\n{text}\n\n{marks[1]}"
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

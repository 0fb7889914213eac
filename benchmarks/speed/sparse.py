"""How much of the compute's speed sparse averaging keeps on a slow link.

    python benchmarks/sparse_speed.py             2 workers, 3.2M parameters, 100 Mbit/s
    python benchmarks/sparse_speed.py --quick     2 repetitions of few steps

Two emulated hosts in the lab, real sockets, methods interleaved in one run (see side_by_side.py).
Efficiency is tokens/s over the same loop with no communication. `all weights` averages everything
at every step and waits for it; `ddp` averages gradients, as PyTorch does. Prints a table and, as
its last line, one JSON object: {"rate", "figures": {method: {"ms_per_step", "efficiency",
"exposed_ms_per_step", "mb_per_step"}}}.
"""

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from side_by_side import Contender, compete, in_lab, method  # isort: skip

import thinwire as tw
from thinwire.lab import Link

MODEL, BATCH, CONTEXT, RATE, DELAY = "gpt-3m", 8, 128, "100mbit", 10


def contenders(timed: int) -> list[Contender]:
    """The untimed steps of a turn bring as many rounds into the air as there are in a long run."""
    late = {"averaging_delay": DELAY}
    every = {"fraction": 1.0, "averaging_delay": 0}
    return [
        Contender("none", method("none"), 2, timed),
        Contender("sparse, fp32", method("sparse-average", **late), DELAY + 2, timed),
        Contender("sparse, bf16", method("sparse-average", codec="bf16", **late), DELAY + 2, timed),
        Contender("sparse, blocking", method("sparse-average", averaging_delay=0), 2, timed),
        Contender("all weights", method("sparse-average", **every), 1, timed // 4),
        Contender("ddp", method("ddp"), 1, timed // 4),
    ]


def worker(repetitions: int, timed: int) -> None:
    entered = contenders(timed)
    figures = compete(entered, repetitions, model=MODEL, batch=BATCH, context=CONTEXT)
    for contender in entered:
        account = contender.replica.account
        sent = account.bytes / max(1, account.steps)
        figures[contender.name]["mb_per_step"] = round(sent / 1e6, 3)
    if os.environ["RANK"] == "0":
        print(json.dumps(figures), flush=True)
    tw.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rate", default=RATE)
    given = parser.parse_args()
    turns = ["2", "8"] if given.quick else ["4", "16"]
    figures, _ = in_lab(__file__, turns, 2, Link.of(given.rate, delay="1ms"))
    print(f"2 workers, {MODEL}, {given.rate}, delay {DELAY} steps")
    print(f"  {'method':20}{'ms/step':>10}{'efficiency':>12}{'exposed ms':>12}{'MB/step':>10}")
    for name, f in figures.items():
        print(
            f"  {name:20}{f['ms_per_step']:10.1f}{f['efficiency']:12.3f}"
            f"{f['exposed_ms_per_step']:12.1f}{f['mb_per_step']:10.3f}"
        )
    print(json.dumps({"rate": given.rate, "figures": figures}))


if __name__ == "__main__":
    worker(int(sys.argv[1]), int(sys.argv[2])) if "RANK" in os.environ else main()

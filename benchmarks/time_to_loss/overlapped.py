"""How much sooner an overlapped method reaches the loss that data parallelism reaches.

    python benchmarks/time_to_loss.py             4 workers, 100 Mbit/s, 3.2M parameters: 9 minutes
    python benchmarks/time_to_loss.py --seeds 3   the same for three seeds
    python benchmarks/time_to_loss.py --quick     0.3M parameters, few steps, 1 seed

Runs `thinwire train --lab` for ddp and for overlapped on four emulated hosts, seed by seed, with a
constant learning rate after the warm-up, so that the loss at a moment does not depend on the length
of the run. The target is the validation loss of ddp at its end, with the batch that overlapped has;
ddp is also run with larger batches, which spend less of their time on the network, and the soonest
of them counts. The time is that spent training (evaluation left out), interpolated between
evaluations. Overlapped has rounds of 2 steps, int8 and no outer momentum, which costs quality
when rounds are this short. Prints a table and, as its last line, one JSON object:
{"ratio", "ratio_at_equal_batch", "seeds": [{"target", "overlapped", "ddp": {batch: seconds}}]}.
"""

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from runs import Point, curve, seconds_to  # isort: skip

COMMON = ["--lab", "--workers", "4", "--rate", "100mbit", "--delay", "1ms"]
COMMON += ["--lr", "1e-3", "--final-lr", "1.0"]
FULL = ["--model", "gpt-3m", "--eval-every", "10", "--eval-windows", "128"]
QUICK = ["--model", "gpt-0.3m", "--eval-every", "5", "--eval-windows", "64"]
OVERLAPPED = ["--every", "2", "--codec", "int8", "--outer-momentum", "0"]
BATCH = 2
DDP_STEPS = {BATCH: 100, 4: 80, 8: 60}
QUICK_DDP_STEPS = {BATCH: 40, 8: 30}
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, default=1)
    given = parser.parse_args()
    rows = [compare(seed, given.quick) for seed in range(given.seeds)]
    print(f"{'seed':6}{'target':>8}{'overlapped':>12}   ddp, by windows in a batch")
    for seed, row in enumerate(rows):
        ddp = ", ".join(f"{batch}: {seconds:.1f} s" for batch, seconds in row["ddp"].items())
        print(f"{seed:<6}{row['target']:8.3f}{row['overlapped']:10.1f} s   {ddp}")
    ratio = statistics.median(min(row["ddp"].values()) / row["overlapped"] for row in rows)
    equal = statistics.median(row["ddp"][BATCH] / row["overlapped"] for row in rows)
    print(f"overlapped is there {ratio:.2f}x sooner; at an equal batch {equal:.2f}x")
    figures = {"ratio": round(ratio, 3), "ratio_at_equal_batch": round(equal, 3), "seeds": rows}
    print(json.dumps(reached(figures | {"quick": given.quick})))


def compare(seed: int, quick: bool) -> Row:
    size, ddp_steps = (QUICK, QUICK_DDP_STEPS) if quick else (FULL, DDP_STEPS)

    def run(method: str, batch: int, steps: int, *more: str) -> list[Point]:
        own = ["--method", method, "--batch", str(batch), "--steps", str(steps), *more]
        return curve([*COMMON, *size, "--seed", str(seed), *own])

    dense = {batch: run("ddp", batch, steps) for batch, steps in ddp_steps.items()}
    target = dense[BATCH][-1].loss
    # Local updates need more tokens for the same loss: allow for them, and stop looking then.
    ours = run("overlapped", BATCH, int(2.5 * ddp_steps[BATCH]), *OVERLAPPED)
    return {
        "target": round(target, 4),
        "overlapped": round(seconds_to(ours, target), 2),
        "ddp": {batch: round(seconds_to(points, target), 2) for batch, points in dense.items()},
    }


def reached(figures: Any) -> Any:
    """JSON has no infinity: what was never reached is null."""
    if isinstance(figures, dict):
        return {key: reached(value) for key, value in figures.items()}
    if isinstance(figures, list):
        return [reached(value) for value in figures]
    return None if isinstance(figures, float) and math.isinf(figures) else figures


if __name__ == "__main__":
    main()

"""How much sooner an overlapped method reaches the loss that data parallelism reaches.

    python benchmarks/time_to_loss.py             4 workers, 100 Mbit/s, 3.2M parameters
    python benchmarks/time_to_loss.py --seeds 3   the same for three seeds
    python benchmarks/time_to_loss.py --quick     0.3M parameters, few steps, 1 seed

Runs `thinwire train --lab` for ddp and for overlapped on four emulated hosts, seed by seed, with a
constant learning rate after the warm-up, so that the loss at a moment does not depend on the length
of the run. The target is the validation loss of ddp at its end; the time is that spent training
(evaluation left out), interpolated between evaluations. Overlapped has rounds of 4 steps, bfloat16
and no outer momentum, which costs quality when rounds are this short. Four hosts share the cores of
this machine: a batch of 4 takes the time that one of 8 takes where there are two. Prints a table
and, as its last line, one JSON object: {"ratio", "seeds": [{"target", "ddp", "overlapped"}]}.
"""

import argparse
import json
import math
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from runs import curve, seconds_to  # isort: skip

COMMON = ["--lab", "--workers", "4", "--rate", "100mbit", "--delay", "1ms", "--batch", "4"]
COMMON += ["--lr", "1e-3", "--final-lr", "1.0"]
FULL = ["--model", "gpt-3m", "--eval-every", "10", "--eval-windows", "128"]
OVERLAPPED = ["--every", "4", "--codec", "bf16", "--outer-momentum", "0"]
QUICK = ["--model", "gpt-0.3m", "--eval-every", "5", "--eval-windows", "64"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, default=1)
    given = parser.parse_args()
    quick = given.quick
    rows = [compare(seed, quick) for seed in range(given.seeds)]
    print(f"{'seed':6}{'target loss':>12}{'ddp':>12}{'overlapped':>12}{'sooner':>9}")
    ratios = [row["ddp"] / row["overlapped"] for row in rows]
    for seed, (row, ratio) in enumerate(zip(rows, ratios, strict=True)):
        print(
            f"{seed:<6}{row['target']:12.3f}{row['ddp']:10.1f} s{row['overlapped']:10.1f} s"
            f"{ratio:8.2f}x"
        )
    # JSON has no infinity: what was never reached is null
    reached = [{k: v if math.isfinite(v) else None for k, v in row.items()} for row in rows]
    ratio = round(statistics.median(ratios), 3)
    print(json.dumps({"ratio": ratio, "seeds": reached, "quick": quick}))


def compare(seed: int, quick: bool) -> dict[str, float]:
    size = QUICK if quick else FULL
    steps = 40 if quick else 100
    own = [*COMMON, *size, "--seed", str(seed)]
    ddp = curve(["--method", "ddp", *own, "--steps", str(steps)])
    # Local updates need more tokens for the same loss: allow for them, and stop looking then.
    ours = curve(["--method", "overlapped", *own, *OVERLAPPED, "--steps", str(2 * steps)])
    target = ddp[-1].loss
    return {
        "target": round(target, 4),
        "ddp": round(ddp[-1].seconds, 2),
        "overlapped": round(seconds_to(ours, target), 2),
    }


if __name__ == "__main__":
    main()

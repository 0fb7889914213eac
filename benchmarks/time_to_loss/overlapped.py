"""How much sooner an overlapped method reaches the loss that data parallelism reaches.

    python -m benchmarks.time_to_loss.overlapped             4 workers, 100 Mbit/s, 3.2M parameters
    python -m benchmarks.time_to_loss.overlapped --seeds 3   the same for three seeds
    python -m benchmarks.time_to_loss.overlapped --quick     0.3M parameters, 2 workers, few steps

Runs `thinwire train --lab` for ddp and for overlapped on four emulated hosts, seed by seed, with a
constant learning rate after the warm-up, so that the loss at a moment does not depend on the length
of the run. The target is the validation loss of ddp at its end, with the batch that overlapped has;
ddp is also run with larger batches, which spend less of their time on the network, and the soonest
of them counts. The time is that spent training (evaluation left out), interpolated between
evaluations. Overlapped has rounds of 2 steps, int8 and no outer momentum, which costs quality
when rounds are this short. Prints a table and, as its last line, one JSON object:
{"ratio", "ratio_at_equal_batch", "seeds": [{"target", "overlapped", "ddp": {batch: seconds}}]}.
"""

import statistics
from typing import Any

from benchmarks.harness.arguments import Size, Table, end, parser
from benchmarks.harness.curves import Point, seconds_to, trained

LAB = ["--lab", "--rate", "100mbit", "--delay", "1ms"]
RATES = ["--lr", "1e-3", "--final-lr", "1.0"]
SIZES = {
    Size.FULL: [*LAB, "--workers", "4", "--model", "gpt-3m", "--eval-every", "10"],
    Size.QUICK: [*LAB, "--workers", "2", "--model", "gpt-0.3m", "--eval-every", "5"],
    Size.TINY: ["--model", "gpt-0.3m", "--eval-every", "2", "--context", "16"],
}
WINDOWS = {Size.FULL: 128, Size.QUICK: 64, Size.TINY: 4}
OVERLAPPED = ["--every", "2", "--codec", "int8", "--outer-momentum", "0"]
BATCH = 2
DDP_STEPS = {
    Size.FULL: {BATCH: 100, 4: 80, 8: 60},
    Size.QUICK: {BATCH: 30, 8: 20},
    Size.TINY: {BATCH: 4},
}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--seeds", type=int, default=1)
    given = arguments.parse_args()
    rows = [compare(seed, given.size) for seed in range(given.seeds)]
    batches = DDP_STEPS[given.size]
    columns = [f"ddp, batch {batch}" for batch in batches]
    table = Table("seed", "target", "overlapped", *columns, first=6, width=14)
    for seed, row in enumerate(rows):
        seconds = (f"{row['ddp'][batch]:.1f} s" for batch in batches)
        table.row(f"{seed}", f"{row['target']:.3f}", f"{row['overlapped']:.1f} s", *seconds)
    ratio = statistics.median(min(row["ddp"].values()) / row["overlapped"] for row in rows)
    equal = statistics.median(row["ddp"][BATCH] / row["overlapped"] for row in rows)
    print(f"overlapped is there {ratio:.2f}x sooner; at an equal batch {equal:.2f}x")
    figures = {"ratio": round(ratio, 3), "ratio_at_equal_batch": round(equal, 3), "seeds": rows}
    end(figures, given.size)


def compare(seed: int, size: Size) -> dict[str, Any]:
    ddp_steps = DDP_STEPS[size]
    flags = [*RATES, *SIZES[size], "--eval-windows", str(WINDOWS[size]), "--seed", str(seed)]

    def run(method: str, batch: int, steps: int, *more: str) -> list[Point]:
        own = ["--method", method, "--batch", str(batch), "--steps", str(steps), *more]
        return trained([*flags, *own], forks=size.of(full=0, quick=0, tiny=2))

    dense = {batch: run("ddp", batch, steps) for batch, steps in ddp_steps.items()}
    target = dense[BATCH][-1].loss
    # Local updates need more tokens for the same loss: allow for them, and stop looking then.
    ours = run("overlapped", BATCH, int(2.5 * ddp_steps[BATCH]), *OVERLAPPED)
    return {
        "target": round(target, 4),
        "overlapped": round(seconds_to(ours, target), 2),
        "ddp": {batch: round(seconds_to(points, target), 2) for batch, points in dense.items()},
    }


if __name__ == "__main__":
    main()

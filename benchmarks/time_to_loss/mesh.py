"""AsyncMesh with 2 stages x 2 replicas against the synchronous mesh of the same shape.

    python benchmarks/mesh.py               quality (3 seeds) and time to a loss at 100 Mbit/s
    python benchmarks/mesh.py --quality     only loss at equal updates: nothing is timed
    python benchmarks/mesh.py --time        only the time to a loss, in the lab
    python benchmarks/mesh.py --quick       both, shortened to a minute

Both sides are `thinwire train` with the same model, data, look-ahead optimizer and learning rate:
`asyncmesh` against `--schedule flush --method average`, whose stages wait for each other at every
update and whose replicas average every gradient. Quality is the validation loss of the mean of the
replicas after equal updates of equal batches. For the time the synchronous side takes 4 micro-
batches per update, which is what keeps its stages busy; the target is its loss at its end. Prints
tables and, as its last line, one JSON object: {"quality": {...}, "time": {...}}.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from runs import curve, seconds_to  # isort: skip

MESH = ["--stages", "2", "--replicas", "2"]
ASYNC = [*MESH, "--method", "asyncmesh"]
SYNC = [*MESH, "--method", "average", "--schedule", "flush", "--optimizer", "LookAhead"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--quality", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", default="3e-4", help="of the quality: the published one")
    parser.add_argument("--delay", default="10", help="of the averages, in steps, in the quality")
    given = parser.parse_args()
    both = given.quality == given.time
    found: dict[str, object] = {}
    if both or given.quality:
        found["quality"] = quality(
            1 if given.quick else given.seeds, given.lr, given.delay, given.quick
        )
    if both or given.time:
        found["time"] = time_to_loss(given.quick)
    print(json.dumps(found | {"quick": given.quick}))


def quality(seeds: int, lr: str, delay: str, quick: bool) -> dict[str, object]:
    flags = ["--model", "gpt-0.3m", "--batch", "4", "--context", "64", "--lr", lr]
    flags += ["--steps", "40" if quick else "480", "--eval-every", "0", "--eval-windows", "400"]
    rows = []
    for seed in range(seeds):
        own = ["--seed", str(seed)]
        row = {"async": curve([*ASYNC, "--averaging-delay", delay, *flags, *own])[-1].loss}
        row["sync"] = curve([*SYNC, *flags, *own])[-1].loss
        rows.append(row)
        print(f"seed {seed}: asyncmesh {row['async']:.4f}, synchronous {row['sync']:.4f}")
    means = {name: statistics.fmean(row[name] for row in rows) for name in ("async", "sync")}
    ratio = means["async"] / means["sync"]
    print(f"asyncmesh over synchronous at equal updates: {ratio:.4f}")
    return {"lr": float(lr), "delay": int(delay), "ratio": round(ratio, 4), "seeds": rows}


def time_to_loss(quick: bool) -> dict[str, float]:
    steps = 10 if quick else 60
    flags = ["--lab", "--rate", "100mbit", "--delay", "10ms", "--lr", "1e-3", "--final-lr", "1"]
    flags += ["--batch", "4", "--eval-windows", "128"]
    flags += ["--model", "gpt-0.3m" if quick else "gpt-3m"]
    sync = curve([*SYNC, *flags, "--accumulate", "4", "--steps", str(steps), "--eval-every", "10"])
    longer = [*ASYNC, *flags, "--steps", str(8 * steps), "--eval-every", str(40 if quick else 20)]
    ours = curve([*longer, "--lead", "1"])
    target = sync[-1].loss
    answer = {
        "target": round(target, 4),
        "sync": round(sync[-1].seconds, 2),
        "async": round(seconds_to(ours, target), 2),
    }
    answer["ratio"] = round(answer["sync"] / answer["async"], 3)
    print(
        f"loss {target:.3f}: synchronous {answer['sync']:.1f} s, asyncmesh {answer['async']:.1f} s"
    )
    return answer


if __name__ == "__main__":
    main()

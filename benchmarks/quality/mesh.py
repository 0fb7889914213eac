"""What AsyncMesh (2 stages x 2 replicas) costs in loss at equal updates, beside one that waits.

    python -m benchmarks.quality.mesh              480 updates, 3 seeds
    python -m benchmarks.quality.mesh --delay 3    averages 3 steps late instead of 10
    python -m benchmarks.quality.mesh --quick      40 updates, 1 seed
    python -m benchmarks.quality.mesh --results FILE    keep each run, skip those kept

Both sides are `thinwire train` with the same model, data, look-ahead optimizer and learning rate:
`asyncmesh` against `--schedule flush --method average`, whose stages wait for each other at every
update and whose replicas average every gradient. The figure is the validation loss of the mean of
the replicas after equal updates of equal batches; nothing is timed (time_to_loss/mesh.py does).
Prints a table and, as its last line, one JSON object: {"lr", "delay", "ratio", "seeds": [{"async",
"sync"}]}.
"""

import statistics
from pathlib import Path

from benchmarks.harness.arguments import Size, Table, end, parser
from benchmarks.harness.curves import trained
from benchmarks.harness.results import Job, Record, Results, run_here
from benchmarks.time_to_loss.mesh import ASYNC, MESH, SYNC


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--lr", default="3e-4", help="the published one, if not given")
    arguments.add_argument("--delay", default="10", help="of the averages, in steps")
    arguments.add_argument("--results", type=Path, help="a file of JSON lines")
    given = arguments.parse_args()
    steps, seeds = given.size.of(full=(480, given.seeds), quick=(40, 1), tiny=(2, 1))
    same = {"lr": given.lr, "steps": steps}
    sides: dict[str, Job] = {"async": {"delay": given.delay}, "sync": {}}
    jobs = [
        {"side": side, "seed": seed} | same | own
        for seed in range(seeds)
        for side, own in sides.items()
    ]
    records = run_here(jobs, Results(given.results), lambda job: train(job, given.size))
    losses = {
        side: [record["loss"] for record in records if record["side"] == side] for side in sides
    }
    table = Table("seed", "asyncmesh", "synchronous", first=6, width=14)
    pairs = list(zip(losses["async"], losses["sync"], strict=True))
    for seed, pair in enumerate(pairs):
        table.row(f"{seed}", *(f"{loss:.4f}" for loss in pair))
    ratio = statistics.fmean(losses["async"]) / statistics.fmean(losses["sync"])
    print(f"asyncmesh over synchronous at equal updates: {ratio:.4f}")
    rows = [dict(zip(sides, pair, strict=True)) for pair in pairs]
    figures = {"lr": float(given.lr), "delay": int(given.delay), "ratio": round(ratio, 4)}
    end({**figures, "seeds": rows}, given.size)


def train(job: Job, size: Size) -> Record:
    shape, forks = size.of(full=(MESH, 0), quick=(MESH, 0), tiny=(["--stages", "2"], 2))
    batch, context, windows = size.of(
        full=("4", "64", "400"), quick=("4", "64", "400"), tiny=("1", "16", "4")
    )
    flags = [*shape, "--model", "gpt-0.3m", "--batch", batch, "--context", context]
    flags += ["--steps", str(job["steps"]), "--eval-every", "0", "--eval-windows", windows]
    flags += ["--lr", job["lr"], "--seed", str(job["seed"])]
    side = [*ASYNC, "--averaging-delay", job["delay"]] if job["side"] == "async" else SYNC
    return {"loss": trained([*side, *flags], forks=forks)[-1].loss}


if __name__ == "__main__":
    main()

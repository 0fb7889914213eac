"""How much sooner AsyncMesh reaches the loss of the synchronous mesh: 2 stages x 2 replicas.

    python -m benchmarks.time_to_loss.mesh            3.2M parameters, 100 Mbit/s, 10 ms
    python -m benchmarks.time_to_loss.mesh --quick    0.3M parameters, few steps

Both sides are `thinwire train --lab` with the same model, data, look-ahead optimizer and learning
rate: `asyncmesh` against `--schedule flush --method average`, whose stages wait for each other at
every update and whose replicas average every gradient. The synchronous side takes 4 micro-batches
per update, which is what keeps its stages busy; the target is its loss at its end. What AsyncMesh
costs in loss at equal updates: quality/mesh.py. Prints one line and, as its last line, one JSON
object: {"target", "sync", "async", "ratio"}, in seconds.
"""

from benchmarks.harness.arguments import Size, end, parser
from benchmarks.harness.curves import seconds_to, trained

ASYNC = ["--method", "asyncmesh"]
SYNC = ["--method", "average", "--schedule", "flush", "--optimizer", "AsyncNAdam"]
MESH = ["--stages", "2", "--replicas", "2"]
LAB = [*MESH, "--lab", "--rate", "100mbit", "--delay", "10ms"]
SIZES = {
    Size.FULL: [*LAB, "--model", "gpt-3m", "--eval-windows", "128"],
    Size.QUICK: [*LAB, "--model", "gpt-0.3m", "--eval-windows", "128"],
    Size.TINY: ["--stages", "2", "--model", "gpt-0.3m", "--eval-windows", "4", "--context", "16"],
}


def main() -> None:
    size: Size = parser(__doc__).parse_args().size
    steps, evaluate_every = size.of(full=(60, 20), quick=(10, 40), tiny=(2, 8))
    flags = [*SIZES[size], "--batch", "4", "--lr", "1e-3", "--final-lr", "1"]
    all_at_once = ["--accumulate", "4", "--steps", str(steps), "--eval-every", "10"]
    forks = size.of(full=0, quick=0, tiny=2)
    sync = trained([*SYNC, *flags, *all_at_once], forks=forks)
    longer = ["--steps", str(8 * steps), "--eval-every", str(evaluate_every), "--lead", "1"]
    ours = trained([*ASYNC, *flags, *longer], forks=forks)
    target = sync[-1].loss
    found = {
        "target": round(target, 4),
        "sync": round(sync[-1].seconds, 2),
        "async": round(seconds_to(ours, target), 2),
    }
    found["ratio"] = round(found["sync"] / found["async"], 3)
    print(f"loss {target:.3f}: synchronous {found['sync']:.1f} s, asyncmesh {found['async']:.1f} s")
    end(found, size)


if __name__ == "__main__":
    main()

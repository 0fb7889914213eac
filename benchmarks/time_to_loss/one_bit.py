"""How much sooner 1-bit LAMB and 1-bit Adam reach the dense method's loss at 100 Mbit/s.

    python -m benchmarks.quality.one_bit --results FILE        the curves: loss by step, 3 seeds;
                                  with --runs also one-bit-adam:delayed_step=yes and the like
    python -m benchmarks.time_to_loss.one_bit --results FILE   the seconds of a step, and both
    python -m benchmarks.time_to_loss.one_bit --quick          2 workers, few steps, no curves

Loss and seconds are measured apart: all of these runs in the lab would take hours. The
seconds are those of real steps of the same model, batch and accumulation on four emulated hosts (on
this machine's cores), methods interleaved: dense LAMB and AdamW under PyTorch's DDP, in float32 and
with its 16-bit hook, and both stages of the one-bit methods. The time to a loss is the sum of the
seconds of the steps up to it, each step at the pace of its stage. The loss is 1 % above the dense
method's last one, for both. Prints a table and, as its last line, one JSON object:
{"ms_per_step": {method: ...}, "sooner": {one-bit method: {baseline: ratio by seeds}}}, where 0
stands for a seed that never came to the loss.
"""

import itertools
import statistics
from pathlib import Path

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.arguments import Size, end, parser
from benchmarks.harness.curves import first_below
from benchmarks.harness.hosts import on_hosts
from benchmarks.harness.interleaved import (
    Build,
    Figures,
    Shape,
    TimedMethod,
    method,
    time_methods,
)
from benchmarks.harness.learning import joined
from benchmarks.harness.results import Record, Results
from benchmarks.quality.one_bit import (
    ACCUMULATE,
    CONTEXT,
    MICRO,
    REPLICAS,
    STEPS,
    dense_of,
    method_of,
)
from thinwire.lab import Link
from thinwire.train.methods.onebit import LambSettings, build_lamb
from thinwire.train.methods.replica import Replica
from thinwire.train.tasks.models import GPT

RATE, DELAY = "100mbit", "1ms"
WITHIN = 1.01  # of the dense method's last loss
FROZEN = 2
LATE = ":delayed_step=yes"  # at the end of a run's name
BASELINES = {
    run: (f"{dense}, ddp", f"{dense}, ddp 16 bit")
    for name, dense in (("one-bit-lamb", "lamb"), ("one-bit-adam", "adamw"))
    for run in (name, name + LATE)
}


class DdpReplica(Replica):
    """PyTorch's DDP as it is, with one of its own hooks or none."""

    def __init__(self, model: GPT, optimizer: torch.optim.Optimizer, sixteen: bool) -> None:
        super().__init__(model, optimizer)
        self.ddp = DistributedDataParallel(model)
        if sixteen:
            self.ddp.register_comm_hook(None, fp16_compress_hook)
        self.module = self.ddp

    def accumulating(self, last: bool):  # type: ignore[no-untyped-def]
        return super().accumulating(last) if last else self.ddp.no_sync()


def dense(lamb: bool, sixteen: bool) -> Build:
    def build(model: GPT, inner: torch.optim.Optimizer) -> Replica:
        optimizer = build_lamb(inner, LambSettings()) if lamb else inner
        return DdpReplica(model, optimizer, sixteen)

    return build


def methods_of(timed: int) -> list[TimedMethod]:
    never = 10**6
    chosen = [TimedMethod("none", method("none"), 1, timed)]
    for run in BASELINES:
        name, late = method_of(run), run.endswith(LATE)
        if not late:
            dense_steps = method(name, freeze_at=never)
            chosen.append(TimedMethod(f"{name}, warm-up", dense_steps, 2, timed))
        build = method(name, freeze_at=FROZEN, delayed_step=late)
        chosen.append(TimedMethod(f"{run}, compressed", build, FROZEN + 2, timed))
    for lamb, sixteen in itertools.product((True, False), (False, True)):
        label = f"{'lamb' if lamb else 'adamw'}, ddp{' 16 bit' if sixteen else ''}"
        chosen.append(TimedMethod(label, dense(lamb, sixteen), 2, timed))
    return chosen


def worker(size: Size) -> Figures:
    """The steps of quality/one_bit.py."""
    size = Size(size)
    repetitions, timed = size.of(full=(4, 8), quick=(1, 2), tiny=(1, 1))
    micro, context = size.of(full=(MICRO, CONTEXT), quick=(MICRO, CONTEXT), tiny=(1, 16))
    shape = Shape("gpt-0.3m", micro, context, "masked", ACCUMULATE)
    with joined() as world:
        return time_methods(methods_of(timed), repetitions, shape, world)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--results", type=Path, help="what quality.one_bit --results has kept")
    given = arguments.parse_args()
    hosts = given.size.of(full=REPLICAS, quick=2, tiny=2)
    link = given.size.emulated(Link.of(RATE, delay=DELAY))
    figures = on_hosts(worker, given.size, hosts=hosts, link=link, check=True)[0]
    pace = {name: f["ms_per_step"] for name, f in figures.items()}
    print(f"{hosts} workers, gpt-0.3m, {MICRO} x {ACCUMULATE} windows of {CONTEXT}, {RATE}")
    for name, ms in pace.items():
        print(f"  {name:28}{ms:10.1f} ms/step")
    sooner = {}
    if given.results is not None:
        runs = Results(given.results).records
        sooner = {name: compare(name, runs, pace) for name in BASELINES}
        show(sooner)
    end({"ms_per_step": pace, "sooner": sooner}, given.size)


def compare(name: str, runs: list[Record], pace: dict[str, float]) -> dict[str, list[float]]:
    """For each baseline: its seconds to the loss over ours, seed by seed."""
    full = [run for run in runs if run["steps"] == STEPS]
    ours = {run["seed"]: run for run in full if run["run"] == name}
    lr = {run["lr"] for run in ours.values()}
    theirs = {run["seed"]: run for run in full if run["run"] == dense_of(name) and run["lr"] in lr}
    found: dict[str, list[float]] = {baseline: [] for baseline in BASELINES[name]}
    for seed in sorted(ours.keys() & theirs.keys()):
        target = WITHIN * theirs[seed]["loss"]
        mine = seconds(ours[seed], first_below(ours[seed]["curve"], target), name, pace)
        steps = first_below(theirs[seed]["curve"], target)
        for baseline, ratios in found.items():
            ratios.append(round(steps * pace[baseline] / 1000 / mine, 3))
    return found


def seconds(run: Record, steps: float, name: str, pace: dict[str, float]) -> float:
    frozen = min(steps, run["frozen_at"] or steps)
    dense_ms = pace[f"{method_of(name)}, warm-up"]
    one_bit_ms = pace[f"{name}, compressed"]
    return (frozen * dense_ms + (steps - frozen) * one_bit_ms) / 1000


def show(sooner: dict[str, dict[str, list[float]]]) -> None:
    print(
        f"\ntime to {100 * (WITHIN - 1):g} % above the dense method's last loss, dense over one-bit"
    )
    for name, baselines in sooner.items():
        for baseline, ratios in baselines.items():
            if ratios:
                each = ", ".join(f"{ratio:.2f}" if ratio else "never" for ratio in ratios)
                print(
                    f"  {name:22} {statistics.median(ratios):.2f}x against {baseline:20} ({each})"
                )


if __name__ == "__main__":
    main()

"""How much sooner 1-bit LAMB and 1-bit Adam reach the dense method's loss at 100 Mbit/s.

    python benchmarks/one_bit_learning.py --results FILE       the curves: loss by step, 3 seeds;
                                             with --runs also one-bit-adam:late=yes and the like
    python benchmarks/one_bit_time_to_loss.py --results FILE   the seconds of a step, and both
    python benchmarks/one_bit_time_to_loss.py --quick          few steps, and no curves

Loss and seconds are measured apart: all of these runs in the lab would take hours. The
seconds are those of real steps of the same model, batch and accumulation on four emulated hosts (on
this machine's cores), methods interleaved: dense LAMB and AdamW under PyTorch's DDP, in float32 and
with its 16-bit hook, and both stages of the one-bit methods. The time to a loss is the sum of the
seconds of the steps up to it, each step at the pace of its stage. The loss is 1 % above the dense
method's last one, for both. Prints a table and, as its last line, one JSON object:
{"ms_per_step": {contender: ...}, "sooner": {one-bit method: {baseline: ratio by seeds}}}, where
0 stands for a seed that never came to the loss.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import sys
from pathlib import Path

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent))
import one_bit_learning as learning  # isort: skip
from one_bit_learning import ACCUMULATE, CONTEXT, MICRO, REPLICAS, Run  # isort: skip
from side_by_side import Build, Contender, compete, in_lab, method  # isort: skip

import thinwire as tw
from thinwire.lab import Link
from thinwire.train.corpus import Corpus
from thinwire.train.data import Batches
from thinwire.train.models import GPT, ModelConfig, build_model
from thinwire.train.one_bit_methods import LambSettings, build_lamb
from thinwire.train.optimizers import OptimizerConfig, build_optimizer
from thinwire.train.replica import Replica
from thinwire.wire.world import World

RATE, DELAY = "100mbit", "1ms"
WITHIN = 1.01  # of the dense method's last loss
FROZEN = 2
LATE = ":late=yes"  # at the end of a run's name
BASELINES = {
    run: (f"{dense}, ddp", f"{dense}, ddp 16 bit")
    for name, dense in (("one-bit-lamb", "lamb"), ("one-bit-adam", "adamw"))
    for run in (name, name + LATE)
}


class Accumulated(Contender):
    """A contender that trains as one_bit_learning.py does."""

    def prepare(self, model: str, corpus: Corpus, batch: int, context: int, world: World) -> None:
        shape = ModelConfig(model=model, objective="masked")
        network = build_model(shape, corpus.vocab, context, seed=0)
        self.replica = self.build(network, build_optimizer(OptimizerConfig(), network))
        self.exposed = self._drained = 0.0
        share = (world.rank, world.size, 0)
        self._batches = Batches(corpus.train, context, batch, *share, mask_vocab=corpus.vocab)

    def _step(self) -> None:
        learning.train_step(self.replica, self._batches, self.clip)


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


def contenders(timed: int) -> list[Contender]:
    never = 10**6
    chosen: list[Contender] = [Accumulated("none", method("none"), 1, timed)]
    for run in BASELINES:
        name, late = learning.method_of(run), run.endswith(LATE)
        if not late:
            dense_steps = method(name, freeze_at=never)
            chosen.append(Accumulated(f"{name}, warm-up", dense_steps, 2, timed))
        build = method(name, freeze_at=FROZEN, late=late)
        chosen.append(Accumulated(f"{run}, compressed", build, FROZEN + 2, timed))
    for lamb, sixteen in itertools.product((True, False), (False, True)):
        label = f"{'lamb' if lamb else 'adamw'}, ddp{' 16 bit' if sixteen else ''}"
        chosen.append(Accumulated(label, dense(lamb, sixteen), 2, timed))
    return chosen


def worker(repetitions: int, timed: int) -> None:
    figures = compete(
        contenders(timed), repetitions, model="gpt-0.3m", batch=MICRO, context=CONTEXT
    )
    if os.environ["RANK"] == "0":
        print(json.dumps(figures), flush=True)
    tw.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--results", type=Path, help="what one_bit_learning.py --results has kept")
    given = parser.parse_args()
    pace = {name: f["ms_per_step"] for name, f in measure(given.quick).items()}
    print(f"{REPLICAS} workers, gpt-0.3m, {MICRO} x {ACCUMULATE} windows of {CONTEXT}, {RATE}")
    for name, ms in pace.items():
        print(f"  {name:28}{ms:10.1f} ms/step")
    sooner = {}
    if given.results is not None:
        runs = learning.kept(given.results)
        sooner = {name: compare(name, runs, pace) for name in BASELINES}
        show(sooner)
    print(json.dumps({"ms_per_step": pace, "sooner": sooner}))


def measure(quick: bool) -> dict[str, dict[str, float]]:
    turns = ["1", "2"] if quick else ["4", "8"]
    figures: dict[str, dict[str, float]]
    figures, _ = in_lab(__file__, turns, REPLICAS, Link.of(RATE, delay=DELAY))
    return figures


def compare(name: str, runs: list[Run], pace: dict[str, float]) -> dict[str, list[float]]:
    """For each baseline: its seconds to the loss over ours, seed by seed."""
    full = [run for run in runs if run["steps"] == learning.STEPS]
    ours = {run["seed"]: run for run in full if run["run"] == name}
    lr = {run["lr"] for run in ours.values()}
    theirs = {
        run["seed"]: run
        for run in full
        if run["run"] == learning.dense_of(name) and run["lr"] in lr
    }
    found: dict[str, list[float]] = {baseline: [] for baseline in BASELINES[name]}
    for seed in sorted(ours.keys() & theirs.keys()):
        target = WITHIN * theirs[seed]["loss"]
        mine = seconds(ours[seed], first_below(ours[seed]["curve"], target), name, pace)
        steps = first_below(theirs[seed]["curve"], target)
        for baseline, ratios in found.items():
            ratios.append(round(steps * pace[baseline] / 1000 / mine, 3))
    return found


def seconds(run: Run, steps: float, name: str, pace: dict[str, float]) -> float:
    frozen = min(steps, run["frozen_at"] or steps)
    dense_ms = pace[f"{learning.method_of(name)}, warm-up"]
    one_bit_ms = pace[f"{name}, compressed"]
    return (frozen * dense_ms + (steps - frozen) * one_bit_ms) / 1000


def first_below(curve: list[tuple[int, float]], target: float) -> float:
    """Steps, between two evaluations by a straight line; infinity if it is never reached."""
    for (s0, a), (s1, b) in itertools.pairwise(curve):
        if b <= target:
            return s0 + (s1 - s0) * (a - target) / (a - b) if a > target else s0
    return math.inf


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
    worker(int(sys.argv[1]), int(sys.argv[2])) if "RANK" in os.environ else main()

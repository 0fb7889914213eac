"""What one slow replica, or one slow link, costs the other replicas.

    python benchmarks/uneven.py             3 workers, 120 steps, each case under each method
    python benchmarks/uneven.py --quick     36 steps of the first case

Three emulated hosts in the lab, 100 Mbit/s, a GPT of 0.3M parameters. This machine has fewer cores
than hosts, so most of a step is sleep: PACE seconds, which stand for the compute of a larger model,
beside the real forward, backward and update, which are short. Cases:

    half     the last replica sleeps twice as long in every step
    stalls   every replica stalls now and then: one step in 20 takes the time of 6 more
    thin     the last host's link has a tenth of the rate of the others

Methods: ddp; sparse averaging (5 %, at most 10 steps in the air) that lands by steps and on
arrival. Times are those of the others, all but the last replica, until their last step is done: for
all steps, and for the first 2 * DELAY, in which a replica of half speed falls back by as much as is
allowed. `ahead` is the most steps any of them was ahead of the last replica. Prints a table and, as
its last line, one JSON object: {case: {method: {"others", "first", "last", "ahead", "lag",
"exposed", "val_loss"}}}.
"""

import argparse
import bisect
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from side_by_side import method  # isort: skip

import thinwire as tw
from thinwire.lab import Lab, Link
from thinwire.train.corpus import Corpus, load_corpus
from thinwire.train.data import Batches, DataConfig, validation_batches
from thinwire.train.models import ModelConfig, build_model
from thinwire.train.optimizers import OptimizerConfig, build_optimizer, learning_rate
from thinwire.train.replica import Replica

WORKERS, BATCH, CONTEXT, LR, DELAY = 3, 4, 64, 2e-3, 10
PACE = 0.15  # seconds
STALL, STALLED_STEPS = 1 / 20, 6
VALIDATION_WINDOWS = 400
LAST = WORKERS - 1
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {}),
    "sparse, by step": ("sparse-average", {"averaging_delay": DELAY}),
    "sparse, on arrival": ("sparse-average", {"averaging_delay": DELAY, "landing": "arrival"}),
}
CASES = ("half", "stalls", "thin")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--case", choices=CASES, help="this case only")
    given = parser.parse_args()
    steps = 36 if given.quick else 120
    cases = [given.case or "half"] if given.quick or given.case else CASES
    table = {case: {name: measure(case, name, steps) for name in METHODS} for case in cases}
    print(json.dumps(table))


def measure(case: str, name: str, steps: int) -> dict[str, float]:
    """One run in a lab of its own: no method inherits another's traffic."""
    slow = {LAST: Link.of("10mbit", delay="1ms")} if case == "thin" else {}
    lines: list[str] = []
    with Lab(WORKERS, Link.of("100mbit", delay="1ms"), overrides=slow) as lab:
        command = [sys.executable, str(Path(__file__).resolve()), case, name, str(steps)]
        outcome = lab.start(command, sink=lambda line: lines.append(line.text)).wait()
    if outcome.code:
        sys.exit("\n".join([*lines, str(outcome)]))
    answers = [json.loads(line) for line in lines if line.startswith("{")]
    figures = summed_up(sorted(answers, key=lambda a: a["rank"]))
    show(case, name, figures)
    return figures


def summed_up(answers: list[dict[str, Any]]) -> dict[str, float]:
    """Clocks can be compared: the hosts are one machine's."""
    begun = min(answer["begun"] for answer in answers)
    others, last = answers[:LAST], answers[LAST]
    ahead = max(
        done - bisect.bisect_right(last["clock"], at)
        for other in others
        for done, at in enumerate(other["clock"], start=1)
    )
    return {
        "others": round(max(other["clock"][-1] for other in others) - begun, 2),
        "first": round(max(other["clock"][2 * DELAY - 1] for other in others) - begun, 2),
        "last": round(last["clock"][-1] - begun, 2),
        "ahead": ahead,
        "lag": max(answer["lag"] for answer in answers),
        "exposed": round(max(other["exposed"] for other in others), 2),
        "val_loss": round(last["val_loss"], 4),
    }


def show(case: str, name: str, f: dict[str, float]) -> None:
    if not hasattr(show, "headed"):
        columns = ("others s", "first s", "last s", "ahead", "exposed s", "val loss")
        print(f"{'case':8}{'method':20}" + "".join(f"{c:>11}" for c in columns))
        show.headed = True  # type: ignore[attr-defined]
    print(
        f"{case:8}{name:20}{f['others']:11.1f}{f['first']:11.1f}{f['last']:11.1f}"
        f"{f['ahead']:11d}{f['exposed']:11.1f}{f['val_loss']:11.3f}",
        flush=True,
    )


def worker(case: str, name: str, steps: int) -> None:
    world = tw.init(timeout=120)
    torch.set_num_threads(1)
    corpus = load_corpus(DataConfig())
    model = build_model(ModelConfig(), corpus.vocab, CONTEXT, seed=0)
    settings = OptimizerConfig(lr=LR)
    kind, flags = METHODS[name]
    replica: Replica = method(kind, **flags)(model, build_optimizer(settings, model))
    replica.expect(steps)
    batches = Batches(corpus.train, CONTEXT, BATCH, world.rank, world.size, seed=0)
    control = tw.Wire(name="control")
    draw = random.Random(world.rank)
    replica.module(*batches.next()).backward()  # what happens only once, before the clock starts
    replica.optimizer.zero_grad(set_to_none=True)
    control.barrier()
    begun, clock = time.perf_counter(), []
    for step in range(steps):
        for group in replica.optimizer.param_groups:
            group["lr"] = learning_rate(settings, step, steps)
        x, y = batches.next()
        time.sleep(pace(case, world.rank, draw))
        with replica.accumulating(last=True):
            replica.module(x, y).backward()
        replica.step(settings.clip)
        replica.optimizer.zero_grad(set_to_none=True)
        clock.append(time.perf_counter())
    exposed = replica.account.exposed
    replica.finish()
    answer = {"rank": world.rank, "begun": begun, "clock": clock, "lag": replica.account.lag}
    loss = validate(model, corpus, control)
    print(json.dumps({**answer, "exposed": exposed, "val_loss": loss}), flush=True)


def pace(case: str, rank: int, draw: random.Random) -> float:
    """Seconds of a step's sleep."""
    if case == "half":
        return PACE * (2 if rank == LAST else 1)
    stalled = case == "stalls" and draw.random() < STALL
    return PACE * (1 + STALLED_STEPS * stalled)


@torch.no_grad()
def validate(model: torch.nn.Module, corpus: Corpus, control: tw.Wire) -> float:
    total = count = 0.0
    for x, y in validation_batches(
        corpus.validation, CONTEXT, 16, control.rank, control.size, VALIDATION_WINDOWS
    ):
        total, count = total + float(model(x, y)) * y.numel(), count + y.numel()
    total, count = control.agree([total, count], "sum")
    return total / count


if __name__ == "__main__":
    worker(sys.argv[1], sys.argv[2], int(sys.argv[3])) if "RANK" in os.environ else main()

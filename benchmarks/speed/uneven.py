"""What one slow replica, or one slow link, costs the other replicas.

    python -m benchmarks.speed.uneven                3 workers, 120 steps, all cases and methods
    python -m benchmarks.speed.uneven --case thin    this case only
    python -m benchmarks.speed.uneven --quick        24 steps of the first case or the one given

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
its last line, one JSON object: {"cases": {case: {method: {"others", "first", "last", "ahead",
"lag", "exposed", "val_loss"}}}}.
"""

import bisect
import random
import time
from typing import Any

from benchmarks.harness.arguments import Size, Table, end, parser
from benchmarks.harness.hosts import on_hosts
from benchmarks.harness.interleaved import method
from benchmarks.harness.learning import joined, set_learning_rate, take_step, validate
from thinwire.lab import Link
from thinwire.train.data.corpus import load_corpus
from thinwire.train.data.tokens import Batches, DataConfig
from thinwire.train.loop.optimizers import OptimizerConfig, build_optimizer
from thinwire.train.tasks.models import ModelConfig, build_model
from thinwire.wire.wire import Wire

WORKERS, LR, DELAY = 3, 2e-3, 10
PACE = 0.15  # seconds
STALL, STALLED_STEPS = 1 / 20, 6
LAST = WORKERS - 1
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {}),
    "sparse, by step": ("sparse-average", {"averaging_delay": DELAY}),
    "sparse, on arrival": ("sparse-average", {"averaging_delay": DELAY, "landing": "arrival"}),
}
CASES = ("half", "stalls", "thin")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--case", choices=CASES, help="this case only")
    given = arguments.parse_args()
    every_case = given.size is Size.FULL and not given.case
    names = given.size.of(full=list(METHODS), quick=list(METHODS), tiny=["sparse, on arrival"])
    columns = ("others s", "first s", "last s", "ahead", "exposed s", "val loss")
    table = Table("case, method", *columns, width=11)
    found: dict[str, dict[str, Any]] = {}
    for case in CASES if every_case else [given.case or "half"]:
        found[case] = {}
        for name in names:
            found[case][name] = f = measure(case, name, given.size)
            times = (f"{f[key]:.1f}" for key in ("others", "first", "last"))
            rest = f"{f['ahead']}", f"{f['exposed']:.1f}", f"{f['val_loss']:.3f}"
            table.row(f"{case}, {name}", *times, *rest)
    end({"cases": found}, given.size)


def measure(case: str, name: str, size: Size) -> dict[str, float]:
    """One run in a lab of its own: no method inherits another's traffic."""
    slow = {LAST: Link.of("10mbit", delay="1ms")} if case == "thin" else {}
    link = size.emulated(Link.of("100mbit", delay="1ms"))
    return summed_up(on_hosts(worker, case, name, size, hosts=WORKERS, link=link, overrides=slow))


def summed_up(answers: list[dict[str, Any]]) -> dict[str, float]:
    """Clocks can be compared: the hosts are one machine's."""
    begun = min(answer["begun"] for answer in answers)
    others, last = answers[:LAST], answers[LAST]
    ahead = max(
        done - bisect.bisect_right(last["clock"], at)
        for other in others
        for done, at in enumerate(other["clock"], start=1)
    )
    first = min(2 * DELAY, len(last["clock"])) - 1
    return {
        "others": round(max(other["clock"][-1] for other in others) - begun, 2),
        "first": round(max(other["clock"][first] for other in others) - begun, 2),
        "last": round(last["clock"][-1] - begun, 2),
        "ahead": ahead,
        "lag": max(answer["lag"] for answer in answers),
        "exposed": round(max(other["exposed"] for other in others), 2),
        "val_loss": round(last["val_loss"], 4),
    }


def worker(case: str, name: str, size: Size) -> dict[str, Any]:
    size = Size(size)
    steps, scale = size.of(full=(120, 1.0), quick=(24, 1.0), tiny=(4, 0.1))
    batch, context, windows = size.of(full=(4, 64, 400), quick=(4, 64, 400), tiny=(1, 16, 6))
    with joined() as world:
        corpus = load_corpus(DataConfig())
        model = build_model(ModelConfig(), corpus.vocab, context, seed=0)
        settings = OptimizerConfig(lr=LR)
        kind, flags = METHODS[name]
        replica = method(kind, **flags)(model, build_optimizer(settings, model))
        replica.expect(steps)
        batches = Batches(corpus.train, context, batch, world.rank, world.size, seed=0)
        control = Wire(name="control")
        draw = random.Random(world.rank)
        replica.module(*batches.next()).backward()  # what happens only once, before the clock
        replica.optimizer.zero_grad(set_to_none=True)
        control.barrier()
        begun, clock = time.perf_counter(), []
        for step in range(steps):
            set_learning_rate(replica.optimizer, settings, step, steps)
            time.sleep(scale * pace(case, world.rank, draw))
            take_step(replica, batches, settings.clip)
            clock.append(time.perf_counter())
        exposed = replica.account.exposed
        replica.finish()
        loss = validate(model, corpus, control, context=context, windows=windows)
        answer = {"begun": begun, "clock": clock, "lag": replica.account.lag}
        return {**answer, "exposed": exposed, "val_loss": loss}


def pace(case: str, rank: int, draw: random.Random) -> float:
    """Seconds of a step's sleep."""
    if case == "half":
        return PACE * (2 if rank == LAST else 1)
    stalled = case == "stalls" and draw.random() < STALL
    return PACE * (1 + STALLED_STEPS * stalled)


if __name__ == "__main__":
    main()

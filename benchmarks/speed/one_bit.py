"""How much of the compute's speed the one-bit methods keep once the variance is frozen.

    python -m benchmarks.speed.one_bit                2 workers, then 4; 3.2M parameters, 100 Mbit/s
    python -m benchmarks.speed.one_bit --workers 2    these only: nine minutes on a quiet machine
    python -m benchmarks.speed.one_bit --only delayed methods with this in their name, and `none`
    python -m benchmarks.speed.one_bit --delay 10ms   of the links; 1 ms unless told
    python -m benchmarks.speed.one_bit --quick        1M parameters, 2 workers, fewer methods

Emulated hosts in the lab, real sockets, methods interleaved in one run (harness/interleaved.py).
Efficiency is tokens/s over the same loop with no communication and as many workers; `none, in step`
is that loop with a barrier before every update, which sends no data: what a method that meets at
every step can keep at best where one worker is now and then late. The one-bit methods have left
their dense warm-up behind before anything is timed. `clip 0` does not clip, so their buckets travel
during the backward pass; with `clip 1` they wait for its end. `delayed` takes a step with the
momentum of the step before, and waits for neither bits nor norm. `powersgd` is PyTorch's DDP with
its own PowerSGD hook, rank 1, in one bucket, since with more it aborts on gloo. Prints a table for
each number of workers and as its last line one JSON object: {"efficiency": {workers: {method:
{"ms_per_step", "efficiency", ...}}}, "target": {method: met}}.
"""

import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.arguments import Size, end, parser
from benchmarks.harness.hosts import on_hosts
from benchmarks.harness.interleaved import (
    Figures,
    Shape,
    TimedMethod,
    method,
    show,
    time_methods,
)
from benchmarks.harness.learning import joined
from thinwire.lab import Link
from thinwire.train.methods.replica import Replica
from thinwire.train.tasks.models import GPT
from thinwire.wire.wire import Wire

RATE = "100mbit"
SHAPES = {
    Size.FULL: Shape("gpt-3m", batch=8, context=128),
    Size.QUICK: Shape("gpt-1m", batch=8, context=128),
    Size.TINY: Shape("gpt-0.3m", batch=1, context=16),
}
TARGET = 0.92
FROZEN = 2  # dense steps: v need not be good, only frozen
ONE_BUCKET = 1000  # MB


def powersgd(model: GPT, inner: torch.optim.Optimizer) -> Replica:
    ddp = DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET)
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook)
    replica = Replica(model, inner)
    replica.module = ddp
    return replica


def in_step(model: GPT, inner: torch.optim.Optimizer) -> Replica:
    wire = Wire(name="in step")
    inner.register_step_pre_hook(lambda *_: wire.barrier())
    return Replica(model, inner)


def frozen(name: str, clip: float, timed: int, delayed: bool = False) -> TimedMethod:
    label = f"{name}, {'delayed, ' if delayed else ''}clip {clip:.0f}"
    build = method(name, freeze_at=FROZEN, delayed_step=delayed)
    return TimedMethod(label, build, FROZEN + 2, timed, clip=clip)


def methods_of(size: Size) -> list[TimedMethod]:
    timed = size.of(full=8, quick=4, tiny=1)
    none = TimedMethod("none", method("none"), 1, timed)
    barrier = TimedMethod("none, in step", in_step, 2, timed)
    ddp = TimedMethod("ddp", method("ddp"), 1, max(1, timed // 2))
    sketch = TimedMethod("powersgd", powersgd, 3, timed)
    adam = frozen("one-bit-adam", 0.0, timed)
    late = frozen("one-bit-adam", 0.0, timed, delayed=True)
    if size is not Size.FULL:
        return [none, barrier, adam, late, ddp, sketch]
    others = (("one-bit-lamb", 0.0), ("one-bit-adam", 1.0), ("one-bit-lamb", 1.0))
    more = [frozen(*other, timed) for other in others]
    later = [frozen(*other, timed, delayed=True) for other in others]
    always = method("zero-one-adam", freeze_at=FROZEN, longest=1)
    often = method("zero-one-adam", freeze_at=FROZEN, local_double_after=1, longest=4)
    local = [
        TimedMethod("zero-one-adam, every 4", often, 8, timed, 4, clip=0.0),
        TimedMethod("zero-one-adam, every step", always, FROZEN + 2, timed, clip=0.0),
    ]
    return [none, barrier, adam, *more, late, *later, *local, ddp, sketch]


def worker(only: str, size: Size) -> Figures:
    size = Size(size)
    methods = [m for m in methods_of(size) if m.name == "none" or only in m.name]
    with joined() as world:
        return time_methods(methods, size.of(full=4, quick=1, tiny=1), SHAPES[size], world)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--workers", type=int, help="this number only")
    arguments.add_argument("--only", default="", help="methods with this in their name")
    arguments.add_argument("--delay", default="1ms")
    given = arguments.parse_args()
    efficiency: dict[str, Figures] = {}
    both = given.size is Size.FULL and given.workers is None
    for workers in [2, 4] if both else [given.workers or 2]:
        link = given.size.emulated(Link.of(RATE, delay=given.delay))
        answers = on_hosts(worker, given.only, given.size, hosts=workers, link=link, check=True)
        efficiency[str(workers)] = answers[0]
        print(f"\n{workers} workers, {SHAPES[given.size].model}, {RATE}, {given.delay}")
        show(answers[0])
    end({"efficiency": efficiency, "target": met(efficiency)}, given.size)


def met(efficiency: dict[str, Figures]) -> dict[str, bool]:
    """Whether each one-bit method keeps its share of the speed with two workers."""
    return {
        name: f["efficiency"] >= TARGET
        for name, f in efficiency.get("2", {}).items()
        if name.startswith(("one-bit", "zero-one"))
    }


if __name__ == "__main__":
    main()

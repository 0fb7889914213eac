"""How much of the compute's speed sparse averaging keeps on a slow link.

    python -m benchmarks.speed.sparse             2 workers, 3.2M parameters, 100 Mbit/s
    python -m benchmarks.speed.sparse --quick     1M parameters, one repetition of few steps

Two emulated hosts in the lab, real sockets, methods interleaved (harness/interleaved.py).
Efficiency is tokens/s over the same loop with no communication. `all weights` averages everything
at every step and waits for it; `ddp` averages gradients, as PyTorch does. Prints a table and, as
its last line, one JSON object: {"rate", "figures": {method: {"ms_per_step", "efficiency",
"exposed_ms_per_step", "mb_per_step"}}}.
"""

from benchmarks.harness.arguments import Size, Table, end, parser
from benchmarks.harness.hosts import on_hosts
from benchmarks.harness.interleaved import Figures, Shape, TimedMethod, method, time_methods
from benchmarks.harness.learning import joined
from thinwire.lab import Link

SHAPES = {
    Size.FULL: Shape("gpt-3m", batch=8, context=128),
    Size.QUICK: Shape("gpt-1m", batch=8, context=128),
    Size.TINY: Shape("gpt-0.3m", batch=1, context=16),
}


def methods_of(timed: int, delay: int) -> list[TimedMethod]:
    """The untimed steps of a turn bring as many rounds into the air as there are in a long run."""
    late = {"averaging_delay": delay}
    every = {"fraction": 1.0, "averaging_delay": 0}
    few = max(1, timed // 4)
    bf16 = method("sparse-average", codec="bf16", **late)
    return [
        TimedMethod("none", method("none"), 2, timed),
        TimedMethod("sparse, fp32", method("sparse-average", **late), delay + 2, timed),
        TimedMethod("sparse, bf16", bf16, delay + 2, timed),
        TimedMethod("sparse, blocking", method("sparse-average", averaging_delay=0), 2, timed),
        TimedMethod("all weights", method("sparse-average", **every), 1, few),
        TimedMethod("ddp", method("ddp"), 1, few),
    ]


def worker(delay: int, size: Size) -> Figures:
    size = Size(size)
    repetitions, timed = size.of(full=(4, 16), quick=(1, 8), tiny=(1, 1))
    methods = methods_of(timed, delay)
    with joined() as world:
        figures = time_methods(methods, repetitions, SHAPES[size], world)
        for each in methods:
            account = each.replica.account
            sent = account.bytes / max(1, account.steps)
            figures[each.name]["mb_per_step"] = round(sent / 1e6, 3)
        return figures


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rate", default="100mbit")
    given = arguments.parse_args()
    delay = given.size.of(full=10, quick=10, tiny=2)
    link = given.size.emulated(Link.of(given.rate, delay="1ms"))
    figures = on_hosts(worker, delay, given.size, hosts=2, link=link, check=True)[0]
    print(f"2 workers, {SHAPES[given.size].model}, {given.rate}, delay {delay} steps")
    table = Table("  method", "ms/step", "efficiency", "exposed ms", "MB/step", first=20)
    for name, f in figures.items():
        paces = f"{f['ms_per_step']:.1f}", f"{f['efficiency']:.3f}"
        table.row(f"  {name}", *paces, f"{f['exposed_ms_per_step']:.1f}", f"{f['mb_per_step']:.3f}")
    end({"rate": given.rate, "figures": figures}, given.size)


if __name__ == "__main__":
    main()

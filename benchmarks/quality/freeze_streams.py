"""When the automatic freeze of the one-bit methods comes, on streams of made-up gradients.

    python -m benchmarks.quality.freeze_streams            up to 500,000 steps
    python -m benchmarks.quality.freeze_streams --quick    the two shortest streams

The squared norm of a gradient falls as a power of the step or by halves until a known step and is
level from there, with noise that has a memory and now and then a batch a hundred times as large.
The answer wanted is that step, or the floor of the rule where it comes earlier; `never`: it was not
reached. What the freeze costs in loss: freeze_training.py. Prints a table; the last line is one
JSON object: {"streams": {name: {"level", "frozen": [step by seed]}}}.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.harness.arguments import Size, Table, end, parser
from thinwire.methods.onebit.freeze import FreezeRule


@dataclass(frozen=True)
class Stream:
    """E ||g||² = fall(t) until step `level`, and constant after it."""

    level: int
    steps: int
    fall: Callable[[int], float]
    warmup: int = 1
    noise: float = 0.3
    memory: float = 0.0
    beta2: float = 0.999

    def frozen(self, seed: int) -> int | None:
        rule, generator, drift = FreezeRule(self.beta2), random.Random(seed), 0.0
        for step in range(1, self.steps + 1):
            fresh = math.sqrt(1 - self.memory**2) * generator.gauss(0, self.noise)
            drift = self.memory * drift + fresh
            square = self.fall(min(step, self.level)) * math.exp(drift)
            square *= 100.0 if generator.random() < 0.002 else 1.0
            if rule.observe(square, min(1.0, step / self.warmup)):
                return step
        return None


def power(exponent: float) -> Callable[[int], float]:
    return lambda step: step**-exponent


def halving(every: float) -> Callable[[int], float]:
    return lambda step: 0.5 ** (step / every)


STREAMS = {
    "level from the start, 500 steps": Stream(1, 500, power(0)),
    "the same, with a memory": Stream(1, 500, power(0), noise=0.5, memory=0.9),
    "1/t to step 200 of 2,000": Stream(200, 2_000, power(1), warmup=50),
    "1/t to step 1,000 of 20,000": Stream(1_000, 20_000, power(1), warmup=200),
    "1/t to step 5,000 of 100,000": Stream(5_000, 100_000, power(1), warmup=2_000),
    "1/sqrt(t) to step 5,000 of 100,000": Stream(5_000, 100_000, power(0.5), warmup=2_000),
    "halves to step 20,000 of 500,000": Stream(20_000, 500_000, halving(3_000), warmup=5_000),
    "halves to step 100,000 of 500,000": Stream(100_000, 500_000, halving(15_000), warmup=10_000),
    "the same, with long memory": Stream(
        100_000, 500_000, halving(15_000), warmup=10_000, noise=0.5, memory=0.9
    ),
    "halves to 100,000, b2 = .99": Stream(
        100_000, 500_000, halving(2_000), warmup=10_000, beta2=0.99
    ),
    "never level, halves every 200,000": Stream(500_000, 500_000, halving(200_000), warmup=10_000),
}


def main() -> None:
    size = parser(__doc__).parse_args().size
    chosen = list(STREAMS.items())[: None if size is Size.FULL else 2]
    seeds = size.of(full=3, quick=3, tiny=1)
    table, found = Table("stream", "level at", "frozen at, by seed", first=42, width=34), {}
    for name, stream in chosen:
        steps = [stream.frozen(seed) for seed in range(seeds)]
        found[name] = {"level": stream.level, "frozen": steps}
        shown = ("never" if step is None else f"{step:,}" for step in steps)
        table.row(name, f"{stream.level:,}", ", ".join(shown))
    end({"streams": found}, size)


if __name__ == "__main__":
    main()

"""Methods timed in turns in one run, which is the only way to compare them on a noisy machine.

Every rank holds all methods at once, each with its own copy of the model. In a repetition each
method has its turn between two turns of `none`, the same loop with no communication: some steps
that are not timed, to reach the steady state (with a flight in the air, where the method has any),
then the timed ones, then a pause until its traffic has ended.

The machine drifts by tens of percent in minutes: a step counts in units of the median step of
`none` before and after its turn. Neighbours on the machine slow single steps at random, while what
a method costs comes back at the same place of every round: a round is the sum, over its places, of
the median step at that place, over all rounds and repetitions. A method's efficiency is its
tokens/s, of all ranks together, over those of `none`. Its error is the standard deviation of what
comes out when repetitions are drawn again at random (the bootstrap).
"""

import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch

from benchmarks.harness.arguments import Table
from benchmarks.harness.learning import take_step
from thinwire.methods.base import WireOptimizer
from thinwire.methods.local.rounds import LocalRounds
from thinwire.methods.onebit.one_bit_adam import OneBitAdam
from thinwire.methods.onebit.one_bit_lamb import OneBitLamb
from thinwire.methods.sparse.sparse_average import SparseAverage
from thinwire.train.data.corpus import Corpus, load_corpus
from thinwire.train.data.tokens import Batches, DataConfig
from thinwire.train.loop.optimizers import OptimizerConfig, build_optimizer
from thinwire.train.methods.registry import find_method
from thinwire.train.methods.replica import Replica
from thinwire.train.tasks.models import GPT, ModelConfig, build_model
from thinwire.wire import Flight, World
from thinwire.wire.wire import Wire

Build = Callable[[GPT, torch.optim.Optimizer], Replica]
Figures = dict[str, dict[str, float]]


def method(name: str, **settings: object) -> Build:
    """A method of the trainer, with some of its flags set."""
    entry = find_method(name)
    return lambda model, inner: entry.build(model, inner, entry.settings(**settings), None)


def interleave(
    turns: Sequence[Callable[[], object]],
    repetitions: int,
    between: Callable[[], object] = lambda: None,
) -> None:
    """Every turn once in a repetition, with `between` before each and after the last."""
    for _ in range(repetitions):
        for turn in turns:
            between()
            turn()
        between()


@dataclass(frozen=True)
class Shape:
    """What all methods of a run train."""

    model: str
    batch: int
    context: int
    objective: Literal["causal", "masked"] = "causal"
    accumulate: int = 1
    """Batches in a step."""


@dataclass
class TimedMethod:
    name: str
    build: Build
    untimed: int
    timed: int
    period: int = 1
    """Steps in a round: `timed` must be a multiple of it."""
    probe: int = 0
    """Steps after which every=auto has chosen its round; then a turn is one untimed round and two
    timed ones, whatever is said above."""
    clip: float = 1.0
    """Largest norm of a gradient; 0 does not clip."""
    seconds: list[list[float]] = field(default_factory=list)
    """Of the timed steps, a list for each repetition."""

    def prepare(self, shape: Shape, corpus: Corpus, world: World) -> None:
        config = ModelConfig(model=shape.model, objective=shape.objective)
        network = build_model(config, corpus.vocab, shape.context, seed=0)
        self.replica = self.build(network, build_optimizer(OptimizerConfig(), network))
        self.exposed = self._drained = 0.0
        self._accumulate = shape.accumulate
        self._batches = Batches(
            corpus.train,
            shape.context,
            shape.batch,
            world.rank,
            world.size,
            seed=0,
            mask_vocab=corpus.vocab if shape.objective == "masked" else None,
        )

    def turn(self, control: Wire) -> None:
        if self.probe and not self.seconds:
            self._find_round()
        for _ in range(self.untimed):
            self.step()
        control.barrier()
        clock = [time.perf_counter()]
        for _ in range(self.timed):
            self.step()
            clock.append(time.perf_counter())
        self.seconds.append([b - a for a, b in itertools.pairwise(clock)])
        self._drain()
        control.barrier()

    def step(self) -> None:
        take_step(self.replica, self._batches, self.clip, self._accumulate)

    def _find_round(self) -> None:
        for _ in range(self.probe):
            self.step()
        optimizer = self.replica.optimizer
        assert isinstance(optimizer, WireOptimizer)
        rounds = optimizer.engine
        assert isinstance(rounds, LocalRounds)
        assert rounds.every is not None
        self.untimed = self.period = rounds.every
        self.timed = 2 * rounds.every

    def _drain(self) -> None:
        self.exposed = self.replica.account.exposed - self._drained
        for flight in _in_air(self.replica.optimizer):
            flight.wait()
        self._drained = self.replica.account.exposed - self.exposed  # waits of these pauses


def _in_air(optimizer: torch.optim.Optimizer) -> list[Flight]:
    if isinstance(optimizer, WireOptimizer) and isinstance(optimizer.engine, LocalRounds):
        return [f.flight for f in optimizer.engine.fragments if f.flight is not None]
    if isinstance(optimizer, OneBitAdam | OneBitLamb):
        return [b.flight for b in optimizer.buckets if b.flight is not None]
    return optimizer.flights if isinstance(optimizer, SparseAverage) else []


def time_methods(
    methods: Sequence[TimedMethod], repetitions: int, shape: Shape, world: World
) -> Figures:
    """What each method keeps of the speed of the first one, which is `none`."""
    torch.manual_seed(0)
    corpus = load_corpus(DataConfig(context=shape.context))
    control = Wire(name="turns")
    for timed in methods:
        timed.prepare(shape, corpus, world)
    none, *others = methods
    assert none.name == "none"
    turns = [partial(timed.turn, control) for timed in others]
    interleave(turns, repetitions, between=partial(none.turn, control))
    pace = statistics.median(itertools.chain(*none.seconds))
    pace = control.agree([pace], "sum")[0] / world.size
    answer = {"none": _row(1.0, 0.0, pace, _exposed(none, control))}
    for place, timed in enumerate(others):
        before = [r * (len(others) + 1) + place for r in range(repetitions)]
        units = [statistics.median(none.seconds[i] + none.seconds[i + 1]) for i in before]
        steps = [[s / unit for s in turn] for unit, turn in zip(units, timed.seconds, strict=True)]
        total = control.agree(_efficiency(steps, timed.period), "sum")
        efficiency, error = (value / world.size for value in total)
        answer[timed.name] = _row(efficiency, error, pace / efficiency, _exposed(timed, control))
    return answer


def _row(efficiency: float, error: float, seconds: float, exposed: float) -> dict[str, float]:
    return {
        "ms_per_step": round(1000 * seconds, 1),
        "efficiency": round(efficiency, 4),
        "error": round(error, 4),
        "exposed_ms_per_step": round(exposed, 1),
    }


def show(figures: Figures) -> None:
    table = Table("  method", "ms/step", "efficiency", "exposed ms/step", width=18)
    for name, f in figures.items():
        share = f"{f['efficiency']:.3f} ±{f['error']:.3f}"
        waits = f"{f['exposed_ms_per_step']:.1f}"
        table.row(f"  {name}", f"{f['ms_per_step']:.1f}", share, waits)


def _efficiency(turns: list[list[float]], period: int) -> tuple[float, float]:
    """From the timed steps of every repetition, in units of `none`: the value and its error."""
    draw = random.Random(0)
    again = [_steps_of_none(draw.choices(turns, k=len(turns)), period) for _ in range(200)]
    return 1 / _steps_of_none(turns, period), statistics.pstdev(1 / steps for steps in again)


def _steps_of_none(turns: list[list[float]], period: int) -> float:
    """How many steps of `none` a step takes, by the medians of the places in a round."""
    places: list[list[float]] = [[] for _ in range(period)]
    for turn in turns:
        for index, taken in enumerate(turn):
            places[index % period].append(taken)
    return statistics.fmean(statistics.median(place) for place in places)


def _exposed(timed: TimedMethod, control: Wire) -> float:
    """Milliseconds a step waited for the network, by the method's own account."""
    account = timed.replica.account
    return 1000 * control.agree([timed.exposed / max(1, account.steps)])[0]

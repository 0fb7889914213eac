"""Methods timed side by side in one run, which is the only way to compare them on a noisy machine.

Every rank holds all contenders at once, each with its own copy of the model. In a repetition each
contender has its turn between two turns of `none`, the same loop with no communication: some steps
that are not timed, to reach the steady state (with a flight in the air, where the method has any),
then the timed ones, then a pause until its traffic has ended.

The machine drifts by tens of percent in minutes: a step counts in units of the median step of
`none` before and after its turn. Neighbours on the machine slow single steps at random, while what
a method costs comes back at the same place of every round: a round is the sum, over its places, of
the median step at that place, over all rounds and repetitions. A contender's efficiency is its
tokens/s, of all ranks together, over those of `none`. Its error is the standard deviation of what
comes out when repetitions are drawn again at random (the bootstrap).
"""

import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from thinwire.lab import Lab, Link
from thinwire.optim import LocalUpdates, OneBitAdam, OneBitLamb, SparseAverage
from thinwire.train.corpus import Corpus, load_corpus
from thinwire.train.data import Batches, DataConfig
from thinwire.train.methods import find_method
from thinwire.train.models import GPT, ModelConfig, build_model
from thinwire.train.optimizers import OptimizerConfig, build_optimizer
from thinwire.train.replica import Replica
from thinwire.wire import Flight, World, init
from thinwire.wire.wire import Wire

Build = Callable[[GPT, torch.optim.Optimizer], Replica]


def method(name: str, **settings: object) -> Build:
    """A method of the trainer, with some of its flags set."""
    entry = find_method(name)
    return lambda model, inner: entry.build(model, inner, entry.settings(**settings), None)


def in_lab(script: str, arguments: list[str], hosts: int, link: Link) -> tuple[Any, list[str]]:
    """Runs a benchmark's worker on emulated hosts: what it printed as JSON, and its other lines."""
    lines: list[str] = []
    with Lab(hosts, link) as lab:
        lab.check()
        command = [sys.executable, str(Path(script).resolve()), *arguments]
        outcome = lab.start(command, sink=lambda line: lines.append(line.text)).wait()
    if outcome.code:
        sys.exit("\n".join([*lines, str(outcome)]))
    answer = next(line for line in lines if line.startswith("{"))
    return json.loads(answer), [line for line in lines if line != answer]


@dataclass
class Contender:
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

    def prepare(self, model: str, corpus: Corpus, batch: int, context: int, world: World) -> None:
        network = build_model(ModelConfig(model=model), corpus.vocab, context, seed=0)
        self.replica = self.build(network, build_optimizer(OptimizerConfig(), network))
        self.exposed = self._drained = 0.0
        self._batches = Batches(corpus.train, context, batch, world.rank, world.size, seed=0)

    def turn(self, control: Wire) -> None:
        if self.probe and not self.seconds:
            self._find_round()
        for _ in range(self.untimed):
            self._step()
        control.barrier()
        clock = [time.perf_counter()]
        for _ in range(self.timed):
            self._step()
            clock.append(time.perf_counter())
        self.seconds.append([b - a for a, b in itertools.pairwise(clock)])
        self._drain()
        control.barrier()

    def _find_round(self) -> None:
        for _ in range(self.probe):
            self._step()
        optimizer = self.replica.optimizer
        assert isinstance(optimizer, LocalUpdates)
        assert optimizer.every is not None
        self.untimed = self.period = optimizer.every
        self.timed = 2 * optimizer.every

    def _step(self) -> None:
        with self.replica.accumulating(last=True):
            self.replica.module(*self._batches.next()).backward()
        self.replica.step(self.clip)
        self.replica.optimizer.zero_grad(set_to_none=True)

    def _drain(self) -> None:
        self.exposed = self.replica.account.exposed - self._drained
        for flight in _in_air(self.replica.optimizer):
            flight.wait()
        self._drained = self.replica.account.exposed - self.exposed  # waits of these pauses


def _in_air(optimizer: torch.optim.Optimizer) -> list[Flight]:
    if isinstance(optimizer, LocalUpdates):
        return [f.flight for f in optimizer.fragments if f.flight is not None]
    if isinstance(optimizer, OneBitAdam | OneBitLamb):
        return [b.flight for b in optimizer.buckets if b.flight is not None]
    return optimizer.flights if isinstance(optimizer, SparseAverage) else []


def compete(
    contenders: list[Contender], repetitions: int, *, model: str, batch: int, context: int
) -> dict[str, dict[str, float]]:
    """The race as a worker of the lab runs it, from joining the others on."""
    world = init(timeout=120)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    corpus = load_corpus(DataConfig(context=context))
    shape = {"batch": batch, "context": context}
    return race(contenders, repetitions, model=model, corpus=corpus, world=world, **shape)


def race(
    contenders: list[Contender],
    repetitions: int,
    *,
    model: str,
    corpus: Corpus,
    batch: int,
    context: int,
    world: World,
) -> dict[str, dict[str, float]]:
    """What each contender keeps of the speed of the first one, which is `none`."""
    control = Wire(name="race")
    for contender in contenders:
        contender.prepare(model, corpus, batch, context, world)
    none, *others = contenders
    assert none.name == "none"
    for _ in range(repetitions):
        for contender in others:
            none.turn(control)
            contender.turn(control)
        none.turn(control)
    pace = statistics.median(itertools.chain(*none.seconds))
    pace = control.agree([pace], "sum")[0] / world.size
    answer = {"none": _row(1.0, 0.0, pace, _exposed(none, control))}
    for place, contender in enumerate(others):
        before = [r * (len(others) + 1) + place for r in range(repetitions)]
        units = [statistics.median(none.seconds[i] + none.seconds[i + 1]) for i in before]
        turns = [
            [s / unit for s in turn] for unit, turn in zip(units, contender.seconds, strict=True)
        ]
        efficiency, error = _efficiency(turns, contender.period)
        total = control.agree([efficiency, error], "sum")
        efficiency, error = (value / world.size for value in total)
        answer[contender.name] = _row(
            efficiency, error, pace / efficiency, _exposed(contender, control)
        )
    return answer


def _row(efficiency: float, error: float, seconds: float, exposed: float) -> dict[str, float]:
    return {
        "ms_per_step": round(1000 * seconds, 1),
        "efficiency": round(efficiency, 4),
        "error": round(error, 4),
        "exposed_ms_per_step": round(exposed, 1),
    }


def show(figures: dict[str, dict[str, float]]) -> None:
    """A table of what `race` found."""
    print(f"  {'method':28}{'ms/step':>10}{'efficiency':>18}{'exposed ms/step':>18}")
    for name, f in figures.items():
        share = f"{f['efficiency']:.3f} ±{f['error']:.3f}"
        print(f"  {name:28}{f['ms_per_step']:10.1f}{share:>18}{f['exposed_ms_per_step']:18.1f}")


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


def _exposed(contender: Contender, control: Wire) -> float:
    """Milliseconds a step waited for the network, by the method's own account."""
    account = contender.replica.account
    return 1000 * control.agree([contender.exposed / max(1, account.steps)])[0]

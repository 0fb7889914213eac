"""Methods timed side by side in one run, which is the only way to compare them on a noisy machine.

Every rank holds all contenders at once, each with its own copy of the model. A repetition gives
each contender its turn: some steps that are not timed, to reach the steady state (with a flight in
the air, where the method has any), then the timed ones, then a pause until its traffic has ended.

Neighbours on the machine slow single steps at random; what a method costs comes back at the same
place of every round. So a round's time is the sum, over its places, of the median step at that
place, over all rounds and repetitions; the slowest rank counts. A contender's efficiency is its
tokens/s over those of `none`, measured in the same way in the same run.
"""

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from thinwire.lab import Lab, Link
from thinwire.optim import LocalUpdates, SparseAverage
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
    """Milliseconds per step and efficiency against the contender named `none`, for each."""
    control = Wire(name="race")
    for contender in contenders:
        contender.prepare(model, corpus, batch, context, world)
    for _ in range(repetitions):
        for contender in contenders:
            contender.turn(control)
    rounds = {c.name: control.agree(_step_seconds(c))[0] for c in contenders}
    return {
        c.name: {
            "ms_per_step": round(1000 * rounds[c.name], 1),
            "efficiency": round(rounds["none"] / rounds[c.name], 4),
            "exposed_ms_per_step": round(_exposed(c, control), 1),
        }
        for c in contenders
    }


def _step_seconds(contender: Contender) -> list[float]:
    """Seconds per step by the medians of the places in a round; one figure, for `agree`."""
    places: list[list[float]] = [[] for _ in range(contender.period)]
    for turn in contender.seconds:
        for index, taken in enumerate(turn):
            places[index % contender.period].append(taken)
    return [statistics.fmean(statistics.median(place) for place in places)]


def _exposed(contender: Contender, control: Wire) -> float:
    """Milliseconds a step waited for the network, by the method's own account."""
    account = contender.replica.account
    return 1000 * control.agree([contender.exposed / max(1, account.steps)])[0]

"""When the automatic freeze of the one-bit methods comes, and what it costs in loss.

    python benchmarks/freeze_rule.py                    streams, then all trainings (hours)
    python benchmarks/freeze_rule.py --only streams     made-up gradients, up to 500,000 steps
    python benchmarks/freeze_rule.py --only masked      one of the trainings, by name
    python benchmarks/freeze_rule.py --quick            two streams, a training of 60 steps
    python benchmarks/freeze_rule.py --results FILE     keep each training, skip those kept

Streams: the squared norm of a gradient falls as a power of the step or by halves until a known step
and is level from there, with noise that has a memory and now and then a batch a hundred times as
large. The answer wanted is that step, or the floor of the rule where it comes earlier.

Trainings: 1-bit Adam with two replicas in one process, the same weights and batches for every
freeze; none of them was looked at when the rule's constants were chosen. `auto` is the rule,
the others freeze at a share of the run. The loss is over that of the dense run. `never` has the
rule's step: it was not reached. Prints tables; the last line is one JSON object:
{"streams": {name: {"level", "frozen"}}, "trainings": {name: {"auto", "dense", "over": {...}}}}.
"""

import argparse
import copy
import json
import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.optim.freeze import FreezeRule
from thinwire.train.corpus import Corpus, load_corpus
from thinwire.train.data import IGNORED, Batches, DataConfig, validation_batches
from thinwire.train.models import GPT, ModelConfig, build_model
from thinwire.train.optimizers import OptimizerConfig, learning_rate

REPLICAS, BATCH, CONTEXT, EPS, DECAY = 2, 8, 64, 1e-8, 0.01
FLOOR = 0.01  # the optimizers' default
SHARES = (0.05, 0.1, 0.2, 0.4)

# -- streams --------------------------------------------------------------------------------------


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


def streams(quick: bool) -> dict[str, Any]:
    found = {}
    print(f"{'stream':42}{'level at':>10}{'frozen at, three seeds':>34}")
    for name, stream in list(STREAMS.items())[: 2 if quick else None]:
        steps = [stream.frozen(seed) for seed in range(3)]
        found[name] = {"level": stream.level, "frozen": steps}
        print(f"{name:42}{stream.level:10,}{', '.join(map(_step, steps)):>34}", flush=True)
    return found


def _step(step: int | None) -> str:
    return "never" if step is None else f"{step:,}"


# -- trainings ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    steps: int = 600
    model: str = "gpt-0.3m"
    objective: str = "causal"
    lr: float = 2e-3
    warmup: int = 20
    beta2: float = 0.999
    seed: int = 0


TRAININGS = {
    "masked": Training(objective="masked"),
    "masked, warm-up of 150": Training(objective="masked", warmup=150),
    "b2 = .99": Training(beta2=0.99),
    "lr 5e-4": Training(lr=5e-4),
    "lr 6e-3, warm-up of 100": Training(lr=6e-3, warmup=100),
    "1M parameters": Training(model="gpt-1m", lr=1e-3),
    "1M parameters, masked, b2 = .99": Training(
        model="gpt-1m", objective="masked", lr=1e-3, beta2=0.99
    ),
    "2,000 steps": Training(steps=2_000),
}


@dataclass
class State:
    """1-bit Adam with all values in one bucket; replicas hold the same weights."""

    x: Tensor
    m: Tensor
    v: Tensor
    rule: FreezeRule
    step: int = 0
    position: int = 0
    frozen: Tensor | None = None  # sqrt(v) + eps
    errors: list[Tensor] = field(default_factory=list)


class Run:
    def __init__(self, name: str, training: Training, corpus: Corpus) -> None:
        self.name, self.given, self.corpus = name, training, corpus
        model = ModelConfig(model=training.model, objective=training.objective)  # type: ignore[arg-type]
        self.model: GPT = build_model(model, corpus.vocab, CONTEXT, training.seed)
        self.parameters = list(self.model.parameters())
        self.masks = corpus.vocab if training.objective == "masked" else None
        self.config = OptimizerConfig(lr=training.lr, warmup=training.warmup)
        self.batches = [
            Batches(
                corpus.train,
                CONTEXT,
                BATCH,
                replica,
                REPLICAS,
                training.seed,
                mask_vocab=self.masks,
            )
            for replica in range(REPLICAS)
        ]
        decayed = [torch.full_like(p, float(p.dim() >= 2)) for p in self.parameters]
        self.decay = DECAY * _flat(decayed)

    def start(self) -> State:
        x = _flat(self.parameters)
        return State(x, torch.zeros_like(x), torch.zeros_like(x), FreezeRule(self.given.beta2))

    def advance(self, state: State, end: int) -> int | None:
        """Steps until `end`; returns the first step at which the rule would freeze."""
        settled = None
        for each in self.batches:
            each.position = state.position
        while state.step < end:
            lr = learning_rate(self.config, state.step, self.given.steps)
            gradients = [self._gradient(state.x, each) for each in self.batches]
            state.step += 1
            if state.frozen is None:
                square = self._learn(state, gradients)
                if state.rule.observe(square, lr) and settled is None:
                    settled = state.step
            else:
                self._compress(state, gradients)
            self._move(state, lr)
        state.position = self.batches[0].position
        return settled

    def freeze(self, state: State) -> State:
        state = copy.deepcopy(state)
        hat = state.v / (1 - self.given.beta2**state.step)
        tensors = hat.split([p.numel() for p in self.parameters])
        floored = [v.clamp(min=FLOOR * float(v.mean())) for v in tensors]
        state.frozen = torch.cat(floored).sqrt() + EPS
        state.errors = [torch.zeros_like(state.x) for _ in range(REPLICAS + 1)]
        return state

    def loss(self, state: State) -> float:
        self._load(state.x)
        total = count = 0.0
        with torch.no_grad():
            for x, y in validation_batches(
                self.corpus.validation, CONTEXT, 16, 0, 1, 512, mask_vocab=self.masks
            ):
                targets = float((y != IGNORED).sum())
                total, count = total + float(self.model(x, y)) * targets, count + targets
        return total / count

    def _gradient(self, x: Tensor, batches: Batches) -> Tensor:
        self._load(x)
        self.model.zero_grad()
        self.model(*batches.next()).backward()
        return _flat([p.grad for p in self.parameters])

    def _learn(self, state: State, gradients: list[Tensor]) -> float:
        g = torch.stack(gradients).mean(0)
        norm = float(g.norm())
        g *= min(1.0, self.config.clip / norm)
        state.m.lerp_(g, 0.1)
        state.v.mul_(self.given.beta2).addcmul_(g, g, value=1 - self.given.beta2)
        return norm**2

    def _compress(self, state: State, gradients: list[Tensor]) -> None:
        norm = math.sqrt(sum(float(g.norm()) ** 2 for g in gradients) / REPLICAS)
        factor = min(1.0, self.config.clip / norm)
        sent = [
            _one_bit(0.9 * state.m + 0.1 * factor * g, error)
            for g, error in zip(gradients, state.errors[:-1], strict=True)
        ]
        mean = torch.stack(sent).mean(0)
        part = math.ceil(mean.numel() / (8 * REPLICAS)) * 8
        owners = zip(mean.split(part), state.errors[-1].split(part), strict=True)
        state.m = torch.cat([_one_bit(chunk, error) for chunk, error in owners])

    def _move(self, state: State, lr: float) -> None:
        scale = state.frozen
        if scale is None:
            scale = (state.v / (1 - self.given.beta2**state.step)).sqrt() + EPS
        direction = state.m / (1 - 0.9**state.step) / scale
        state.x -= lr * (direction + self.decay * state.x)

    def _load(self, x: Tensor) -> None:
        with torch.no_grad():
            pieces = x.split([p.numel() for p in self.parameters])
            for parameter, piece in zip(self.parameters, pieces, strict=True):
                parameter.copy_(piece.view_as(parameter))


def _flat(tensors: list[Any]) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def _one_bit(x: Tensor, error: Tensor) -> Tensor:
    z = x + error
    scale = float(z.norm()) / math.sqrt(z.numel())
    q = torch.where(z >= 0, scale, -scale)
    error.copy_(z - q)
    return q


def train(run: Run) -> dict[str, Any]:
    """One dense run, left at every freeze to be finished in one bit."""
    steps = run.given.steps
    points = {f"{share:.0%}": round(share * steps) for share in SHARES}
    state, settled, losses = run.start(), None, {}
    for step in range(1, steps + 1):
        due = run.advance(state, step)
        if due is not None and settled is None:
            settled, points = due, points | {"auto": due}
        for label, point in points.items():
            if point == step:
                branch = run.freeze(state)
                run.advance(branch, steps)
                losses[label] = run.loss(branch)
                print(f"  {run.name}: {label} at {point}: {losses[label]:.4f}", file=sys.stderr)
    dense = run.loss(state)
    over = {label: round(loss / dense, 4) for label, loss in losses.items()}
    return {"auto": settled, "steps": steps, "dense": round(dense, 4), "over": over}


def trainings(names: list[str], quick: bool, results: Path | None) -> dict[str, Any]:
    corpus = load_corpus(DataConfig(context=CONTEXT))
    found: dict[str, Any] = {}
    if results is not None and results.exists():
        found = dict(json.loads(line) for line in results.read_text().splitlines())
    for name in names:
        given = replace(TRAININGS[name], steps=60) if quick else TRAININGS[name]
        if name not in found:
            found[name] = train(Run(name, given, corpus))
            if results is not None:
                with results.open("a") as file:
                    file.write(json.dumps([name, found[name]]) + "\n")
    columns = [f"{share:.0%}" for share in SHARES]
    print(
        f"\n{'training':34}{'dense':>7}{'auto at':>9}{'auto':>8}" + "".join(map(_column, columns))
    )
    for name in names:
        row = found[name]
        text = "".join(_column(_percent(row["over"].get(c))) for c in columns)
        auto = _percent(row["over"].get("auto"))
        print(f"{name:34}{row['dense']:7.3f}{_step(row['auto']):>9}{auto:>8}{text}")
    return {name: found[name] for name in names}


def _column(text: str) -> str:
    return f"{text:>8}"


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{100 * (ratio - 1):+.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="*", default=[], help="streams, or names of trainings")
    parser.add_argument("--results", type=Path, default=None)
    given = parser.parse_args()
    torch.set_num_threads(1)
    names = ["masked"] if given.quick else given.only or list(TRAININGS)
    outcome: dict[str, Any] = {}
    if given.quick or not given.only or "streams" in given.only:
        outcome["streams"] = streams(given.quick)
    if names := [name for name in names if name != "streams"]:
        outcome["trainings"] = trainings(names, given.quick, given.results)
    print(json.dumps(outcome))


if __name__ == "__main__":
    main()

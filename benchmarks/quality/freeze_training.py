"""What the automatic freeze of the one-bit methods costs in loss, beside freezes set by hand.

    python -m benchmarks.quality.freeze_training                  all trainings (hours)
    python -m benchmarks.quality.freeze_training --only masked    one of them, by name
    python -m benchmarks.quality.freeze_training --quick          the first, 60 steps
    python -m benchmarks.quality.freeze_training --results FILE   keep each run, skip those kept

1-bit Adam with two replicas in one process, the same weights and batches for every freeze; none of
these trainings was looked at when the rule's constants were chosen. `auto` is the rule
(freeze_streams.py says when it comes), the others freeze at a share of the run. The loss is over
that of the dense run. `never`: the rule's step was not reached. Prints a table; the last line is
one JSON object: {"trainings": {name: {"auto", "steps", "dense", "over": {freeze: ratio}}}}.
"""

import copy
import math
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.arguments import Size, Table, end, parser
from benchmarks.harness.learning import validate
from benchmarks.harness.results import Job, Record, Results, run_here
from thinwire.methods.onebit.freeze import FreezeRule
from thinwire.train.data.corpus import Corpus, load_corpus
from thinwire.train.data.tokens import Batches, DataConfig
from thinwire.train.loop.optimizers import OptimizerConfig, learning_rate
from thinwire.train.tasks.models import GPT, ModelConfig, build_model

REPLICAS, BATCH, CONTEXT, EPS, DECAY = 2, 8, 64, 1e-8, 0.01
FLOOR = 0.01  # the optimizers' default
SHARES = (0.05, 0.1, 0.2, 0.4)


@dataclass(frozen=True)
class TrainingSetup:
    steps: int = 600
    model: str = "gpt-0.3m"
    objective: str = "causal"
    lr: float = 2e-3
    warmup: int = 20
    beta2: float = 0.999
    seed: int = 0


TRAININGS = {
    "masked": TrainingSetup(objective="masked"),
    "masked, warm-up of 150": TrainingSetup(objective="masked", warmup=150),
    "b2 = .99": TrainingSetup(beta2=0.99),
    "lr 5e-4": TrainingSetup(lr=5e-4),
    "lr 6e-3, warm-up of 100": TrainingSetup(lr=6e-3, warmup=100),
    "1M parameters": TrainingSetup(model="gpt-1m", lr=1e-3),
    "1M parameters, masked, b2 = .99": TrainingSetup(
        model="gpt-1m", objective="masked", lr=1e-3, beta2=0.99
    ),
    "2,000 steps": TrainingSetup(steps=2_000),
}


@dataclass
class OneBitState:
    """1-bit Adam with all values in one bucket; replicas hold the same weights."""

    x: Tensor
    m: Tensor
    v: Tensor
    rule: FreezeRule
    step: int = 0
    position: int = 0
    frozen: Tensor | None = None  # sqrt(v) + eps
    errors: list[Tensor] = field(default_factory=list)


class OneBitTraining:
    """Replicas of 1-bit Adam in one process, written out."""

    def __init__(self, name: str, training: TrainingSetup, corpus: Corpus, windows: int) -> None:
        self.name, self.given, self.corpus, self.windows = name, training, corpus, windows
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

    def start(self) -> OneBitState:
        x = _flat(self.parameters)
        return OneBitState(
            x, torch.zeros_like(x), torch.zeros_like(x), FreezeRule(self.given.beta2)
        )

    def advance(self, state: OneBitState, end: int) -> int | None:
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

    def freeze(self, state: OneBitState) -> OneBitState:
        state = copy.deepcopy(state)
        hat = state.v / (1 - self.given.beta2**state.step)
        tensors = hat.split([p.numel() for p in self.parameters])
        floored = [v.clamp(min=FLOOR * float(v.mean())) for v in tensors]
        state.frozen = torch.cat(floored).sqrt() + EPS
        state.errors = [torch.zeros_like(state.x) for _ in range(REPLICAS + 1)]
        return state

    def loss(self, state: OneBitState) -> float:
        self._load(state.x)
        sizes = {"context": CONTEXT, "windows": self.windows}
        return validate(self.model, self.corpus, None, **sizes, mask_vocab=self.masks)

    def _gradient(self, x: Tensor, batches: Batches) -> Tensor:
        self._load(x)
        self.model.zero_grad()
        self.model(*batches.next()).backward()
        return _flat([p.grad for p in self.parameters])

    def _learn(self, state: OneBitState, gradients: list[Tensor]) -> float:
        g = torch.stack(gradients).mean(0)
        norm = float(g.norm())
        g *= min(1.0, self.config.clip / norm)
        state.m.lerp_(g, 0.1)
        state.v.mul_(self.given.beta2).addcmul_(g, g, value=1 - self.given.beta2)
        return norm**2

    def _compress(self, state: OneBitState, gradients: list[Tensor]) -> None:
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

    def _move(self, state: OneBitState, lr: float) -> None:
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


def train(run: OneBitTraining) -> dict[str, Any]:
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


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--only", nargs="*", choices=TRAININGS, help="these trainings")
    arguments.add_argument("--results", type=Path, help="a file of JSON lines")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    names = given.only or (list(TRAININGS) if given.size is Size.FULL else ["masked"])
    steps, windows = given.size.of(full=(None, 512), quick=(60, 512), tiny=(5, 4))
    setups = {name: TRAININGS[name] for name in names}
    if steps is not None:
        setups = {name: replace(setup, steps=steps) for name, setup in setups.items()}
    corpus = load_corpus(DataConfig(context=CONTEXT))

    def outcome(job: Job) -> Record:
        name = job["training"]
        return train(OneBitTraining(name, setups[name], corpus, windows))

    jobs: list[Job] = [{"training": name, "steps": setup.steps} for name, setup in setups.items()]
    report(run_here(jobs, Results(given.results), outcome), given.size)


def report(records: list[Record], size: Size) -> None:
    shares = [f"{share:.0%}" for share in SHARES]
    table = Table("training", "dense", "auto at", "auto", *shares, first=34, width=9)
    for record in records:
        auto = "never" if record["auto"] is None else f"{record['auto']:,}"
        over = (_percent(record["over"].get(freeze)) for freeze in ("auto", *shares))
        table.row(record["training"], f"{record['dense']:.3f}", auto, *over)
    kept = ("auto", "steps", "dense", "over")
    end({"trainings": {r["training"]: {key: r[key] for key in kept} for r in records}}, size)


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{100 * (ratio - 1):+.1f} %"


if __name__ == "__main__":
    main()

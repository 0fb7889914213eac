"""What an asynchronous pipeline costs in quality: validation loss at equal updates.

    python -m benchmarks.quality.pipeline             4 stages, 480 updates, 3 seeds
    python -m benchmarks.quality.pipeline --quick     60 updates, 1 seed, 4 of the recipes
    python -m benchmarks.quality.pipeline --lr 2e-3 --seeds 1 --only "stash, adamw" --updates 960
    python -m benchmarks.quality.pipeline --results FILE    keep each run, skip those kept

A byte-level GPT of 0.3M parameters (untied) on the Python standard library, cut into stages by the
number of parameters. All stages run in this process, on the code that AsyncPipeline runs on ranks
(SimulatedPipeline: the same bits), with the same data, weights, batch and learning rate for every
recipe: the published 3e-4, warmed up over a tenth of the run. Nothing here is timed. Prints a table
and, as its last line, one JSON object:
{"loss": {recipe: {"mean", "spread", "seeds"}}, "checks": {...}}.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.harness.arguments import Size, Table, end, parser
from benchmarks.harness.results import Job, Record, Results, over_seeds, run_here
from thinwire.pipeline import (
    AsyncNAdam,
    Schedule,
    SimulatedPipeline,
    micro_batches,
    split,
    stage_settings,
)
from thinwire.train.data.corpus import Corpus, load_corpus
from thinwire.train.data.tokens import Batches, DataConfig, validation_batches
from thinwire.train.loop.optimizers import OptimizerConfig, learning_rate
from thinwire.train.tasks.models import ModelConfig, build_model, token_loss
from thinwire.wire.codecs import Codec, Dense, Int8

STAGES = 4

Make = Callable[[nn.Module, Schedule, float, int], torch.optim.Optimizer]


def look_ahead(beta: float = 0.99) -> Make:
    return lambda module, schedule, lr, updates: AsyncNAdam(
        module.parameters(), lr=lr, updates=updates, betas=(beta, 0.999)
    )


def adamw(beta: float = 0.9) -> Make:
    return lambda module, schedule, lr, updates: torch.optim.AdamW(
        module.parameters(), lr=lr, betas=(beta, 0.999), weight_decay=0.01
    )


def staged(module: nn.Module, schedule: Schedule, lr: float, updates: int) -> torch.optim.Optimizer:
    """The momentum of a stage without a stash; its learning rate is set at every update."""
    momentum = stage_settings(schedule, 0).momentum
    return AsyncNAdam(module.parameters(), lr=lr, updates=updates, betas=(momentum, 0.999))


@dataclass
class PipelineRecipe:
    """How the stages are trained."""

    optimizer: Make
    settings: dict[str, object] = field(default_factory=dict)
    accumulate: int = 1
    scaled: bool = False
    """Whether a stage's learning rate is that of `stage_settings`."""


SYNC: dict[str, object] = {"schedule": "flush"}
BF16: dict[str, Codec] = {"codec": Dense(torch.bfloat16), "gradient_codec": Dense(torch.bfloat16)}
INT8: dict[str, Codec] = {"codec": Int8(), "gradient_codec": Int8()}
RECIPES: dict[str, PipelineRecipe] = {
    "synchronous, look-ahead": PipelineRecipe(look_ahead(), SYNC),
    "synchronous, adamw": PipelineRecipe(adamw(), SYNC),
    "stash, look-ahead": PipelineRecipe(look_ahead()),
    "stash, look-ahead by the delay": PipelineRecipe(look_ahead(), {"look_ahead": 1.0}),
    "stash, adamw": PipelineRecipe(adamw()),
    "stash, adamw, momentum .99": PipelineRecipe(adamw(0.99)),
    "no stash, stage settings": PipelineRecipe(staged, {"stash": False}, scaled=True),
    "no stash, look-ahead": PipelineRecipe(look_ahead(), {"stash": False}),
    "no stash, adamw": PipelineRecipe(adamw(), {"stash": False}),
    "2bw, 4 micro-batches, adamw": PipelineRecipe(adamw(), {"schedule": "2bw"}, accumulate=4),
    "2bw, 4 micro-batches, look-ahead": PipelineRecipe(
        look_ahead(), {"schedule": "2bw"}, accumulate=4
    ),
    "stash, look-ahead, lead 1": PipelineRecipe(look_ahead(), {"lead": 1}),
    "stash, look-ahead, bf16": PipelineRecipe(look_ahead(), {**BF16}),
    "stash, look-ahead, int8": PipelineRecipe(look_ahead(), {**INT8}),
}
QUICK = [
    "synchronous, look-ahead",
    "stash, look-ahead",
    "stash, adamw",
    "no stash, stage settings",
]


def train(job: Job, corpus: Corpus, size: Size) -> Record:
    recipe, updates = RECIPES[job["method"]], job["steps"]
    batch, context, windows = size.of(full=(16, 64, 400), quick=(16, 64, 400), tiny=(1, 16, 4))
    model = build_model(ModelConfig(tied="no"), corpus.vocab, context, job["seed"])
    stages = split(model, STAGES)
    plan = [
        Schedule(recipe.settings.get("schedule", "1f1b"), s, STAGES, recipe.accumulate)  # type: ignore[arg-type]
        for s in range(STAGES)
    ]
    optimizers = [
        recipe.optimizer(stage, schedule, job["lr"], updates)
        for stage, schedule in zip(stages, plan, strict=True)
    ]
    pipeline = SimulatedPipeline(
        stages,
        optimizers,
        loss=token_loss,
        accumulate=recipe.accumulate,
        **recipe.settings,  # type: ignore[arg-type]
    )
    rates = OptimizerConfig(lr=job["lr"], warmup=updates // 10)

    def before(stage: int, update: int) -> None:
        rate = learning_rate(rates, update, updates)
        if recipe.scaled:
            rate *= stage_settings(plan[stage], update, correct_for=updates // 4).lr_scale
        for group in optimizers[stage].param_groups:
            group["lr"] = rate

    source = Batches(corpus.train, context, batch, 0, 1, job["seed"])
    batches = micro_batches(iter(source.next, None), recipe.accumulate)
    for _ in pipeline.train(batches, updates, before=before):
        pass
    held_out = validation_batches(corpus.validation, context, 16, 0, 1, windows)
    return {"loss": round(pipeline.evaluate(held_out), 4)}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--updates", type=int, default=480)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--lr", type=float, default=3e-4)
    arguments.add_argument("--only", nargs="+", choices=RECIPES, help="these recipes")
    arguments.add_argument("--seed", type=int, help="this seed only")
    arguments.add_argument("--results", type=Path, help="a file of JSON lines")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    updates, count = given.size.of(full=(given.updates, given.seeds), quick=(60, 1), tiny=(6, 1))
    corpus = load_corpus(DataConfig())
    names = given.only or given.size.of(full=list(RECIPES), quick=QUICK, tiny=QUICK)
    jobs: list[Job] = [
        {"method": name, "lr": given.lr, "steps": updates, "seed": seed}
        for seed in (range(count) if given.seed is None else [given.seed])
        for name in names
    ]
    results = Results(given.results)
    records = run_here(jobs, results, lambda job: train(job, corpus, given.size))
    report(records, given.size)


def report(records: list[Record], size: Size) -> None:
    losses: dict[str, list[float]] = {}
    for record in records:
        losses.setdefault(record["method"], []).append(record["loss"])
    found = {name: over_seeds(each) for name, each in losses.items()}
    table = Table("recipe", "loss", "spread", first=36)
    for name, row in found.items():
        table.row(name, f"{row['mean']:.4f}", f"{row['spread']:.4f}")
    end({"loss": found, "checks": checks(found)}, size)


def checks(found: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Stash with look-ahead over synchronous (target <= 1.02) and over stash alone (target < 1)."""
    pairs = {
        "stash, look-ahead / synchronous": ("stash, look-ahead", "synchronous, look-ahead"),
        "stash, look-ahead / stash, adamw": ("stash, look-ahead", "stash, adamw"),
    }
    return {
        label: round(found[a]["mean"] / found[b]["mean"], 4)
        for label, (a, b) in pairs.items()
        if a in found and b in found
    }


if __name__ == "__main__":
    main()

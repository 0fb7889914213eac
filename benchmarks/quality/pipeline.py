"""What an asynchronous pipeline costs in quality: validation loss at equal updates.

    python benchmarks/pipeline_quality.py             4 stages, 480 updates, 3 seeds
    python benchmarks/pipeline_quality.py --quick     60 updates, 1 seed, 4 of the contenders
    python benchmarks/pipeline_quality.py --lr 2e-3 --seeds 1 --only "stash, adamw" --updates 960

A byte-level GPT of 0.3M parameters (untied) on the Python standard library, cut into stages by the
number of parameters. All stages run in this process, on the code that AsyncPipeline runs on ranks
(SimulatedPipeline: the same bits), with the same data, weights, batch and learning rate for every
contender: the published 3e-4, warmed up over a tenth of the run. Nothing here is timed. Prints a
table and, as its last line, one JSON object:
{"loss": {contender: {"mean", "spread", "seeds"}}, "checks": {...}}.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from thinwire.pipeline import (
    LookAhead,
    Schedule,
    SimulatedPipeline,
    micro_batches,
    split,
    stage_settings,
)
from thinwire.train.corpus import Corpus, load_corpus
from thinwire.train.data import Batches, DataConfig, validation_batches
from thinwire.train.models import ModelConfig, build_model, token_loss
from thinwire.train.optimizers import OptimizerConfig, learning_rate
from thinwire.wire.codecs import Codec, Dense, Int8

STAGES, BATCH, CONTEXT = 4, 16, 64
VALIDATION_WINDOWS = 400

Make = Callable[[nn.Module, Schedule, float, int], torch.optim.Optimizer]


def look_ahead(beta: float = 0.99) -> Make:
    return lambda module, schedule, lr, updates: LookAhead(
        module.parameters(), lr=lr, updates=updates, betas=(beta, 0.999)
    )


def adamw(beta: float = 0.9) -> Make:
    return lambda module, schedule, lr, updates: torch.optim.AdamW(
        module.parameters(), lr=lr, betas=(beta, 0.999), weight_decay=0.01
    )


def staged(module: nn.Module, schedule: Schedule, lr: float, updates: int) -> torch.optim.Optimizer:
    """The momentum of a stage without a stash; its learning rate is set at every update."""
    momentum = stage_settings(schedule, 0).momentum
    return LookAhead(module.parameters(), lr=lr, updates=updates, betas=(momentum, 0.999))


@dataclass
class Contender:
    optimizer: Make
    settings: dict[str, object] = field(default_factory=dict)
    accumulate: int = 1
    scaled: bool = False
    """Whether a stage's learning rate is that of `stage_settings`."""


SYNC: dict[str, object] = {"schedule": "flush"}
BF16: dict[str, Codec] = {"codec": Dense(torch.bfloat16), "gradient_codec": Dense(torch.bfloat16)}
INT8: dict[str, Codec] = {"codec": Int8(), "gradient_codec": Int8()}
CONTENDERS: dict[str, Contender] = {
    "synchronous, look-ahead": Contender(look_ahead(), SYNC),
    "synchronous, adamw": Contender(adamw(), SYNC),
    "stash, look-ahead": Contender(look_ahead()),
    "stash, look-ahead by the delay": Contender(look_ahead(), {"look_ahead": 1.0}),
    "stash, adamw": Contender(adamw()),
    "stash, adamw, momentum .99": Contender(adamw(0.99)),
    "no stash, stage settings": Contender(staged, {"stash": False}, scaled=True),
    "no stash, look-ahead": Contender(look_ahead(), {"stash": False}),
    "no stash, adamw": Contender(adamw(), {"stash": False}),
    "2bw, 4 micro-batches, adamw": Contender(adamw(), {"schedule": "2bw"}, accumulate=4),
    "2bw, 4 micro-batches, look-ahead": Contender(look_ahead(), {"schedule": "2bw"}, accumulate=4),
    "stash, look-ahead, lead 1": Contender(look_ahead(), {"lead": 1}),
    "stash, look-ahead, bf16": Contender(look_ahead(), {**BF16}),
    "stash, look-ahead, int8": Contender(look_ahead(), {**INT8}),
}
QUICK = [
    "synchronous, look-ahead",
    "stash, look-ahead",
    "stash, adamw",
    "no stash, stage settings",
]


def train(contender: Contender, corpus: Corpus, seed: int, updates: int, lr: float) -> float:
    model = build_model(ModelConfig(tied="no"), corpus.vocab, CONTEXT, seed)
    stages = split(model, STAGES)
    plan = [
        Schedule(contender.settings.get("schedule", "1f1b"), s, STAGES, contender.accumulate)  # type: ignore[arg-type]
        for s in range(STAGES)
    ]
    optimizers = [
        contender.optimizer(stage, schedule, lr, updates)
        for stage, schedule in zip(stages, plan, strict=True)
    ]
    pipeline = SimulatedPipeline(
        stages,
        optimizers,
        loss=token_loss,
        accumulate=contender.accumulate,
        **contender.settings,  # type: ignore[arg-type]
    )
    rates = OptimizerConfig(lr=lr, warmup=updates // 10)

    def before(stage: int, update: int) -> None:
        rate = learning_rate(rates, update, updates)
        if contender.scaled:
            rate *= stage_settings(plan[stage], update, correct_for=updates // 4).lr_scale
        for group in optimizers[stage].param_groups:
            group["lr"] = rate

    source = Batches(corpus.train, CONTEXT, BATCH, 0, 1, seed)
    batches = micro_batches(iter(source.next, None), contender.accumulate)
    for _ in pipeline.train(batches, updates, before=before):
        pass
    windows = validation_batches(corpus.validation, CONTEXT, 16, 0, 1, VALIDATION_WINDOWS)
    return pipeline.evaluate(windows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--updates", type=int, default=480)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, help="these contenders")
    parser.add_argument("--seed", type=int, help="this seed only")
    parser.add_argument("--results", type=Path, help="a file of results, read first and added to")
    given = parser.parse_args()
    if given.quick:
        given.updates, given.seeds = 60, 1
    torch.set_num_threads(1)
    corpus = load_corpus(DataConfig())
    names = QUICK if given.quick else given.only or list(CONTENDERS)
    seeds = range(given.seeds) if given.seed is None else [given.seed]
    kept = given.results
    known = json.loads(kept.read_text()) if kept is not None and kept.exists() else {}
    losses: dict[str, list[float]] = {name: [] for name in names}
    for seed in seeds:
        for name in names:
            key = f"{name} | {given.lr:g} | {given.updates} | {seed}"
            if key not in known:
                known[key] = round(
                    train(CONTENDERS[name], corpus, seed, given.updates, given.lr), 4
                )
                if kept is not None:
                    kept.write_text(json.dumps(known, indent=1))
            losses[name].append(known[key])
            print(f"{key}: {known[key]:.4f}", file=sys.stderr, flush=True)
    report(losses, given.quick)


def report(losses: dict[str, list[float]], quick: bool) -> None:
    table = {
        name: {
            "mean": round(statistics.mean(found), 4),
            "spread": round(max(found) - min(found), 4),
            "seeds": found,
        }
        for name, found in losses.items()
    }
    print(f"{'contender':36}{'loss':>9}{'spread':>9}")
    for name, row in table.items():
        print(f"{name:36}{row['mean']:9.4f}{row['spread']:9.4f}")
    print(json.dumps({"loss": table, "checks": checks(table), "quick": quick}))


def checks(table: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Stash with look-ahead over synchronous (target <= 1.02) and over stash alone (target < 1)."""
    pairs = {
        "stash, look-ahead / synchronous": ("stash, look-ahead", "synchronous, look-ahead"),
        "stash, look-ahead / stash, adamw": ("stash, look-ahead", "stash, adamw"),
    }
    return {
        label: round(table[a]["mean"] / table[b]["mean"], 4)
        for label, (a, b) in pairs.items()
        if a in table and b in table
    }


if __name__ == "__main__":
    main()

"""Our OneBitAdam beside DeepSpeed 0.19.6's, the last release that has one: step time, collectives.

    benchmarks/peers/deepspeed_venv.sh /tmp/ds                            an environment of its own
    /tmp/ds/bin/python benchmarks/peers/deepspeed_one_bit.py              loopback, then the lab
    /tmp/ds/bin/python benchmarks/peers/deepspeed_one_bit.py --quick      loopback, fewer steps

Two workers on gloo, the same model of 3.2M parameters, batch and data, both optimizers past their
dense warm-up, interleaved in one run (see side_by_side.py): on loopback, where only the computer's
work counts, and in the lab at 100 Mbit/s and 1 ms. Collectives are counted where both libraries
call torch.distributed.

What DeepSpeed lacks on a CPU is mended from outside: deepspeed_mends.py.
Prints a table for each network and as its last line one JSON object:
{"figures": {network: {contender: {"ms_per_step", "collectives_per_step"}}}, "faster": {...}}.
"""

import argparse
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from counting import calls  # isort: skip
from deepspeed_mends import mended_deepspeed  # isort: skip
from side_by_side import Build, Contender, race  # isort: skip

import thinwire as tw
from thinwire.lab import Lab, Link
from thinwire.train.corpus import load_corpus
from thinwire.train.data import DataConfig
from thinwire.train.methods import find_method
from thinwire.train.models import GPT
from thinwire.train.replica import Replica
from thinwire.wire.world import current

MODEL, BATCH, CONTEXT, WORKERS = "gpt-3m", 8, 128, 2
FROZEN = 2
NETWORKS: dict[str, Link | None] = {"loopback": None, "100mbit": Link.of("100mbit", delay="1ms")}
OURS, THEIRS = "thinwire one-bit-adam", "deepspeed OneBitAdam"


class EngineLoss:
    """`backward()` as the engine wants to be asked for it."""

    def __init__(self, engine: Any, loss: torch.Tensor) -> None:
        self._engine, self._loss = engine, loss

    def backward(self) -> None:
        self._engine.backward(self._loss)


class EngineReplica(Replica):
    def __init__(self, model: GPT, engine: Any) -> None:
        super().__init__(model, engine.optimizer)
        self.engine = engine
        self.module = lambda x, y: EngineLoss(engine, engine(x, y))

    def step(self, clip: float) -> float:
        self.engine.step()
        self.account.tick()
        return 0.0


def deepspeed_one_bit(model: GPT, inner: torch.optim.Optimizer) -> Replica:
    deepspeed = mended_deepspeed()
    settings = {"lr": 1e-3, "freeze_step": FROZEN, "comm_backend_name": "compressed"}
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": BATCH,
            "optimizer": {"type": "OneBitAdam", "params": settings},
        },
    )
    return EngineReplica(model, engine)


class Counted(Contender):
    """A contender that knows how many collectives its last step made."""

    collectives = 0

    def _step(self) -> None:
        before = calls()
        super()._step()
        self.collectives = calls() - before


def method(name: str, **settings: object) -> Build:
    entry = find_method(name)
    return lambda model, inner: entry.build(model, inner, entry.settings(**settings), None)


def worker(repetitions: int, timed: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    tw.init(timeout=300)
    contenders: list[Contender] = [
        Counted("none", method("none"), 2, timed, clip=0.0),
        Counted(OURS, method("one-bit-adam", freeze_at=FROZEN), FROZEN + 3, timed, clip=0.0),
        Counted(THEIRS, deepspeed_one_bit, FROZEN + 3, timed, clip=0.0),
    ]
    figures: dict[str, dict[str, float]] = race(
        contenders,
        repetitions,
        model=MODEL,
        corpus=load_corpus(DataConfig()),
        batch=BATCH,
        context=CONTEXT,
        world=current(),
    )
    for contender in contenders:
        figures[contender.name]["collectives_per_step"] = contender.collectives  # type: ignore[attr-defined]
    theirs = contenders[-1].replica.optimizer
    assert theirs.adam_freeze_key, "DeepSpeed was still in its dense warm-up"  # type: ignore[attr-defined]
    if os.environ["RANK"] == "0":
        print("FIGURES " + json.dumps(figures), flush=True)
    tw.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    figures = {
        name: measure(link, quick)
        for name, link in NETWORKS.items()
        if not quick or name == "loopback"
    }
    for name, found in figures.items():
        show(name, found)
    faster = {
        name: round(found[THEIRS]["ms_per_step"] / found[OURS]["ms_per_step"], 3)
        for name, found in figures.items()
    }
    print(json.dumps({"figures": figures, "faster": faster}))


def measure(link: Link | None, quick: bool) -> dict[str, dict[str, float]]:
    lines: list[str] = []
    with Lab(WORKERS, link) as lab:
        if link is not None:
            lab.check()
        command = [
            sys.executable,
            str(Path(__file__).resolve()),
            *(["1", "3"] if quick else ["4", "8"]),
        ]
        outcome = lab.start(command, sink=lambda line: lines.append(line.text)).wait()
    if outcome.code:
        sys.exit("\n".join([*lines[-40:], str(outcome)]))
    line = next(line for line in lines if line.startswith("FIGURES "))
    figures: dict[str, dict[str, float]] = json.loads(line.removeprefix("FIGURES "))
    return figures


def show(network: str, figures: dict[str, dict[str, float]]) -> None:
    print(f"\n{WORKERS} workers, {MODEL}, {network}")
    print(f"  {'':28}{'ms/step':>10}{'over none':>12}{'collectives/step':>19}")
    for name, f in figures.items():
        over = f["ms_per_step"] - figures["none"]["ms_per_step"]
        print(f"  {name:28}{f['ms_per_step']:10.1f}{over:12.1f}{f['collectives_per_step']:19.0f}")


if __name__ == "__main__":
    worker(int(sys.argv[1]), int(sys.argv[2])) if "RANK" in os.environ else main()

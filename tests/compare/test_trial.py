"""A heat on two real ranks: contestants in turns compute what each would compute alone."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Ranks
from tests.programs import corpus  # noqa: F401
from thinwire.compare import records
from thinwire.compare.config import CompareConfig, parse
from thinwire.compare.method_run import MethodRun
from thinwire.compare.trial import Trial, TrialWorker
from thinwire.errors import NonFinite
from thinwire.train.flags import flat_values, with_values
from thinwire.train.loop.metrics import MetricsWriter
from thinwire.train.loop.stage_trainer import trainer_of
from thinwire.train.tasks.registry import find_task
from thinwire.wire import world as world_module
from thinwire.wire.wire import Wire

METHODS = ["none", "ddp", "overlapped", "one-bit-adam", "powersgd", "asyncmesh"]
SETTINGS = ["overlapped.every=3", "one-bit-adam.freeze-at=4", "powersgd.dense-steps=3"]


def settings(corpus: str) -> dict[str, Any]:
    flags = ["--methods", ",".join(METHODS[1:]), "--hosts", "2", "--data", corpus, "--delay", "0"]
    flags += ["--context", "16", "--batch", "2", "--eval-windows", "8", "--warmup", "2"]
    flags += ["--steps", "8", "--evals", "4", "--overtime", "1", "--set", *SETTINGS]
    return flat_values(parse(flags))


def heat(folder: Path, values: dict[str, Any], **changes: Any) -> Trial:
    config = with_values(CompareConfig(), values)
    door = folder / "door"
    door.mkdir(parents=True, exist_ok=True)
    told: dict[str, Any] = {
        "folder": str(folder),
        "rate": "1gbit",
        "seed": 0,
        "methods": METHODS,
        "settings": values,
        "reference": None,
        "tokens": config.race.steps * config.samples_per_step() * 16,
        "seconds": 0.0,
        "spent": 0.0,
        "door": str(door),
    }
    return Trial(**told | changes)


def race(told: Trial, kind: type[TrialWorker] = TrialWorker) -> int:
    worker = kind(told)
    code = worker.run()
    worker.control.barrier()
    return code


def alone(told: Trial, name: str, folder: str) -> float:
    """The same run as `thinwire train` makes it."""
    config = told.config().of_method(name, told.seed)
    config.loop.run_dir = folder
    world = world_module.init(timeout=20)
    config.loop.eval_every = 2 * config.pipeline.stages  # where a pipeline is drained
    kind = trainer_of(config)
    trainer = kind(config, world, Wire(name="control"), find_task(config), Path(folder))
    trainer.prime()
    metrics = MetricsWriter(Path(folder), world.rank)
    trainer.train(metrics)
    return trainer.found["val_loss"]


def all_alone(told: Trial, folder: str) -> None:
    for name in told.methods:
        alone(told, name, f"{folder}/{name}")


def test_in_turns_each_computes_what_it_computes_alone(
    ranks: Ranks, tmp_path: Path, corpus: str
) -> None:
    values = settings(corpus)
    told = heat(tmp_path / "race", values)
    assert ranks(2, race, told) == [0, 0]
    ranks(2, all_alone, told, str(tmp_path / "alone"))
    for name in METHODS:
        for rank in (0, 1):
            here = records.step_losses(tmp_path / "race" / name, rank)
            there = records.step_losses(tmp_path / "alone" / name, rank)
            stages = 2 if name == "asyncmesh" else 1  # half as many replicas, twice the steps
            assert len(here) == 8 * stages
            assert here == there, name
        found = records.read(tmp_path / "race" / name)
        turns = [record for record in found if record["kind"] == "turn"]
        evals = [record for record in found if record["kind"] == "eval"]
        assert [turn["step"] for turn in turns] == [n * stages for n in (2, 4, 6, 8)]
        assert [record["tokens"] for record in evals] == [128, 256, 384, 512]
        assert found[-1] == {"kind": "end", "why": records.BUDGET, "message": ""}
        assert all(turn["wall"] > 0 for turn in turns)
        assert (turns[-1]["bytes"] > 0) == (name != "none")
        assert turns[-1]["seconds"] == pytest.approx(sum(turn["wall"] for turn in turns))
        shown = [record for record in found if record["kind"] == "timeline"]
        assert all(len(record["steps"]) == 2 * stages for record in shown)
    assert not any((tmp_path / "race" / "door").iterdir())
    _the_same_at_another_rate(ranks, tmp_path, values)


def _the_same_at_another_rate(ranks: Ranks, tmp_path: Path, values: dict[str, Any]) -> None:
    """What is known is not evaluated again, unless it turns out differently."""
    other = tmp_path / "race" / "ddp" / "metrics" / "rank-1.jsonl"
    lines = [json.loads(line) for line in other.read_text().splitlines()]
    changed = [r | {"loss": 9.0} if r["kind"] == "step" and r["step"] == 2 else r for r in lines]
    other.write_text("".join(json.dumps(record) + "\n" for record in changed))
    values |= {"timed": 0.0, "overtime": 1.5}
    told = heat(tmp_path / "again", values, methods=METHODS[:3], reference=str(tmp_path / "race"))
    assert ranks(2, race, told) == [0, 0]
    evaluated = {
        name: [r["step"] for r in records.read(tmp_path / "again" / name) if r["kind"] == "eval"]
        for name in METHODS[:3]
    }
    assert evaluated == {"none": [], "ddp": [2, 4, 6, 8], "overlapped": []}
    found = {name: records.read(tmp_path / "again" / name) for name in METHODS[:3]}
    ends = {name: records.last(those, "end") for name, those in found.items()}
    steps = {name: records.last(those, "turn")["step"] for name, those in found.items()}  # type: ignore[index]
    # As soon as the rest is known they are not timed any more; what differs is run to the end.
    assert ends["none"] == {"kind": "end", "why": records.LIMIT, "message": ""}
    assert ends["ddp"] == {"kind": "end", "why": records.BUDGET, "message": ""}
    assert steps["none"] == 2
    assert steps["ddp"] == 8
    assert steps["overlapped"] >= 4  # before its first average nothing is known of its traffic


class _Uneven(TrialWorker):
    """One rank is late by most of a second in every turn."""

    def run(self) -> int:
        original = MethodRun._step

        def step(contestant: MethodRun, losses: list[float]) -> int:
            if contestant.trainer.step % 2 == 0 and self.control.rank == 1:
                time.sleep(0.8)
            return original(contestant, losses)

        MethodRun._step = step  # type: ignore[method-assign]
        return super().run()


@pytest.mark.alone
def test_the_end_of_a_turn_is_no_meeting(ranks: Ranks, tmp_path: Path, corpus: str) -> None:
    """Those that wait for each other take as long as the slowest, and the others do not."""
    told = heat(tmp_path, settings(corpus), methods=["none", "ddp"])
    assert ranks(2, race, told, _Uneven) == [0, 0]
    walls = {
        name: [r["wall"] for r in records.read(tmp_path / name) if r["kind"] == "turn"][1:]
        for name in ("none", "ddp")
    }
    assert all(0.4 < wall < 0.8 for wall in walls["none"])
    assert all(wall > 0.8 for wall in walls["ddp"])


class _Interrupted(TrialWorker):
    """Asked to stop in the middle of the second turn of one of them, on one rank."""

    def run(self) -> int:
        original = MethodRun._step

        def step(contestant: MethodRun, losses: list[float]) -> int:
            at = contestant.trainer.step
            if contestant.name == "overlapped" and at == 4 and self.control.rank == 1:
                os.kill(os.getpid(), signal.SIGINT)
            return original(contestant, losses)

        MethodRun._step = step  # type: ignore[method-assign]
        return super().run()


def test_an_interrupted_heat_goes_on_where_it_was(
    ranks: Ranks, tmp_path: Path, corpus: str
) -> None:
    values = settings(corpus)
    some = ["none", "overlapped", "one-bit-adam", "asyncmesh"]
    whole = heat(tmp_path / "whole", values, methods=some)
    assert ranks(2, race, whole) == [0, 0]
    parts = heat(tmp_path / "parts", values, methods=some)
    assert ranks(2, race, parts, _Interrupted) == [signal.SIGINT] * 2
    assert all(records.ended(tmp_path / "parts" / name) is None for name in some)
    assert ranks(2, race, parts) == [0, 0]
    for name in some:
        for rank in (0, 1):
            one = records.step_losses(tmp_path / "whole" / name, rank)
            other = records.step_losses(tmp_path / "parts" / name, rank)
            assert one == other, name
        losses = [
            {r["step"]: r["val_loss"] for r in records.read(folder / name) if r["kind"] == "eval"}
            for folder in (tmp_path / "whole", tmp_path / "parts")
        ]
        assert losses[0] == losses[1]
        turns = [r for r in records.read(tmp_path / "parts" / name) if r["kind"] == "turn"]
        assert turns[-1]["seconds"] == pytest.approx(sum(turn["wall"] for turn in turns))


def test_by_time_all_read_the_same(ranks: Ranks, tmp_path: Path, corpus: str) -> None:
    some = ["none", "ddp"]
    told = heat(tmp_path, settings(corpus), methods=some, tokens=0, seconds=3.0)
    assert ranks(2, race, told) == [0, 0]
    active = json.loads((tmp_path / records.ACTIVE).read_text())
    assert active["spent"] >= 0.8 * 3.0
    for name in some:
        found = records.read(tmp_path / name)
        turns = [record["tokens"] for record in found if record["kind"] == "turn"]
        assert turns[0] == 4 * 64  # the trial
        # On a slow machine the trial takes all the time there is.
        assert turns[-1] == active["budget"] >= 4 * 64
        assert found[-1]["why"] == records.BUDGET


def troubled(told: Trial) -> int:
    """One method refuses its settings, one breaks down at its third step on both ranks."""
    worker = TrialWorker(told)
    bad = next(c for c in worker._all if c.name == "ddp")
    original = bad.trainer.pulse.beat

    def beat(step: int, loss: float, norm: float) -> int:
        if step == 3:
            raise NonFinite("the loss of worker 1 has not been finite")
        return original(step, loss, norm)

    bad.trainer.pulse.beat = beat  # type: ignore[method-assign]
    code = worker.run()
    worker.control.barrier()
    return code


def test_one_that_fails_does_not_take_the_others_with_it(
    ranks: Ranks, tmp_path: Path, corpus: str
) -> None:
    values = settings(corpus) | {"set": ["overlapped.codec=int3"]}
    told = heat(tmp_path, values, methods=["none", "ddp", "overlapped"])
    assert ranks(2, troubled, told) == [0, 0]
    ends = {name: records.last(records.read(tmp_path / name), "end") for name in told.methods}
    assert ends["none"] == {"kind": "end", "why": records.BUDGET, "message": ""}
    assert ends["ddp"]["why"] == records.DIVERGED
    assert "step 3: the loss of worker 1" in ends["ddp"]["message"]
    assert ends["overlapped"]["why"] == records.FAILED
    assert "int3" in ends["overlapped"]["message"]

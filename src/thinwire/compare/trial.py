"""Trial: all methods at one rate with one seed. This is what each worker of it runs.

In every cycle each contestant has a turn, in an order that moves on from cycle to cycle; after it,
it is evaluated, unless the same run has been seen at a faster rate and all its losses are the same
so far. At the end of the budget those that have not come to the baseline's loss go on for a while.
"""

import copy
import json
import os
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from thinwire.compare import records
from thinwire.compare.config import BASELINE, YARDSTICK, CompareConfig
from thinwire.compare.history import History
from thinwire.compare.method_run import MethodRun
from thinwire.compare.schedule import RunProgress, Schedule
from thinwire.compare.turn_clock import TurnClock
from thinwire.errors import NonFinite, StorageError, ThinwireError
from thinwire.train import config as train_config
from thinwire.train.config import TrainConfig
from thinwire.train.flags import with_values
from thinwire.train.tasks.registry import find_task
from thinwire.train.tasks.task import Task
from thinwire.wire import evaluation
from thinwire.wire import world as world_module
from thinwire.wire.agreement import require_same
from thinwire.wire.wire import Wire

STORAGE = 3  # exit code of a worker that could not write


@dataclass(frozen=True)
class Trial:
    """What a worker is told."""

    folder: str
    rate: str
    seed: int
    methods: list[str]
    """Those that have not ended yet."""
    settings: dict[str, Any]
    """Of the comparison, by flag name."""
    reference: str | None
    """The folder of a heat with the same seed at a faster rate, where there is one."""
    tokens: int
    """The budget; 0 where the time decides."""
    seconds: float
    """For all of it, where the time decides; else 0."""
    spent: float
    """Of them, before it was interrupted."""
    door: str
    """A folder in memory through which models are averaged to be evaluated."""

    def write(self) -> Path:
        path = Path(self.folder) / records.HEAT
        records.write_json(path, asdict(self))
        return path

    @classmethod
    def read(cls, path: Path) -> "Trial":
        return cls(**json.loads(path.read_text()))

    def config(self) -> CompareConfig:
        return with_values(CompareConfig(), self.settings)


class TrialWorker:
    """Runs a heat on one host."""

    def __init__(self, heat: Trial) -> None:
        self._heat, self._config = heat, heat.config()
        world_module.init(timeout=self._config.race.timeout)
        self.control = Wire(name="control")
        require_same(self.control, asdict(heat))
        evaluation.share_memory(Path(heat.door))
        self._folder = Path(heat.folder)
        link = self._config.link(heat.rate)
        self._arena = TurnClock(self.control, link.delay + link.jitter)
        self._stop = 0  # the signal that asked this worker to stop
        self._active: MethodRun | None = None
        _warm_up()
        self._task = find_task(self._config.of_method(YARDSTICK, heat.seed))
        require_same(self.control, {"corpus": self._task.digest})
        self._spent, self._closed = heat.spent, heat.tokens
        built = [self._enter(name) for name in heat.methods]
        self._all = [contestant for contestant in built if contestant is not None]
        self._schedule = self._make_schedule()

    def _make_schedule(self) -> Schedule:
        race, heat = self._config.race, self._heat
        evaluated = heat.reference is None
        cycles = [records.last(records.read(c.folder), "turn") for c in self._all]
        return Schedule(
            step=self._config.samples_per_step() * self._task.units_per_sample,
            evals=race.evals,
            limit=race.limit,
            timed=race.timed,
            overtime=race.overtime if evaluated else 1.0,
            budget=heat.tokens,
            seconds=heat.seconds,
            cycle=max((turn["cycle"] + 1 for turn in cycles if turn), default=0),
        )

    def run(self) -> int:
        """0 when all have ended, or the signal that asked to stop."""
        self._heed_signals()
        schedule = self._schedule
        while live := self._live():
            began = time.monotonic()
            read = [c.tokens for c in live]
            schedule.begin(min(read), max(read), self._spent)
            first = schedule.cycle % len(live)
            for contestant in live[first:] + live[:first]:
                if stop := self._turn(contestant):
                    return self._leave(stop)
            self._spent += self.control.agree([time.monotonic() - began])[0]
            schedule.close(schedule.target, self._spent)
            self._closed = schedule.budget
            self._announce(live[0].name)
            self._end_those_done()
        return 0

    def _live(self) -> list[MethodRun]:
        return [contestant for contestant in self._all if contestant.ended is None]

    def _task_of(self, config: TrainConfig) -> Task:
        """All methods have the same data: it is loaded once."""
        task = copy.copy(self._task)
        task.config = config
        return task

    def _enter(self, name: str) -> MethodRun | None:
        """Builds a contestant; what it refuses is kept as the reason of its absence."""
        folder = self._folder / name
        self._announce(name)
        contestant, problem = None, ""
        try:
            config = self._config.of_method(name, self._heat.seed)
            train_config.check(config)
            contestant = MethodRun(name, config, self._arena, self._task_of(config), folder)
        except StorageError:
            raise
        except Exception as error:
            traceback.print_exc()  # for workers.log
            problem = str(error) if isinstance(error, ThinwireError) else _words(error)
        problems = [os.fsdecode(t) for t in self.control.gather_bytes(os.fsencode(problem))]
        if any(problems):
            if self._arena.leader:
                why = next(filter(None, problems))
                records.append(folder, "end", why=records.FAILED, message=why)
            return None
        assert contestant is not None
        if self._heat.reference is not None:
            known = Path(self._heat.reference) / name
            contestant.expect(records.step_losses(known, self.control.rank))
        return contestant

    def _turn(self, contestant: MethodRun) -> int:
        """The signal for which all ranks stop, or 0."""
        schedule = self._schedule
        if contestant.tokens >= schedule.target:  # a cycle that was interrupted
            return 0
        self._announce(contestant.name)
        self._active = contestant
        contestant.trainer.pulse.stop_asked = self._stop
        try:
            signum = contestant.turn(schedule.cycle, schedule.target)
            if contestant.tokens >= schedule.target and not contestant.as_expected:
                contestant.evaluate()
        except NonFinite as error:
            signum = 0
            contestant.diverged(error)
        self._active = None
        return signum or int(self.control.agree([self._stop])[0])

    def _end_those_done(self) -> None:
        target = self._target_loss()
        for contestant in self._live():
            standing = RunProgress(
                contestant.name,
                contestant.tokens,
                contestant.seconds,
                contestant.val_loss,
                self._is_known(contestant),
            )
            why = self._schedule.ends(standing, target, self._spent)
            if why is not None:
                contestant.end(why)

    def _is_known(self, contestant: MethodRun) -> bool:
        """Whether the rest of its run at this rate can be computed: see course.py. All ranks read
        the same records, which the leader has written before they last agreed on anything."""
        if self._heat.reference is None or not contestant.as_expected:
            return False
        whole = History.read(Path(self._heat.reference) / contestant.name)
        course = History.read(contestant.folder)
        return bool(course.turns) and course.steady(whole, self._schedule.budget)

    def _target_loss(self) -> float | None:
        """The baseline's loss at the end of the budget, once it is there."""
        budget = self._schedule.budget
        baseline = next((c for c in self._all if c.name == BASELINE), None)
        if baseline is not None:
            return baseline.val_loss if budget and baseline.tokens >= budget else None
        known = records.read(self._folder / BASELINE)
        end, evaluation = records.last(known, "end"), records.last(known, "eval")
        if end is None or evaluation is None or end["why"] != records.BUDGET:
            return None
        return float(evaluation["val_loss"])

    def _announce(self, name: str) -> None:
        if self._arena.leader:
            content = {"contestant": name, "spent": self._spent, "budget": self._closed}
            records.write_json(self._folder / records.ACTIVE, content)

    def _leave(self, signum: int) -> int:
        for contestant in self._all:
            if contestant.ended is None:
                contestant.save()
        return signum

    def _heed_signals(self) -> None:
        """The first one ends the heat at a step all ranks agree on; a second one at once."""

        def ask(signum: int, frame: FrameType | None) -> None:
            self._stop = signum
            if self._active is not None:
                self._active.trainer.pulse.stop_asked = signum
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_DFL)

        signal.signal(signal.SIGTERM, ask)
        signal.signal(signal.SIGINT, ask)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _warm_up() -> None:
    """What torch does at the first step of any optimizer is nobody's cost."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()


def main() -> None:
    """`heat FILE`, on every host."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        worker = TrialWorker(Trial.read(Path(sys.argv[1])))
        code = worker.run()
    except StorageError as error:  # which is no method's fault
        print(error, file=sys.stderr, flush=True)
        os._exit(STORAGE)
    worker.control.barrier()
    world_module.shutdown()
    sys.exit(128 + code if code else 0)

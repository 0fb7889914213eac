"""MethodRun: one method's training run, taken forward in turns.

[Note: turns] A worker holds all contestants and gives each its turn, so that whatever else happens
on the machine happens to all of them. A turn begins at the same moment on all workers and ends when
the links are silent again; its wall time is that of the slowest worker's steps, or the workers'
mean if nobody waited for anybody (`turn_seconds`). What is in the air when a turn ends would land
for free: `Account.pause` and `resume` make the method wait for it as long as if there had been no
pause. Random numbers are drawn from a state of the contestant's own. So a contestant computes what
`thinwire train` would compute alone.
"""

import time
from collections.abc import Callable
from pathlib import Path

import torch

from thinwire.compare import records
from thinwire.compare.records import Record, RecordWriter
from thinwire.compare.turn_clock import TurnClock
from thinwire.errors import NonFinite
from thinwire.train import run_directory
from thinwire.train.checkpoints import checkpoint
from thinwire.train.config import TrainConfig
from thinwire.train.loop.metrics import MetricsWriter, json_able
from thinwire.train.loop.stage_trainer import StageTrainer, trainer_of
from thinwire.train.loop.trainer import Trainer
from thinwire.train.tasks.task import Task
from thinwire.wire.account import Account, Landing

_FREE = 0.01  # of a turn: who waited less has waited for nobody
_SHOWN = 16  # steps of a turn, at its end, of which a timeline is kept


class MethodRun:
    def __init__(
        self, name: str, config: TrainConfig, arena: TurnClock, task: Task, folder: Path
    ) -> None:
        self.name, self.folder, self._arena = name, folder, arena
        control = arena.control
        config.loop.resume = goes_on = checkpoint.latest(folder) is not None
        self.trainer: Trainer = trainer_of(config)(config, control.world, control, task, folder)
        self.trainer.prime()
        if goes_on:
            self.trainer.resume()
        if arena.leader:
            folder.mkdir(parents=True, exist_ok=True)
            run_directory.write_config(folder, config)
        step = self.trainer.step if goes_on else None
        self._metrics = MetricsWriter(folder, control.rank, resume_step=step)
        self._scribe = RecordWriter(folder, arena.leader)
        self._rng = torch.get_rng_state()
        self._pause()
        self._take_up(records.read(folder))
        self.ended: str | None = None
        self._expected: dict[int, float | None] = {}
        self.as_expected = False
        """Whether every loss so far is that of the same run at another rate."""

    def _take_up(self, before: list[Record]) -> None:
        """The totals that no checkpoint keeps."""
        turn = records.last(before, "turn") or {}
        self.seconds: float = turn.get("seconds", 0.0)
        self._exposed = self.trainer.totals()["exposed"]  # of this worker, before its next turn
        self._wire_bytes: float = turn.get("wire_bytes", 0.0)
        self._sent = self._wire_bytes / self._arena.control.size  # by this host's interface
        self.val_loss: float = (records.last(before, "eval") or {}).get("val_loss", float("nan"))

    def _pause(self) -> None:
        for account in self.trainer.accounts():
            account.pause()
            account.listen(None)

    def _resume(self, timeline: "_Timeline") -> None:
        for account in self.trainer.accounts():
            account.listen(timeline.listener(account))
            account.resume()

    @property
    def tokens(self) -> int:
        """Or images: what the task counts in, read by all workers together."""
        return self.trainer.trained

    def expect(self, losses: dict[int, float | None]) -> None:
        """The losses of the same run at another rate, by step."""
        self._expected, self.as_expected = losses, bool(losses)

    def turn(self, cycle: int, until: int) -> int:
        """Trains until so many tokens are read; the signal for which all ranks stop, or 0."""
        arena, trainer = self._arena, self.trainer
        timeline = _Timeline()
        sent = arena.counters().tx_bytes
        losses: list[float] = []
        end = trainer.step + self._steps_to(until)
        if isinstance(trainer, StageTrainer):
            trainer.drain_every = end  # a pipeline is emptied there, as at any evaluation
        start = arena.start()
        torch.set_rng_state(self._rng)
        self._resume(timeline)
        signum = 0
        try:
            while trainer.step < end:
                asked = self._step(losses)
                timeline.step()
                if asked and not signum:
                    signum, end = asked, min(end, trainer.earliest_stop())
        finally:
            wall = time.perf_counter() - start
            self._pause()
            self._rng = torch.get_rng_state()
            arena.wait_until_quiet()
        self._note(cycle, wall, losses, arena.counters().tx_bytes - sent)
        self._scribe.write("timeline", cycle=cycle, **timeline.told(start))
        return signum

    def _steps_to(self, tokens: int) -> int:
        config, trainer = self.trainer.config, self.trainer
        samples = config.loop.accumulate * config.data.batch * trainer.readers
        return -(-(tokens - self.tokens) // (samples * trainer.task.units_per_sample))

    def _step(self, losses: list[float]) -> int:
        trainer = self.trainer
        record = trainer.train_step()
        self._metrics.write(record)
        loss = json_able(trainer.loss)  # None: a stage that does not know, or not finite
        if loss is not None:
            losses.append(loss)
        if self._expected.get(trainer.step, loss) != loss:
            self.as_expected = False
        return trainer.pulse.beat(trainer.step, trainer.own_loss(), trainer.norm)

    def _note(self, cycle: int, wall: float, losses: list[float], sent: int) -> None:
        """Writes down a turn, all workers taken together."""
        control, own = self._arena.control, self.trainer.totals()
        self._sent += sent
        counted = self.trainer.replica.counted
        nbytes = own["bytes"] if counted else self._sent
        waited = own["exposed"] - self._exposed if counted else wall  # unknown: maybe all of it
        self._exposed = own["exposed"]
        slowest, waited, most, lag, changed = control.agree(
            [wall, waited, nbytes, own["lag"], float(not self.as_expected)]
        )
        walls, total, exposed, hidden, wire, skipped, loss, known = control.agree(
            [
                wall,
                nbytes,
                own["exposed"],
                own["hidden"],
                sent,
                own["skipped"],
                sum(losses),
                float(len(losses)),
            ],
            "sum",
        )
        self.as_expected = not changed
        wall = turn_seconds(slowest, walls / control.size, waited)
        self.seconds += wall
        self._wire_bytes += wire
        self._scribe.write(
            "turn",
            cycle=cycle,
            step=self.trainer.step,
            tokens=self.tokens,
            wall=wall,
            seconds=self.seconds,
            loss=loss / max(1.0, known),
            bytes=total,
            most_bytes=most,
            wire_bytes=self._wire_bytes,
            exposed=exposed / control.size,
            hidden=hidden / control.size,
            skipped=skipped / control.size,
            lag=lag,
        )

    def evaluate(self) -> None:
        record = self.trainer.evaluate()
        self.val_loss = self.trainer.found["val_loss"]
        self._metrics.write(record)
        self._scribe.write(
            "eval", step=self.trainer.step, tokens=self.tokens, val_loss=self.val_loss
        )

    def end(self, why: str, message: str = "") -> None:
        """It takes no more turns."""
        self.ended = why
        self._scribe.write("end", why=why, message=message)
        self._metrics.close()

    def diverged(self, error: NonFinite) -> None:
        """All ranks have found out at the same step. Its wire is left as it is: nobody uses it."""
        self.end(records.DIVERGED, f"step {self.trainer.step}: {error}")

    def save(self) -> None:
        """A checkpoint from which the same comparison goes on; without one it starts anew."""
        if self.trainer.replica.resumable:
            self.trainer.save()


def turn_seconds(slowest: float, mean: float, waited: float) -> float:
    """What a turn would have taken had it not been one, from the workers' times in it and the most
    that any of them waited for the network.

    Workers that meet at every step go at the pace of the slowest. Where nobody waits for anybody
    the end of a turn must not be a meeting either: who is late in this turn is early in another.
    """
    return mean if waited < _FREE * slowest else slowest


class _Timeline:
    """When the steps of a turn ended and what was in the air meanwhile, on this worker."""

    def __init__(self) -> None:
        self._ends: list[float] = []
        self._landings: list[tuple[float, float, float, float]] = []

    def listener(self, account: Account) -> Callable[[Landing], None]:
        def hear(landing: Landing) -> None:
            arrived = account.ready_at(landing.arrived)
            self._landings.append((landing.launched, arrived, landing.asked, landing.landed))

        return hear

    def step(self) -> None:
        self._ends.append(time.perf_counter())

    def told(self, start: float) -> Record:
        """Seconds from the first step that is shown: the ends of the steps, and of every flight
        [launched, arrived, began to wait, waited until]. What left before is cut off there."""
        ends = [start, *self._ends][-_SHOWN - 1 :]
        zero = ends[0]
        flights = [
            [round(max(0.0, moment - zero), 5) for moment in landing]
            for landing in self._landings
            if landing[3] >= zero
        ]
        return {"steps": [round(end - zero, 5) for end in ends[1:]], "flights": flights}

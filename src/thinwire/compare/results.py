"""Results: from the records of a comparison to its figures. Reads the directory and nothing else,
so that a comparison that is under way, was interrupted or ended long ago is shown in the same way.
"""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from thinwire import foreign_files as files
from thinwire.compare import records
from thinwire.compare.config import BASELINE, YARDSTICK, CompareConfig
from thinwire.compare.history import History
from thinwire.errors import UsageError
from thinwire.report.comparison import (
    CUT,
    DIVERGED,
    FAILED,
    FINISHED,
    UNFINISHED,
    Cell,
    Comparison,
    Point,
    Spread,
)
from thinwire.train.flags import flat_values, with_values
from thinwire.train.loop.pipelining import PipelineConfig

_MOST_SETTINGS = 1 << 16  # bytes; each name in them is looked for
_MOST_SEEDS = 10_000
_STATUS = {
    records.BUDGET: FINISHED,
    records.LIMIT: CUT,
    records.DIVERGED: DIVERGED,
    records.FAILED: FAILED,
    None: UNFINISHED,
}


def gather(run: Path) -> Comparison:
    """The comparison in a directory, as far as it has come."""
    stored = read_settings(run)
    source = str(run / records.SETTINGS)
    config = with_values(CompareConfig(), stored["settings"], source, others=True)
    return _Gathering(run, config, stored).comparison()


def read_settings(run: Path) -> dict[str, Any]:
    path = run / records.SETTINGS
    try:
        stored: dict[str, Any] = files.read_json(path, most=_MOST_SETTINGS)
    except FileNotFoundError:
        raise UsageError(f"{run} holds no comparison: there is no {path.name} in it") from None
    if not isinstance(stored, dict) or not isinstance(stored.get("settings"), dict):
        raise UsageError(f"cannot read {path}: it holds no settings of a comparison")
    return stored


class _Gathering:
    def __init__(self, run: Path, config: CompareConfig, stored: dict[str, Any]) -> None:
        self._run, self._config, self._stored = run, config, stored
        _require_names(config)
        self._rates = [rate for rate in config.rates if (run / rate).exists()]
        self._methods = self._all_methods()
        self._courses = {
            (rate, seed, name): History.read(records.heat_folder(run, rate, seed) / name, run)
            for rate in self._rates
            for seed in config.seeds
            for name in self._methods
        }
        self._asked = self._asked_tokens()
        self._budget = self._common_tokens()

    def comparison(self) -> Comparison:
        config = self._config
        takes_part = BASELINE in self._methods
        cells = [self._cell(rate, name) for rate in self._rates for name in self._methods]
        for cell in cells:
            self._against_baseline(cell, cells)
        return Comparison(
            hosts=config.race.hosts,
            rates=self._rates,
            methods=self._methods,
            budget=self._budget,
            asked=self._asked,
            steps=self._budget / self._stored["step"],
            unit=self._stored["unit"],
            seeds=config.seeds,
            yardstick=YARDSTICK,
            baseline=BASELINE if takes_part else None,
            target=self._loss(BASELINE) if takes_part else None,
            settings=self._stored["settings"],
            machine=self._stored.get("machine", {}),
            links={rate: self._link(rate) for rate in self._rates},
            cells=cells,
        )

    # -- what there is ----------------------------------------------------------------------------

    def _all_methods(self) -> list[str]:
        """Those asked for, then whatever else has left records beside them (peers)."""
        named = self._config.methods
        found = {
            path.parent.name
            for rate in self._rates
            for path in (self._run / rate).glob(f"seed-*/*/{records.TURNS}")
        }
        return [*named, *sorted(found - set(named))]

    def _asked_tokens(self) -> int:
        race = self._config.race
        if not race.seconds:
            return race.steps * int(self._stored["step"])
        return int(self._stored.get("budget", 0))

    def _fastest(self, name: str) -> list[History]:
        """A method's runs at the fastest rate, one for each seed that has begun."""
        if not self._rates:
            return []
        found = [self._courses[self._rates[0], seed, name] for seed in self._config.seeds]
        return [course for course in found if course.turns]

    def _common_tokens(self) -> int:
        """Tokens that every run at the fastest rate has been evaluated at or beyond."""
        runs = [
            course
            for name in self._methods
            for course in self._fastest(name)
            if course.evals and course.why not in (records.DIVERGED, records.FAILED, records.LIMIT)
        ]
        least = min((course.evaluated for course in runs), default=0)
        return min(least, self._asked) if self._asked else least

    # -- one cell ---------------------------------------------------------------------------------

    def _cell(self, rate: str, name: str) -> Cell:
        link = self._config.link(rate)
        cell = Cell(name, rate, min(link.up, link.down) / 8, settings=self._settings_of(rate, name))
        course = self._courses[rate, self._config.seeds[0], name]
        cell.status, cell.message = _STATUS[course.why], course.message
        cell.tokens = course.tokens
        if course.turns:
            self._speed(cell, course)
        if course.turns and self._budget:
            self._totals(cell, course)
            self._losses(cell, course)
        cell.timeline = course.timeline
        return cell

    def _speed(self, cell: Cell, course: History) -> None:
        yardstick = self._courses[cell.rate, self._config.seeds[0], YARDSTICK]
        cell.tokens_per_s = course.tokens / course.turns[-1]["seconds"]
        if yardstick.turns:
            cell.efficiency = _ratio(yardstick.walls(), course.walls())
            cell.compute_limit = yardstick.tokens / yardstick.turns[-1]["seconds"]

    def _totals(self, cell: Cell, course: History) -> None:
        """What the whole budget takes and sends."""
        whole = next(iter(self._fastest(cell.method)), course)
        sending = whole if whole.tokens >= self._budget else course
        cell.bytes_per_token = sending.total("bytes", self._budget) / self._budget
        cell.wire_bytes_per_token = course.turns[-1]["wire_bytes"] / course.tokens
        most = sending.total("most_bytes", self._budget) / self._budget
        cell.wire_limit = cell.bandwidth / most if most else None
        cell.computed = course.tokens < self._budget
        if not course.steady(whole, self._budget):
            cell.message = cell.message or self._cut_words(course)
            return
        cell.seconds = course.total("seconds", self._budget)
        cell.exposed = course.total("exposed", self._budget)
        cell.hidden = course.total("hidden", self._budget)

    def _cut_words(self, course: History) -> str:
        share = course.tokens / self._budget
        return f"cut after {share:.0%} of the budget, and what it sends changes later"

    def _losses(self, cell: Cell, course: History) -> None:
        cell.val_loss = self._loss(cell.method)
        runs = self._fastest(cell.method)
        # A run that depends on the link (every=auto) has been evaluated at this rate.
        curve = course if course.evals else next(iter(runs), None)
        if course.evals and cell.rate != self._rates[0]:
            loss = course.loss_at(self._budget)
            cell.val_loss = None if loss is None else Spread(loss)
        if curve is not None and cell.seconds is not None:
            cell.curve = [
                Point(
                    record["tokens"],
                    course.total("seconds", record["tokens"]),
                    curve.total("bytes", record["tokens"]) / self._config.race.hosts,
                    record["val_loss"],
                )
                for record in curve.evals
                if record["val_loss"] is not None
            ]

    def _loss(self, name: str) -> Spread | None:
        """At equal tokens, over the seeds."""
        losses = [course.loss_at(self._budget) for course in self._fastest(name)]
        known = [loss for loss in losses if loss is not None]
        return _spread(known) if known and len(known) == len(losses) else None

    def _against_baseline(self, cell: Cell, cells: list[Cell]) -> None:
        baseline = next((c for c in cells if c.rate == cell.rate and c.method == BASELINE), None)
        if baseline is None or cell.seconds is None:
            return
        if baseline.bytes_per_token and cell.bytes_per_token is not None:
            cell.bytes_ratio = cell.bytes_per_token / baseline.bytes_per_token
        times = self._times_to_loss(cell)
        if times and baseline.seconds is not None:
            cell.time_to_loss = _spread(times)
            cell.sooner = baseline.seconds / cell.time_to_loss.value

    def _times_to_loss(self, cell: Cell) -> list[float]:
        """Seconds to the baseline's loss, for each seed; none if one of them never came there."""
        first = self._courses[cell.rate, self._config.seeds[0], cell.method]
        own = first.evals and cell.rate != self._rates[0]
        runs = [first] if own else self._fastest(cell.method)
        times = []
        for run, baseline in zip(runs, self._fastest(BASELINE), strict=False):
            target = baseline.loss_at(self._budget)
            tokens = None if target is None else run.tokens_to(target)
            if tokens is None:
                return []
            clock = run if cell.rate == self._rates[0] else first
            times.append(clock.total("seconds", tokens))
            cell.computed = cell.computed or tokens > clock.tokens
        return times

    # -- what surrounds it ------------------------------------------------------------------------

    def _settings_of(self, rate: str, name: str) -> dict[str, Any]:
        """A method's own settings, and those of the optimizer that were set for it alone."""
        folder = records.heat_folder(self._run, rate, self._config.seeds[0])
        try:
            values: dict[str, Any] = files.read_json(folder / name / "config.json", self._run)
        except FileNotFoundError:
            return {}
        common = json.loads(json.dumps(flat_values(self._config)))  # as the file has it
        optimizer = {f.name for f in fields(self._config.optimizer)}
        left_out = set(_OF_ANY_RUN)
        if values.get("stages", 1) == 1:
            left_out |= {f.name for f in fields(PipelineConfig)}
        own = {k: v for k, v in values.items() if k not in common and k not in left_out}
        return own | {k: values[k] for k in optimizer if k in values and values[k] != common[k]}

    def _link(self, rate: str) -> str:
        path = records.heat_folder(self._run, rate, self._config.seeds[0]) / records.LAB
        try:
            return str(files.read_json(path, self._run)["measured"])
        except FileNotFoundError:
            return ""


_OF_ANY_RUN = {"method", "workers", "lab", "eval_every", "save_every", "keep", "resume"} | {
    "tensorboard",
    "noise_scale",
    "replicas",
}


def _require_names(config: CompareConfig) -> None:
    """The settings may be somebody else's, and these become folders that are looked into."""
    for rate in config.rates:
        files.component(rate, "a rate")
    for name in config.methods:
        files.component(name, "a method")
    if not 1 <= config.race.seeds <= _MOST_SEEDS:
        raise UsageError(f"seeds takes 1 to {_MOST_SEEDS}, got {config.race.seeds}")


def _spread(values: Sequence[float]) -> Spread:
    """The mean of the seeds and half of their range."""
    half = (max(values) - min(values)) / 2 if len(values) > 1 else None
    return Spread(statistics.fmean(values), half)


Walls = dict[int, tuple[float, float]]


def _ratio(yardstick: Walls, method: Walls) -> Spread | None:
    """Tokens per second over the yardstick's, in the cycles both have run, the first one left out
    (it has what happens only once). Two standard errors by the jackknife over the cycles."""
    cycles = sorted(set(yardstick) & set(method))
    cycles = cycles[1:] if len(cycles) > 2 else cycles
    if not cycles:
        return None

    def ratio(chosen: Sequence[int]) -> float:
        ours = [sum(method[c][i] for c in chosen) for i in (0, 1)]
        theirs = [sum(yardstick[c][i] for c in chosen) for i in (0, 1)]
        return (ours[1] / ours[0]) / (theirs[1] / theirs[0])

    n = len(cycles)
    if n < 3:
        return Spread(ratio(cycles))
    without = [ratio([c for c in cycles if c != left_out]) for left_out in cycles]
    mean = statistics.fmean(without)
    error = math.sqrt((n - 1) / n * sum((value - mean) ** 2 for value in without))
    return Spread(ratio(cycles), 2 * error)

"""`thinwire compare`: runs the heats one after another, each in a lab of its own, and reports.

Exit codes: 0 when every method has run, 1 when one of them failed (the others are reported all the
same), 2 for bad input, 130 or 143 when it was interrupted; what is there is reported then, and the
same command with the same --run-dir goes on.
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from thinwire import foreign_files as files
from thinwire.compare import records
from thinwire.compare.config import YARDSTICK, CompareConfig, parse
from thinwire.compare.results import gather, read_settings
from thinwire.compare.trial import STORAGE, Trial
from thinwire.errors import StorageError, ThinwireError, UsageError
from thinwire.lab.job import Outcome, Patience
from thinwire.lab.network import Lab, entry
from thinwire.lab.output import Line
from thinwire.report.comparison import FAILED, Comparison
from thinwire.report.comparison_table import csv_text, print_comparison
from thinwire.report.machine import describe_machine
from thinwire.report.page import page
from thinwire.report.race_display import RaceDisplay
from thinwire.report.table import describe_checks
from thinwire.text import printable
from thinwire.train import run_directory
from thinwire.train.checkpoints import checkpoint
from thinwire.train.config import CONFIG, RUN_FLAGS
from thinwire.train.flags import as_flag, flat_values, read_toml, take_flag
from thinwire.train.loop.metrics import MetricsTail, json_able, metrics_file
from thinwire.train.preflight import preflight_parts
from thinwire.train.tasks.task import Task

_PATIENCE = Patience(interrupt=600.0)  # every method writes a checkpoint
_MAY_CHANGE = {"run", "run_dir", "json", "timeout", "only"}  # when a comparison goes on
PAGE, TABLE, FIGURES = "report.html", "table.csv", "comparison.json"


def compare(argv: Sequence[str], worker: Sequence[str] = ()) -> int:
    """`worker` is the command that runs `heat.main` on every host, if not the usual one."""
    earlier = _of_earlier_run(list(argv))
    config = parse(argv, earlier)
    run = Path(
        config.race.run_dir or f"runs/compare-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    )
    if earlier is not None:
        _require_same_settings(flat_values(config), earlier, run)
    _require_usable(run)
    yardstick = config.of_method(YARDSTICK, config.race.seed)
    task, _ = preflight_parts(yardstick, methods=len(config.methods))
    console = Console(stderr=config.race.json)
    lock = run_directory.Lock(run)
    try:
        code = Launcher(config, run, console, task, worker).run()
        return report(run, console, as_json=config.race.json) or code
    finally:
        lock.release()


def report(run: Path, console: Console, *, as_json: bool = False) -> int:
    """Shows a comparison's figures and writes its files; 1 if a method has failed."""
    with files.refusing_damage(run):
        comparison = gather(run)
        if not comparison.cells:
            _say(console, f"nothing has been measured in {run} yet")
            return 0
        figures = _clean(comparison.as_json())
        written = {PAGE: page(comparison), TABLE: csv_text(comparison)}
        written[FIGURES] = json.dumps(figures, indent=2) + "\n"
    for name, content in written.items():
        files.write(run / name, content)
    print_comparison(comparison, console)
    if as_json:
        print(json.dumps(_clean(_without_curves(comparison))))
    _say(console, f"the report is in {run / PAGE}")
    return int(any(cell.status == FAILED for cell in comparison.cells))


class Launcher:
    """Runs what has not been run yet of a comparison."""

    def __init__(
        self,
        config: CompareConfig,
        run: Path,
        console: Console,
        task: Task,
        worker: Sequence[str] = (),
    ) -> None:
        self._worker = list(worker) or entry("thinwire.compare.trial")
        self._config, self._run, self._console, self._task = config, run, console, task
        self._step = config.samples_per_step() * task.units_per_sample
        if not (run / records.SETTINGS).exists():
            task_says = {"unit": task.unit, "step": self._step}
            settings = {"settings": flat_values(config), "machine": describe_machine()}
            self._store(settings | task_says)

    def run(self) -> int:
        """0, or 128 + the signal that interrupted it."""
        fastest = self._config.rates[0]
        first = self._config.seeds[0]
        heats = [(rate, first) for rate in self._config.rates]
        heats += [(fastest, seed) for seed in self._config.seeds[1:]]
        only = self._config.race.only
        if only and only != fastest and self._unfinished(fastest, first):
            raise UsageError(
                f"--only {only}: it takes the losses of {fastest}, which has not been run to its "
                f"end in {self._run}: run --only {fastest} first, with the same --run-dir"
            )
        for number, (rate, seed) in enumerate(heats, start=1):
            while (methods := self._unfinished(rate, seed)) and only in ("", rate):
                title = f"{rate}, seed {seed} ({number} of {len(heats)})"
                outcome = self._heat(rate, seed, methods, title, len(heats))
                if outcome.code > 128 and outcome.failed is None:
                    _say(
                        self._console,
                        f"interrupted: the same command with --run-dir {self._run} goes on",
                    )
                    return outcome.code
                if outcome.failed is not None:
                    self._blame(rate, seed, outcome)
            self._keep_budget(rate, seed)
        return 0

    def _unfinished(self, rate: str, seed: int) -> list[str]:
        folder = records.heat_folder(self._run, rate, seed)
        return [name for name in self._config.methods if records.ended(folder / name) is None]

    def _heat(self, rate: str, seed: int, methods: list[str], title: str, heats: int) -> Outcome:
        config = self._config
        folder = records.heat_folder(self._run, rate, seed)
        for name in methods:
            if checkpoint.latest(folder / name) is None:
                records.forget(folder / name)
        active = _read(folder / records.ACTIVE)
        (folder / records.ACTIVE).unlink(missing_ok=True)
        link = config.link(rate)
        overrides = config.network.overrides(config.race.hosts)
        door = Path(tempfile.mkdtemp(prefix="thinwire-", dir=_memory_folder()))
        heat = Trial(
            folder=str(folder),
            rate=rate,
            seed=seed,
            methods=methods,
            settings=flat_values(config),
            reference=self._reference(rate, seed),
            tokens=self._budget(),
            seconds=config.race.seconds / heats,
            spent=active.get("spent", 0.0),
            door=str(door),
        )
        try:
            with Lab(config.race.hosts, link, overrides=overrides, seed=seed) as lab:
                measured = describe_checks(lab.check())
                records.write_json(folder / records.LAB, {"measured": measured})
                return self._watch(lab, heat, title)
        finally:
            shutil.rmtree(door, ignore_errors=True)

    def _watch(self, lab: Lab, heat: Trial, title: str) -> Outcome:
        folder = Path(heat.folder)
        tails = {name: MetricsTail(metrics_file(folder / name, 0)) for name in heat.methods}
        log = folder / "workers.log"
        with (
            files.open_to_append(log) as file,
            RaceDisplay(
                title, heat.methods, heat.tokens, self._task.unit, self._console
            ) as display,
        ):

            def note(line: Line) -> None:
                file.write(f"{line}\n")

            def tick() -> None:
                for name, tail in tails.items():
                    for record in tail.read():
                        display.update(name, record)
                display.tick()

            command = [*self._worker, str(heat.write())]
            outcome = lab.start(command, sink=note).wait(tick, patience=_PATIENCE)
            tick()
        return outcome

    def _blame(self, rate: str, seed: int, outcome: Outcome) -> None:
        """A worker has died: in whose turn, and why. The others start again without it."""
        folder = records.heat_folder(self._run, rate, seed)
        name = _read(folder / records.ACTIVE).get("contestant")
        words = [line.strip() for line in outcome.tail if line.strip()]
        why = words[-1] if words else outcome.reason
        if outcome.code == STORAGE:
            raise StorageError(why)
        if name is None or name == YARDSTICK:
            raise ThinwireError(f"{outcome.reason}: {why}; see {folder / 'workers.log'}")
        _say(self._console, f"{name} could not run, the others start again without it: {why}")
        records.append(folder / name, "end", why=records.FAILED, message=why)

    def _reference(self, rate: str, seed: int) -> str | None:
        fastest = self._config.rates[0]
        return None if rate == fastest else str(records.heat_folder(self._run, fastest, seed))

    def _budget(self) -> int:
        """Tokens; 0 until the first heat has found out what the time allows."""
        if not self._config.race.seconds:
            return self._config.race.steps * self._step
        return int(read_settings(self._run).get("budget", 0))

    def _keep_budget(self, rate: str, seed: int) -> None:
        found = _read(records.heat_folder(self._run, rate, seed) / records.ACTIVE)
        if self._config.race.seconds and not self._budget() and found.get("budget"):
            self._store(read_settings(self._run) | {"budget": found["budget"]})

    def _store(self, content: dict[str, Any]) -> None:
        records.write_json(self._run / records.SETTINGS, content)


def _of_earlier_run(argv: list[str]) -> dict[str, Any] | None:
    """The settings of the comparison that is to go on, where this command line names one."""
    run, rest = take_flag(argv, *RUN_FLAGS)
    file, _ = take_flag(rest, "--config")
    if run is None and file is not None:
        named = read_toml(Path(file)).get("run_dir")
        run = named if isinstance(named, str) else None
    if run is None or not (Path(run) / records.SETTINGS).exists():
        return None
    settings: dict[str, Any] = read_settings(Path(run))["settings"]
    return settings


def _require_usable(run: Path) -> None:
    run_directory.require_writable(run)
    if (run / CONFIG).exists():
        raise UsageError(
            f"{run} holds a run of thinwire train: name another directory with --run-dir"
        )


def _require_same_settings(now: dict[str, Any], before: dict[str, Any], run: Path) -> None:
    now = json.loads(json.dumps(now))
    for name in now.keys() - _MAY_CHANGE:
        if name in before and before[name] != now[name]:
            flag = as_flag(name)
            raise UsageError(
                f"the comparison in {run} was made with --{flag} {before[name]}, this one has "
                f"--{flag} {now[name]}: use the same, or name another directory with --run-dir"
            )


def _say(console: Console, text: str) -> None:
    console.print(printable(text), markup=False, emoji=False, highlight=False, soft_wrap=True)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = files.read_json(path)
    except (OSError, UsageError):
        return {}
    return content if isinstance(content, dict) else {}


def _memory_folder() -> str | None:
    """One that all hosts see and no disk is behind."""
    shared = Path("/dev/shm")
    return str(shared) if shared.is_dir() and os.access(shared, os.W_OK) else None


def _without_curves(comparison: Comparison) -> dict[str, Any]:
    content = comparison.as_json()
    for cell in content["cells"]:
        del cell["curve"], cell["timeline"]
    return content


def _clean(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, dict):
        return {key: _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return json_able(value)

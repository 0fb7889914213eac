"""Settings of a comparison: what all methods share, which methods they are, and for how long."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import tyro

from thinwire.command_line import check_number, parse_words
from thinwire.compare.overrides import Overrides
from thinwire.errors import UsageError
from thinwire.lab.command import LinkConfig
from thinwire.lab.link import Link
from thinwire.lab.network import MOST_HOSTS
from thinwire.lab.units import parse_rate
from thinwire.train import config as train_config
from thinwire.train.config import TrainConfig, config_type
from thinwire.train.data.tokens import DataConfig
from thinwire.train.flags import as_flag, flat_values, read_toml, take_flag, with_values
from thinwire.train.loop.optimizers import OptimizerConfig
from thinwire.train.methods.registry import METHODS
from thinwire.train.tasks.models import ModelConfig

YARDSTICK = "none"  # whose speed is 1
BASELINE = "ddp"  # whose loss and bytes the others are held against, where it takes part
_WIDEST = 12  # characters of a rate's name


@dataclass
class RaceConfig:
    """What is compared, and for how long."""

    methods: str = "ddp,overlapped,co2,one-bit-adam"
    """Names with commas between, or all: `thinwire methods` lists them. none runs beside them."""
    hosts: int = 4
    """Emulated hosts, with one worker each."""
    steps: int = 200
    """Budget: every method reads the tokens of so many steps of all hosts together."""
    seconds: float = 0.0
    """Instead of --steps: how long the comparison may take, apart from starting it. The budget is
    what all methods have read by then at the fastest rate."""
    timed: float = 60.0
    """Seconds for which a method is timed at each slower rate; the rest of its run is computed from
    them. It is timed for longer while its traffic is not yet what it will be."""
    limit: float = 600.0
    """Most seconds a method trains at one rate, whatever it has come to."""
    overtime: float = 1.5
    """How many times the budget a method may read that has not come to ddp's loss with it, to tell
    when it does; 1 stops all of them at the budget."""
    seeds: int = 1
    """Runs of each method at the fastest rate, of other weights and another order of the data. The
    slower rates are timed with the first."""
    seed: int = 0
    """The first of them."""
    evals: int = 20
    """Evaluations in a budget. Between two of them each method has its turn: lower it when
    evaluation takes longer than training, raise it for finer curves."""
    eval_windows: int = 64
    """Validation sequences of an evaluation, shared out among the workers."""
    accumulate: int = 1
    """Micro-batches per step."""
    bf16: bool = False
    """Compute in bfloat16 where it is safe (autocast)."""
    set: tuple[str, ...] = ()
    """Settings of single methods, as in co2.every=8 or lamb.lr=0.01; without a name, as in every=8,
    of all methods that have it."""
    run_dir: Annotated[str | None, tyro.conf.arg(aliases=["--run"])] = None
    """Directory of the comparison; runs/compare-<time> if not given. One that was interrupted goes
    on where it stopped."""
    only: str = ""
    """Of the rates, run this one now and leave the others for later, with the same --run-dir.
    The fastest comes first: the others take its losses."""
    timeout: float = 60.0
    """Seconds without a sign of life after which a worker counts as lost."""
    json: bool = False
    """Print the table as JSON on stdout, and everything else on stderr."""


@dataclass
class SteadyOptimizer(OptimizerConfig):
    """The optimizer of every replica, and its learning rate."""

    final_lr: float = 1.0
    """Share of the learning rate that is left at the end of the cosine. 1, a constant rate, makes
    the loss at a moment independent of the length of the run."""


@dataclass
class CompareConfig:
    """A comparison, whole."""

    race: RaceConfig = field(default_factory=RaceConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=SteadyOptimizer)
    network: LinkConfig = field(default_factory=lambda: LinkConfig(delay="10ms"))

    @property
    def rates(self) -> list[str]:
        """By name, the fastest first."""
        return sorted(_names(self.network.rate, "rate"), key=parse_rate, reverse=True)

    @property
    def methods(self) -> list[str]:
        """The yardstick first."""
        if self.race.methods.strip() == "all":
            return [YARDSTICK, *(name for name in METHODS if name != YARDSTICK)]
        named = _names(self.race.methods, "methods")
        return [YARDSTICK, *(name for name in named if name != YARDSTICK)]

    @property
    def seeds(self) -> list[int]:
        return [self.race.seed + number for number in range(self.race.seeds)]

    def link(self, rate: str) -> Link:
        n = self.network
        return Link.of(rate, up=n.up, down=n.down, delay=n.delay, jitter=n.jitter, loss=n.loss)

    def samples_per_step(self) -> int:
        """Of all hosts together, if each of them has a replica."""
        return self.race.hosts * self.race.accumulate * self.data.batch

    def of_method(self, name: str, seed: int) -> TrainConfig:
        """The training run of one method."""
        race = self.race
        values = {k: v for part in (self.data, self.model, self.optimizer) for k, v in _own(part)}
        values |= {"method": name, "seed": seed, "accumulate": race.accumulate, "bf16": race.bf16}
        values |= {"steps": race.steps, "eval_windows": race.eval_windows, "eval_every": 0}
        values |= {"workers": race.hosts, "timeout": race.timeout, "noise_scale": "off"}
        made = with_values(config_type(name)(), values | self._defaults_of(name))
        Overrides(race.set).apply(name, made)
        made.loop.steps *= made.pipeline.stages  # fewer replicas read as much in more steps
        return made

    def _defaults_of(self, name: str) -> dict[str, Any]:
        """What the method brings with it, unless the comparison was told otherwise."""
        told = flat_values(self)
        usual = flat_values(CompareConfig())
        found = METHODS[name].defaults if name in METHODS else {}
        return {k: v for k, v in found.items() if told.get(k) == usual.get(k)}


def parse(argv: Sequence[str], earlier: dict[str, Any] | None = None) -> CompareConfig:
    """Flags over --config over the settings of the comparison that goes on over the defaults."""
    file, rest = take_flag(list(argv), "--config")
    default = with_values(CompareConfig(), earlier or {})
    if file is not None:
        default = with_values(default, read_toml(Path(file)), file)
    config = parse_words(
        CompareConfig,
        rest,
        default=default,
        prog="thinwire compare",
        description="Train the same model under several methods on emulated links, side by side. "
        "--rate takes several, with commas between. --config FILE.toml reads settings from a file.",
    )
    check(config)
    return config


def check(config: CompareConfig) -> None:
    """Refuses what no comparison could use, naming the flag."""
    race = config.race
    for name, value in flat_values(config).items():
        if isinstance(value, float):
            check_number(f"--{as_flag(name)}", value)
    for name, least in _LEAST.items():
        if getattr(race, name) < least:
            raise UsageError(f"--{as_flag(name)} takes {_why(name, least)}, got {_of(race, name)}")
    if race.hosts > MOST_HOSTS:
        raise UsageError(f"--hosts takes 2 to {MOST_HOSTS}, got {race.hosts}")
    for name, most in _MOST.items():
        if getattr(race, name) > most:
            raise UsageError(f"--{as_flag(name)} takes at most {most}, got {_of(race, name)}")
    train_config.check_timeout(race.timeout)
    if race.seconds and config.optimizer.final_lr != 1.0:
        raise UsageError(
            f"--seconds leaves the number of steps open, but --final-lr {config.optimizer.final_lr}"
            " lowers the learning rate over them: give --steps, or --final-lr 1"
        )
    _check_rates(config)
    _check_methods(config)


_LEAST = {
    "hosts": 2,
    "steps": 1,
    "seconds": 0,
    "timed": 0,
    "limit": 1,
    "overtime": 1,
    "seeds": 1,
    "seed": 0,
    "evals": 1,
    "eval_windows": 1,
    "accumulate": 1,
}
_MOST = {"seeds": 1000, "evals": 1_000_000}


def _why(name: str, least: int) -> str:
    if name == "hosts":
        return f"{least} or more: one host has nobody to talk to"
    return f"a number >= {least}"


def _of(race: RaceConfig, name: str) -> str:
    return f"{getattr(race, name):g}"


def _check_rates(config: CompareConfig) -> None:
    rates = config.rates
    if len(rates) > 1 and (config.network.up or config.network.down):
        given = "up" if config.network.up else "down"
        raise UsageError(f"--{given} with several rates: compare one rate at a time, or leave it")
    for rate in rates:
        config.link(rate)
        if len(rate) > _WIDEST:
            raise UsageError(f"--rate {rate!r}: write it shorter, as in 100mbit")
    speeds = [parse_rate(rate) for rate in rates]
    if len(set(speeds)) < len(speeds):
        raise UsageError(f"--rate {config.network.rate}: the same rate is named twice")
    config.network.overrides(config.race.hosts)
    only = config.race.only
    if only and only not in rates:
        raise UsageError(f"--only {only}: --rate is {config.network.rate}, name one of these")


def _check_methods(config: CompareConfig) -> None:
    names = config.methods
    for name in names:
        if name not in METHODS:
            near = difflib.get_close_matches(name, METHODS, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise UsageError(
                f"--methods: there is no method {name!r}{hint}; name all, or some of "
                f"{', '.join(METHODS)}"
            )
    Overrides(config.race.set).check(names)
    for name in names:
        try:
            made = config.of_method(name, config.race.seed)
            _check_stages(name, made.pipeline.stages, config.race.hosts)
            train_config.check(made)
        except UsageError as error:
            # Of all methods some may not fit this number of hosts: the table says so.
            if config.race.methods.strip() != "all":
                raise UsageError(f"{name}: {error}") from None


def _check_stages(method: str, stages: int, hosts: int) -> None:
    if stages > 0 and hosts % stages:
        fits = hosts // stages * stages
        either = f"{fits} or {fits + stages}" if fits else f"{stages}"
        raise UsageError(
            f"it cuts every replica into {stages} stages, a host each, and --hosts {hosts} is no "
            f"multiple of that; give --hosts {either}, or --set {method}.stages={hosts}"
        )


def _names(text: str, flag: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise UsageError(f"--{flag} takes names with commas between, got {text!r}")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"--{flag} {text}: {twice!r} is named twice")
    return names


def _own(part: Any) -> list[tuple[str, Any]]:
    return [(f.name, getattr(part, f.name)) for f in fields(part)]

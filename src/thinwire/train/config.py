"""Settings of a training run: dataclasses as flags and as a TOML file.

Each part's dataclass stands beside the code it configures; here they are put together. Flags are
flat (`--steps`, not `--loop.steps`), and a TOML file has the same names with no tables. The flags
of the chosen method are among them: `thinwire train --method average --help` lists its own.
"""

import dataclasses
import difflib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import Any

import tyro

from thinwire.errors import UsageError
from thinwire.lab.command import LinkConfig
from thinwire.train.data import DataConfig
from thinwire.train.methods import find_method
from thinwire.train.models import ModelConfig
from thinwire.train.optimizers import OptimizerConfig

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]


@dataclass
class LoopConfig:
    """How long, and what is written on the way."""

    steps: int = 200
    """Optimizer steps of every replica."""
    accumulate: int = 1
    """Micro-batches per step. Raise it for a larger batch than memory holds."""
    seed: int = 0
    """Of the weights (the same on all replicas) and of the order of the data."""
    bf16: bool = False
    """Compute in bfloat16 where it is safe (autocast); weights and optimizer stay in float32."""
    eval_every: int = 50
    """Steps between evaluations on the mean of the replicas; 0 evaluates at the end only."""
    eval_windows: int = 256
    """Validation sequences of an evaluation, shared out among the replicas."""
    save_every: int = 0
    """Steps between checkpoints; 0 writes one at the end only (and at SIGTERM or Ctrl-C)."""
    keep: int = 2
    """Checkpoints kept."""
    run: str | None = None
    """Directory of the run; runs/<method>-<time> if not given. All ranks must see it."""
    resume: bool = False
    """Continue the run in --run from its latest checkpoint."""
    tensorboard: bool = False
    """Also write TensorBoard files into the run's directory (pip install thinwire[tensorboard])."""


@dataclass
class PlaceConfig:
    """Where the workers run, when neither torchrun nor a scheduler has started them."""

    workers: int = 1
    """Workers to start on this machine, one replica each."""
    lab: bool = False
    """Give each worker an emulated host of its own, joined by links as asked for below."""
    timeout: float = 60.0
    """Seconds without a sign of life after which a worker counts as lost."""


@dataclass
class TrainConfig:
    """A run, whole. `settings` holds the method's own flags."""

    method: str = "ddp"
    """How the replicas work together: `thinwire methods` lists the names."""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    place: PlaceConfig = field(default_factory=PlaceConfig)
    network: LinkConfig = field(default_factory=LinkConfig)
    settings: Any = None

    def shared(self) -> dict[str, Any]:
        """What must be equal on all ranks, by flag name."""
        own = {"run", "resume", "tensorboard", "workers", "lab"}
        network = {f.name for f in fields(LinkConfig)}
        return {k: v for k, v in flat_values(self).items() if k not in own | network}


def parse(argv: Sequence[str], prog: str = "thinwire train") -> TrainConfig:
    """Flags over the TOML file named by --config over the defaults; checked."""
    file, rest = _take_flag(list(argv), "--config")
    given = _read_toml(Path(file)) if file else {}
    method, _ = _take_flag(list(rest), "--method")
    config_type = _config_type(method or str(given.get("method", TrainConfig.method)))
    default = _with_values(config_type(), given, file or "")
    config = tyro.cli(
        config_type,
        config=(tyro.conf.OmitArgPrefixes,),
        args=rest,
        default=default,
        prog=prog,
        description="Train a model. --config FILE.toml reads the same settings from a file.",
    )
    check(config)
    return config


def check(config: TrainConfig) -> None:
    """Refuses values that no part of the run could use, naming the flag."""
    for name, least in _LEAST.items():
        value = flat_values(config)[name]
        if value < least:
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} takes a number >= {least}, got {value}")
    if config.place.timeout <= 0:
        raise UsageError(f"--timeout takes seconds > 0, got {config.place.timeout}")
    if not config.place.lab and config.network != LinkConfig():
        changed = next(
            f.name
            for f in fields(LinkConfig)
            if getattr(config.network, f.name) != getattr(LinkConfig(), f.name)
        )
        raise UsageError(f"--{changed} shapes emulated links: add --lab to run in the lab")
    if config.loop.resume and not config.loop.run:
        raise UsageError("--resume continues an earlier run: name its directory with --run")
    find_method(config.method).check(config.settings)


_LEAST = {
    "workers": 1,
    "steps": 1,
    "accumulate": 1,
    "batch": 1,
    "context": 1,
    "keep": 1,
    "eval_every": 0,
    "eval_windows": 1,
    "save_every": 0,
    "warmup": 0,
}


def flat_values(config: Any) -> dict[str, Any]:
    """Every setting by its flag's name (underscores), whatever part it belongs to."""
    return {f.name: getattr(part, f.name) for part, f in _leaves(config)}


def _leaves(config: Any) -> Iterator[tuple[Any, "dataclasses.Field[Any]"]]:
    for f in fields(config):
        value = getattr(config, f.name)
        if is_dataclass(value):
            yield from _leaves(value)
        elif f.name != "settings":
            yield config, f


def _config_type(method: str) -> type[TrainConfig]:
    """TrainConfig with the method's own settings in place of the empty ones."""
    settings = find_method(method).settings
    made = make_dataclass(
        "TrainConfig",
        [("settings", settings, field(default_factory=settings))],
        bases=(TrainConfig,),
    )
    made.__doc__ = "Where the replicas' results meet, and everything else about a run."
    return made


def _take_flag(argv: list[str], flag: str) -> tuple[str | None, list[str]]:
    """The value of `--flag VALUE` or `--flag=VALUE`, and the other arguments."""
    for index, word in enumerate(argv):
        if word == flag:
            if index + 1 == len(argv):
                raise UsageError(f"{flag} needs a value")
            return argv[index + 1], argv[:index] + argv[index + 2 :]
        if word.startswith(flag + "="):
            return word.split("=", 1)[1], argv[:index] + argv[index + 1 :]
    return None, argv


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"--config {path} is not TOML: {error}") from error
    return {key.replace("-", "_"): value for key, value in content.items()}


def _with_values(config: TrainConfig, values: dict[str, Any], source: str) -> TrainConfig:
    places = {f.name: (part, f) for part, f in _leaves(config)}
    for name, value in values.items():
        if name not in places:
            near = difflib.get_close_matches(name, places, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(f"{source}: there is no setting {name!r}{hint}")
        part, f = places[name]
        setattr(part, f.name, _fitting(name, value, getattr(part, f.name), source))
    return config


def _fitting(name: str, value: Any, default: Any, source: str) -> Any:
    """Numbers may be written without a point; anything else must have the default's type."""
    if isinstance(default, float) and type(value) is int:
        return float(value)
    if isinstance(default, tuple) and isinstance(value, list):
        return tuple(value)
    if default is not None and type(value) is not type(default):
        raise UsageError(
            f"{source}: {name} takes a {type(default).__name__} such as {default!r}, got {value!r}"
        )
    return value

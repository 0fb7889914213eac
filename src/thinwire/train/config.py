"""Settings of a training run: dataclasses as flags and as a TOML file.

Each part's dataclass stands beside the code it configures; here they are put together. Flags are
flat (`--steps`, not `--loop.steps`), and a TOML file has the same names with no tables. The flags
of the chosen method are among them: `thinwire train --method average --help` lists its own.

A flag beats the file named by --config, that beats - with --resume - the settings the run was made
with, and those beat the defaults: `thinwire train --run DIR --resume` says all there is to say.
"""

import dataclasses
import difflib
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

from thinwire.errors import UsageError
from thinwire.lab.command import LinkConfig
from thinwire.train.adversary import AdversaryConfig
from thinwire.train.data import DataConfig
from thinwire.train.method import Method
from thinwire.train.methods import find_method
from thinwire.train.models import ModelConfig
from thinwire.train.optimizers import OptimizerConfig
from thinwire.train.pipelining import PipelineConfig, check_pipeline

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
    """Validation sequences or images of an evaluation, shared out among the replicas."""
    save_every: int = 0
    """Steps between checkpoints; 0 writes one at the end only (and at SIGTERM or Ctrl-C)."""
    keep: int = 2
    """Checkpoints kept."""
    run: str | None = None
    """Directory of the run; runs/<method>-<time> if not given. All ranks must see it."""
    resume: bool = False
    """Continue the run in --run from its latest checkpoint, with its settings where no other are
    given."""
    noise_scale: Literal["auto", "on", "off"] = "auto"
    """Estimate the gradient noise scale: beyond which batch more replicas no longer pay. auto does
    so where it can: methods that average gradients exactly, any other with --accumulate 2 or more.
    on refuses where it cannot."""
    tensorboard: bool = False
    """Also write TensorBoard files into the run's directory (pip install thinwire[tensorboard])."""


@dataclass
class PlaceConfig:
    """Where the workers run, when neither torchrun nor a scheduler has started them."""

    workers: int = 1
    """Workers to start on this machine, one replica each (or one stage of it: --stages)."""
    replicas: int = 0
    """Replicas to start, each on as many workers as it has --stages: instead of --workers."""
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
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    adversary: AdversaryConfig = field(default_factory=AdversaryConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    place: PlaceConfig = field(default_factory=PlaceConfig)
    network: LinkConfig = field(default_factory=LinkConfig)
    settings: Any = None

    def shared(self) -> dict[str, Any]:
        """What must be equal on all ranks, by flag name."""
        own = {"tensorboard", *_PLACE}
        return {k: v for k, v in flat_values(self).items() if k not in own}

    def kept(self) -> dict[str, Any]:
        """What a run cannot change when it is resumed: a checkpoint's state depends on it."""
        values = flat_values(self)
        names = ["method", "seed", "shards", "optimizer", "optimizer_arg", "weight_decay"]
        names += ["stages", "schedule", "stash", "lead"]
        names += ["adversarial"] if self.adversary.adversarial > 0 else []
        names += [f.name for f in fields(self.settings)] if self.settings else []
        kept: dict[str, Any] = json.loads(json.dumps({name: values[name] for name in names}))
        return kept


CONFIG = "config.json"  # in a run's directory: its settings by flag name
_PLACE = {"workers", "replicas", "lab", *(f.name for f in fields(LinkConfig))}


def parse(argv: Sequence[str], prog: str = "thinwire train") -> TrainConfig:
    """Flags over --config over the resumed run's settings over the defaults; checked."""
    file, rest = _take_flag(list(argv), "--config")
    given = _read_toml(Path(file)) if file else {}
    earlier = _of_resumed_run(rest, given)
    method, _ = _take_flag(list(rest), "--method")
    name = method or str(given.get("method", earlier.get("method", TrainConfig.method)))
    config_type = _config_type(name)
    default = _with_values(config_type(), dict(find_method(name).defaults))
    default = _with_values(default, earlier)
    default = _with_values(default, given, file or "")
    config = tyro.cli(
        config_type,
        config=(tyro.conf.OmitArgPrefixes,),
        args=rest,
        default=default,
        prog=prog,
        description="Train a model. --config FILE.toml reads the same settings from a file.",
    )
    _count_workers(config, explicit="workers" in given or _take_flag(rest, "--workers")[0])
    check(config)
    return config


def _count_workers(config: TrainConfig, explicit: object) -> None:
    """--replicas says how many workers there are; without either there is one replica."""
    place, stages = config.place, config.pipeline.stages
    if place.replicas == 0 and (explicit or place.workers > 1):
        return
    wanted = max(1, place.replicas) * max(1, stages)
    if explicit and place.workers != wanted:
        raise UsageError(
            f"--workers {place.workers} and --replicas {place.replicas} with --stages {stages} "
            f"({wanted} workers) contradict each other: leave one out"
        )
    place.workers = wanted


def check(config: TrainConfig) -> None:
    """Refuses values that no part of the run could use, naming the flag."""
    values = flat_values(config)
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"--{_flag(name)} takes a finite number, got {value}")
    for name, least in _LEAST.items():
        if values[name] < least:
            raise UsageError(f"--{_flag(name)} takes a number >= {least}, got {values[name]}")
    if config.loop.seed >= 2**63:
        raise UsageError(f"--seed takes a number below 2**63, got {config.loop.seed}")
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
    method = find_method(config.method)
    method.check(config.settings)
    first = method.first_steps(config.settings)
    if 0 < config.loop.steps <= first:
        raise UsageError(
            f"--freeze-at {first}: a run of --steps {config.loop.steps} would be dense throughout; "
            "freeze earlier, or leave it out"
        )
    _check_stages(config, method)
    if config.model.shards > 1 and not method.shardable:
        raise UsageError(
            f"--shards {config.model.shards}: {method.name} keeps each replica whole on one rank; "
            "use another method, or --shards 1"
        )
    replicas = _workers(config) // (config.model.shards * config.pipeline.stages)
    method.fits(config.settings, max(1, replicas))
    _check_noise_scale(config, method.averages(config.settings), replicas)


def _workers(config: TrainConfig) -> int:
    """As many as whoever has started this process says; else as many as it will start."""
    started = os.environ.get("WORLD_SIZE", "") if "RANK" in os.environ else ""
    return int(started) if started.isdigit() else config.place.workers


def _check_noise_scale(config: TrainConfig, averages: bool, replicas: int) -> None:
    """Refuses --noise-scale on where a step has no two gradients to compare."""
    if config.loop.noise_scale != "on" or config.loop.accumulate > 1:
        return
    if replicas <= 1:
        raise UsageError("--noise-scale on: one replica needs two passes a step: --accumulate 2")
    if not averages:
        raise UsageError(
            f"--noise-scale on: {config.method} never shows the exact mean gradient, so a replica "
            "compares its own passes, and a step needs two: --accumulate 2"
        )


def _check_stages(config: TrainConfig, method: Method) -> None:
    stages = config.pipeline.stages
    check_pipeline(config.pipeline, config.loop.accumulate)
    if stages == 1:
        return
    if not method.stageable:
        raise UsageError(
            f"--stages {stages}: {method.name} needs each replica whole on one rank; use another "
            "method, or --stages 1"
        )
    if config.model.shards > 1:
        raise UsageError("--stages and --shards both spread a replica: use one of them")
    if config.model.compile or config.model.checkpoint_activations:
        flag = "compile" if config.model.compile else "checkpoint-activations"
        hint = "leave it out" if config.model.compile else "use --recompute"
        raise UsageError(f"--{flag} is for a model in one piece, not for --stages {stages}: {hint}")
    if config.loop.noise_scale == "on":
        raise UsageError(f"--noise-scale on is for replicas in one piece, not --stages {stages}")
    workers = _workers(config)
    if workers % stages:
        raise UsageError(
            f"--stages {stages}: {workers} workers are no multiple of it; start stages x replicas "
            f"of them, as with --replicas {max(1, workers // stages)}"
        )


_LEAST = {
    "workers": 1,
    "replicas": 0,
    "stages": 1,
    "lead": 0,
    "shards": 1,
    "steps": 1,
    "accumulate": 1,
    "batch": 1,
    "context": 1,
    "keep": 1,
    "eval_every": 0,
    "eval_windows": 1,
    "save_every": 0,
    "warmup": 0,
    "seed": 0,
    "clip": 0,
    "adversarial": 0,
    "adversarial_weight": 0,
    "final_lr": 0,
    "lr": 0,
    "weight_decay": 0,
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


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _take_flag(argv: list[str], flag: str) -> tuple[str | None, list[str]]:
    """The last value of `--flag VALUE` or `--flag=VALUE`, and the other arguments."""
    value, rest, words = None, [], iter(argv)
    for word in words:
        if word == flag:
            value = next(words, None)
            if value is None:
                raise UsageError(f"{flag} needs a value")
        elif word.startswith(flag + "="):
            value = word.split("=", 1)[1]
        else:
            rest.append(word)
    return value, rest


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path} is not TOML: {error}") from error
    return {key.replace("-", "_"): value for key, value in content.items()}


def _of_resumed_run(argv: list[str], given: dict[str, Any]) -> dict[str, Any]:
    """The settings of the run that is to be continued, where this command line says which."""
    run = _take_flag(argv, "--run")[0] or given.get("run")
    if not isinstance(run, str) or not ("--resume" in argv or given.get("resume") is True):
        return {}
    path = Path(run) / CONFIG
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the settings in {path}: {error}") from None
    # Whoever has started this worker has also decided where it runs.
    other = {"run", "resume"} | (_PLACE if "RANK" in os.environ else set())
    return {name: value for name, value in content.items() if name not in other}


def _with_values(config: TrainConfig, values: dict[str, Any], source: str = "") -> TrainConfig:
    """Sets values by name. Those of an earlier run, which have no source, may be of another method
    or version: what does not fit is left out, and the checkpoint itself is compared later."""
    places = {f.name: (part, f) for part, f in _leaves(config)}
    for name, value in values.items():
        if name not in places:
            if not source:
                continue
            near = difflib.get_close_matches(name, places, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(f"{source}: there is no setting {name!r}{hint}")
        part, f = places[name]
        kind = get_type_hints(type(part))[f.name]
        try:
            setattr(part, f.name, _fitting(value, kind))
        except TypeError:
            if source:
                wanted = f"{source}: {name} takes {_spoken(kind)}, got {value!r}"
                raise UsageError(wanted) from None
    return config


def _fitting(value: Any, kind: Any) -> Any:
    """The value as `kind` has it, or TypeError. TOML and JSON have no tuples, and 1 may be 1.0."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is float and type(value) is int:
        return float(value)
    if origin is tuple and isinstance(value, list):
        return tuple(_fitting(item, inner[0]) for item in value)
    if origin in (Union, UnionType):
        return None if value is None else _fitting(value, _without_none(kind))
    if value in inner if origin is Literal else type(value) is kind:
        return value
    raise TypeError


def _without_none(kind: Any) -> Any:
    return next(option for option in get_args(kind) if option is not NoneType)


def _spoken(kind: Any) -> str:
    """What a setting of this type takes, for people."""
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return _spoken(_without_none(kind))
    if origin is Literal:
        return " or ".join(json.dumps(choice) for choice in get_args(kind))
    if origin is tuple:
        return "a list, each of it " + _spoken(get_args(kind)[0])
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text in quotes"}
    return words[kind]

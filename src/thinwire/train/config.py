"""Settings of a training run: dataclasses as flags and as a TOML file.

Each part's dataclass stands beside the code it configures; here they are put together. Flags are
flat (`--steps`, not `--loop.steps`), and a TOML file has the same names with no tables. The flags
of the chosen method are among them: `thinwire train --method average --help` lists its own.

A flag beats the file named by --config, that beats - with --resume - the settings the run was made
with, and those beat the defaults: `thinwire train --run-dir DIR --resume` says all there is to say.
"""

import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from thinwire.command_line import check_number, parse_words
from thinwire.errors import UsageError
from thinwire.files import MOST_SETTINGS, load_json, read_bytes
from thinwire.lab.command import LinkConfig
from thinwire.train.data.tokens import DataConfig
from thinwire.train.flags import as_flag, flat_values, read_toml, take_flag, with_values
from thinwire.train.loop.optimizers import OptimizerConfig
from thinwire.train.loop.pipelining import PipelineConfig, check_pipeline
from thinwire.train.methods.method import Method
from thinwire.train.methods.registry import find_method
from thinwire.train.tasks.adversary import AdversaryConfig
from thinwire.train.tasks.models import ModelConfig
from thinwire.wire import world

__all__ = ["CONFIG", "LoopConfig", "TrainConfig", "check", "config_type", "flat_values", "parse"]


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
    run_dir: Annotated[str | None, tyro.conf.arg(aliases=["--run"])] = None
    """Directory of the run; runs/<method>-<time> if not given. All ranks must see it. --run is the
    same, but not under torchrun, which takes that for a flag of its own."""
    resume: bool = False
    """Continue the run in --run-dir from its latest checkpoint, with its settings where no other
    are given."""
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
_EARLIER = f"the run's {CONFIG}"
CHECKSUM = "checksum"  # of all others in it
TIMEOUTS = (0.1, 1e7)  # s
RUN_FLAGS = ("--run-dir", "--run_dir", "--run")
_PLACE = {"workers", "replicas", "lab", *(f.name for f in fields(LinkConfig))}


def parse(argv: Sequence[str], prog: str = "thinwire train") -> TrainConfig:
    """Flags over --config over the resumed run's settings over the defaults; checked."""
    file, rest = take_flag(list(argv), "--config")
    given = read_toml(Path(file)) if file is not None else {}
    earlier = _of_resumed_run(rest, given)
    method, _ = take_flag(list(rest), "--method")
    name = method or str(given.get("method", earlier.get("method", TrainConfig.method)))
    kind = config_type(name)
    default = with_values(kind(), dict(find_method(name).defaults))
    # Another method's settings may have these names and other types; that method is refused later.
    same = earlier.get("method", name) == name
    default = with_values(default, earlier, _EARLIER if same else "", others=True)
    default = with_values(default, given, file or "")
    config = parse_words(
        kind,
        rest,
        default=default,
        prog=prog,
        description="Train a model. --config FILE.toml reads the same settings from a file.",
    )
    _count_workers(config, explicit="workers" in given or take_flag(rest, "--workers")[0])
    check(config)
    return config


def _count_workers(config: TrainConfig, explicit: object) -> None:
    """--replicas says how many workers there are; without either there is one replica."""
    place, stages = config.place, config.pipeline.stages
    if place.replicas == 0 and (explicit or place.workers > 1 or "RANK" in os.environ):
        return  # torchrun has counted them
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
        if isinstance(value, float):
            check_number(f"--{as_flag(name)}", value)
    for name, least in _LEAST.items():
        if values[name] < least:
            raise UsageError(f"--{as_flag(name)} takes a number >= {least}, got {values[name]}")
    check_timeout(config.place.timeout)
    if not config.place.lab and config.network != LinkConfig():
        changed = next(
            f.name
            for f in fields(LinkConfig)
            if getattr(config.network, f.name) != getattr(LinkConfig(), f.name)
        )
        raise UsageError(f"--{changed} shapes emulated links: add --lab to run in the lab")
    if config.loop.resume and not config.loop.run_dir:
        raise UsageError("--resume continues an earlier run: name its directory with --run-dir")
    method = find_method(config.method)
    with world.trial():
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


def check_timeout(seconds: float) -> None:
    """Shorter ones lose peers that are well, and clocks do not count longer ones."""
    least, most = TIMEOUTS
    if not least <= seconds <= most:
        raise UsageError(
            f"--timeout takes seconds > 0, from {least:g} to {most:g}, got {seconds:g}"
        )


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


def config_type(method: str) -> type[TrainConfig]:
    """TrainConfig with the method's own settings in place of the empty ones."""
    settings = find_method(method).settings
    made = make_dataclass(
        "TrainConfig",
        [("settings", settings, field(default_factory=settings))],
        bases=(TrainConfig,),
    )
    made.__doc__ = "Where the replicas' results meet, and everything else about a run."
    return made


def _of_resumed_run(argv: list[str], given: dict[str, Any]) -> dict[str, Any]:
    """The settings of the run that is to be continued, where this command line says which."""
    run = take_flag(argv, *RUN_FLAGS)[0] or given.get("run_dir")
    if not isinstance(run, str) or not ("--resume" in argv or given.get("resume") is True):
        return {}
    content = _read_settings(Path(run))
    # Whoever has started this worker has also decided where it runs.
    other = {"run", "run_dir", "resume"} | (_PLACE if "RANK" in os.environ else set())
    return {name: value for name, value in content.items() if name not in other}


def _read_settings(run: Path) -> dict[str, Any]:
    """What is in a run's config.json; empty where there is no run to continue at all, which is
    refused elsewhere."""
    path = run / CONFIG
    try:
        content = load_json(read_bytes(path, MOST_SETTINGS))
    except FileNotFoundError:
        if (run / "checkpoints" / "latest").is_file():
            raise UsageError(
                f"{path} is missing, which has the settings of the run: put it back, or write {{}} "
                "into it to continue with the defaults and the flags given"
            ) from None
        return {}
    except OSError as error:
        raise UsageError(f"cannot read the settings in {path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"cannot read the settings in {path}: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path} holds no settings by name: put back what the run has written")
    if CHECKSUM in content and content != with_checksum(content):
        raise UsageError(
            f"{path} has changed since the run wrote it: put it back; or, if the change was meant, "
            f"remove its line {CHECKSUM!r}"
        )
    return content


def with_checksum(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as they are written: damage to a digit would change the run without a word."""
    rest = {name: value for name, value in settings.items() if name != CHECKSUM}
    text = json.dumps(rest, sort_keys=True)
    return {**rest, CHECKSUM: f"{zlib.crc32(text.encode()):08x}"}

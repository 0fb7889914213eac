"""One replica cut into stages: its flags, the mesh of the workers, and who holds which part.

The ranks form a mesh (replica, stage): rank = replica * stages + stage. A pipeline is a row of it,
the method averages along its columns, and a checkpoint keeps the parts rank by rank under the names
they have in the whole model.
"""

import itertools
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from thinwire.errors import UsageError
from thinwire.pipeline import Stage, measure, parts_of, split
from thinwire.pipeline.sparse_activations import end_of
from thinwire.train.tasks.models import Stack
from thinwire.wire import codecs
from thinwire.wire.codecs import Codec, Threshold
from thinwire.wire.world import World


@dataclass
class PipelineConfig:
    """A replica in several stages, each on a worker of its own."""

    stages: int = 1
    """Workers in a row that hold one replica, each some of its layers. Raise it when a replica does
    not fit one worker, or when activations are smaller than weights and links are slow."""
    schedule: Literal["1f1b", "2bw", "flush"] = "1f1b"
    """1f1b never waits, and stage s of P computes gradients P-1-s updates late. 2bw: one update
    late at any depth; needs --accumulate of --stages or more. flush: synchronous, the yardstick."""
    stash: bool = True
    """Keep the weights of every forward for its backward. Without it, memory is saved and stages
    get learning rates and momentum of their own."""
    recompute: bool = False
    """Run forwards again instead of keeping their activations: less memory, a third more
    compute."""
    lead: int = 0
    """Further micro-batches in flight between neighbours. Raise it when time is exposed on links
    with a long delay; each one makes gradients another update late per hop."""
    activation_codec: str = "fp32"
    """Form in which activations go to the next stage: fp32, bf16, fp16, int8, int4, or the largest
    of them as in threshold:0.1, whose gradients come back the same way."""
    gradient_codec: str = "fp32"
    """Form in which their gradients come back. Keep it a step wider than the activations'."""
    cut: tuple[int, ...] = ()
    """By hand: the first part of every stage but the first, such as 3 for two stages. The parts are
    the embedding, the blocks and the head."""
    balance: Literal["size", "time"] = "size"
    """Where the model is cut otherwise: equal numbers of parameters, the same in every run, or
    equal times, measured before the first step."""


def check_pipeline(config: PipelineConfig, accumulate: int) -> None:
    """Refuses what no pipeline can do, naming the flag."""
    alone = PipelineConfig()
    if config.stages == 1:
        changed = next((n for n, v in vars(config).items() if v != getattr(alone, n)), None)
        if changed is not None:
            flag = changed.replace("_", "-")
            raise UsageError(f"--{flag} is a setting of pipelines: add --stages 2 or more")
        return
    if config.schedule == "2bw" and accumulate < config.stages * (1 + config.lead):
        raise UsageError(
            f"--schedule 2bw with --stages {config.stages} and --lead {config.lead} needs "
            f"--accumulate {config.stages * (1 + config.lead)} or more, got {accumulate}"
        )
    if config.schedule == "2bw" and not config.stash:
        raise UsageError("--schedule 2bw is its two versions of the weights: leave out --no-stash")
    there = parse_codec(config.activation_codec, "activation_codec")
    back = parse_codec(config.gradient_codec, "gradient_codec")
    try:
        end_of(there, back)
    except ValueError as error:
        raise UsageError(f"--gradient-codec {config.gradient_codec}: {error}") from None


def parse_codec(text: str, name: str) -> Codec | Threshold | None:
    codec = codecs.parse(text)
    if isinstance(codec, Threshold):
        return Threshold(codec.density, codec.refresh, value_bits=8)  # nothing makes up for less
    if not isinstance(codec, Codec):
        raise UsageError(
            f"--{name.replace('_', '-')} {text}: the errors of one micro-batch say nothing of the "
            f"next; use {text.removesuffix('+ef')}"
        )
    return None if text == "fp32" else codec


def make_mesh(world: World, stages: int) -> DeviceMesh:
    """The (replica, stage) mesh of all ranks."""
    if world.size % stages:
        raise UsageError(
            f"--stages {stages}: {world.size} workers do not divide into rows of {stages}; start "
            "stages x replicas of them"
        )
    return init_device_mesh(
        world.device.type, (world.size // stages, stages), mesh_dim_names=("replica", "stage")
    )


def cut_model(model: Stack, config: PipelineConfig, sample: Tensor | None = None) -> list[Stage]:
    """The model's stages, as the flags say; all ranks must come here if times are measured.

    Without a sample nothing is measured: that is how a model is tried that has no weights yet.
    """
    by_time = config.balance == "time" and not config.cut and sample is not None
    try:
        costs = measure(parts_of(model), sample) if by_time and sample is not None else None
        return split(model, config.stages, at=config.cut or None, costs=costs)
    except ValueError as error:
        raise UsageError(f"--stages {config.stages}: {error}") from None


def cuts_of(stages: list[Stage]) -> tuple[int, ...]:
    """The first part of every stage but the first."""
    return tuple(itertools.accumulate(len(stage.names) for stage in stages[:-1]))

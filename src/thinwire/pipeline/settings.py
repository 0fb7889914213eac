"""Settings: what AsyncPipeline and SimulatedPipeline have in common, checked once."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from thinwire.checks import (
    refusal,
    require_at_least,
    require_bool,
    require_callable,
    require_choice,
    require_count,
    require_kind,
    require_model,
)
from thinwire.pipeline.schedule import NAMES, Name, Schedule
from thinwire.pipeline.sparse_activations import End, end_of
from thinwire.pipeline.stage import ClippedStep, Loss, StageRunner, Step
from thinwire.wire.account import Account
from thinwire.wire.checks import require_codec
from thinwire.wire.codecs import Codec, Threshold

_TYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Settings:
    """See `AsyncPipeline`, which explains them."""

    owner: str
    """The class they were given to, for errors."""
    loss: Loss
    schedule: Name
    stash: bool
    recompute: bool
    look_ahead: float
    accumulate: int
    lead: int
    codec: Codec | Threshold | None
    gradient_codec: Codec | Threshold | None
    clip: float
    autocast: torch.dtype | None

    def __post_init__(self) -> None:
        name = self.owner
        require_loss(name, self.loss)
        require_choice(name, "schedule", self.schedule, NAMES)
        checked = {
            "stash": require_bool(name, "stash", self.stash),
            "recompute": require_bool(name, "recompute", self.recompute),
            "look_ahead": require_at_least(name, "look_ahead", self.look_ahead, 0),
            "accumulate": require_count(name, "accumulate", self.accumulate),
            "lead": require_count(name, "lead", self.lead, least=0),
            "clip": require_at_least(name, "clip", self.clip, 0),
        }
        for key, value in checked.items():
            object.__setattr__(self, key, value)
        require_stateless(name, "codec", self.codec)
        require_stateless(name, "gradient_codec", self.gradient_codec)
        known = isinstance(self.autocast, torch.dtype) and self.autocast in _TYPES
        if self.autocast is not None and not known:
            raise refusal(name, "autocast", "torch.bfloat16, torch.float16 or None", self.autocast)

    def step(self, module: nn.Module, optimizer: torch.optim.Optimizer, account: Account) -> Step:
        return ClippedStep(module, optimizer, self.clip, account)

    def runner(self, module: nn.Module, step: Step, stage: int, stages: int) -> StageRunner:
        return StageRunner(
            module,
            Schedule(self.schedule, stage, stages, self.accumulate, self.lead),
            step,
            loss=self.loss if stage == stages - 1 else None,
            stash=self.stash,
            recompute=self.recompute,
            look_ahead=self.look_ahead,
            autocast=self.autocast,
        )

    def ends(self) -> list[End]:
        """Of one stage, towards the one before it and the one after it."""
        return [end_of(self.codec, self.gradient_codec) for _ in range(2)]

    def common(self) -> dict[str, Any]:
        """What must be the same on all stages."""
        keys = ("schedule", "stash", "recompute", "look_ahead", "accumulate", "lead")
        texts = ("codec", "gradient_codec", "autocast")
        return {key: getattr(self, key) for key in keys} | {
            key: repr(getattr(self, key)) for key in texts
        }


def require_loss(name: str, loss: Any) -> None:
    require_callable(name, "loss", loss, "loss(output, y)")


def require_stage(
    name: str, module: Any, optimizer: Any, *, keys: str = "", trains: bool = True
) -> None:
    """A part of the model and an optimizer that trains it. `keys` is "s" where both are lists."""
    require_model(name, f"module{keys}", module)
    wants = "a torch.optim.Optimizer over the stage's parameters"
    require_kind(name, f"optimizer{keys}", optimizer, torch.optim.Optimizer, wants)
    own = {p for p in module.parameters() if p.requires_grad}
    trained = {p for group in optimizer.param_groups for p in group["params"]}
    if trains and own and not own & trained:
        raise ValueError(
            f"{name}(optimizer{keys}=...) takes {wants}; this one trains none of those of "
            f"{type(module).__name__}"
        )


def require_stateless(name: str, key: str, codec: Any) -> None:
    """A Threshold is taken for what it selects; its memory is not used."""
    if isinstance(codec, Threshold):
        if codec.momentum:
            raise ValueError(
                f"{name}({key}={codec!r}): momentum correction is for gradients of weights; leave "
                "it out"
            )
        return
    why = "errors of one micro-batch's activations say nothing of the next one's"
    require_codec(name, key, codec, memory=False, why=why)

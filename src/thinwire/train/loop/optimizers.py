"""The inner optimizer by name, and the learning rate over a run."""

import inspect
import json
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from thinwire.errors import UsageError
from thinwire.optim import AsyncNAdam, Lamb, Lars

_OURS_TO_GIVE = ("self", "params", "updates")


@dataclass
class OptimizerConfig:
    """The optimizer of every replica, and its learning rate."""

    optimizer: str = "AdamW"
    """Any optimizer of torch.optim by name; Lars or Lamb for large batches; AsyncNAdam: NAdam for
    asynchronous pipelines."""
    lr: float = 1e-3
    """Peak learning rate. Halve it when the loss jumps or steps are skipped."""
    weight_decay: float = 0.01
    """Of matrices and embeddings; norms are never decayed."""
    optimizer_arg: tuple[str, ...] = ()
    """More arguments of the optimizer, such as betas=[0.9,0.95] or momentum=0.9."""
    warmup: int = 20
    """Steps over which the learning rate rises from 0."""
    final_lr: float = 0.1
    """Share of the learning rate that is left at the end of the cosine."""
    clip: float = 1.0
    """Largest norm of a replica's gradient; 0 does not clip."""


def build_optimizer(
    config: OptimizerConfig, model: nn.Module, steps: int = 1
) -> torch.optim.Optimizer:
    """`steps` is the length of the run, for optimizers with a schedule of their own over it."""
    kind = _find(config.optimizer)
    takes = inspect.signature(kind.__init__).parameters
    arguments = _parse_arguments(config.optimizer_arg)
    for name in arguments:
        if name not in takes or name in _OURS_TO_GIVE:
            known = ", ".join(n for n in takes if n not in _OURS_TO_GIVE)
            raise UsageError(f"--optimizer-arg {name}: {kind.__name__} takes {known}")
    if "updates" in takes:
        arguments["updates"] = steps
    groups: list[dict[str, Any]] = [{"params": list(model.parameters())}]
    if "weight_decay" in takes and "weight_decay" not in arguments:
        matrices = [p for p in model.parameters() if p.dim() >= 2]
        others = [p for p in model.parameters() if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
    try:
        built: torch.optim.Optimizer = kind(
            [g for g in groups if g["params"]], lr=config.lr, **arguments
        )
    except (TypeError, ValueError, RuntimeError, OverflowError, AssertionError) as error:
        cause = " ".join(str(error).split())
        raise UsageError(f"--optimizer {kind.__name__}: {cause}") from error
    return built


def try_optimizer(config: OptimizerConfig, steps: int = 1) -> float:
    """Refuses, before anything is started, arguments that fail only when the optimizer steps.
    Returns how many copies of the weights its state is as large as."""
    model = nn.Linear(2, 2, bias=False)
    optimizer = build_optimizer(config, model, steps)
    model(torch.ones(1, 2)).sum().backward()
    try:
        optimizer.step()
    except Exception as error:
        cause = " ".join(str(error).split())
        raise UsageError(f"--optimizer {config.optimizer} cannot step: {cause}") from error
    weight = model.weight
    kept = [v for v in optimizer.state[weight].values() if isinstance(v, torch.Tensor)]
    return float(sum(value.shape == weight.shape for value in kept))


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Of step `step` (from 0): a linear warm-up, then a cosine to `final_lr` of the peak.

    It is a function of the step alone, so a resumed run needs no state for it and follows a --lr
    or --steps that has changed.
    """
    if step < config.warmup:
        return config.lr * ((step + 1) / (config.warmup + 1))
    progress = (step - config.warmup) / max(1, steps - config.warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.lr * (config.final_lr + (1 - config.final_lr) * cosine)


def _find(name: str) -> Any:
    known = {
        key.lower(): kind
        for key, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)
    }
    known |= {"asyncnadam": AsyncNAdam, "lookahead": AsyncNAdam}  # its old name
    # LBFGS needs the loss again and again, SparseAdam sparse gradients: the loop gives neither.
    for unfit in ("optimizer", "lbfgs", "sparseadam"):
        known.pop(unfit, None)
    known |= {"lars": Lars, "lamb": Lamb}
    if name.lower() not in known:
        names = ", ".join(sorted(kind.__name__ for kind in known.values()))
        raise UsageError(f"--optimizer takes one of {names}; got {name!r}")
    return known[name.lower()]


def _parse_arguments(words: tuple[str, ...]) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise UsageError(f"--optimizer-arg takes NAME=VALUE, got {word!r}")
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            value = {"True": True, "False": False, "None": None}.get(text, text)
        arguments[name.strip()] = tuple(value) if isinstance(value, list) else value
    return arguments

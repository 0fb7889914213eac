"""Cost: what the parts of a model take, measured part by part on a sample input."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.checks import (
    refusal,
    require_at_least,
    require_count,
    require_items,
    require_kind,
)
from thinwire.wire.checks import require_group
from thinwire.wire.ranks import Group
from thinwire.wire.wire import Wire

_PARTS = "parts, (name, module) in order"


@dataclass(frozen=True)
class Cost:
    """Of one part, or of several in a row."""

    seconds: float
    """Forward and backward of one micro-batch."""
    weights: int
    """Bytes of the trained parameters."""
    activations: int
    """Bytes that the forward keeps for the backward."""
    input: int
    """Bytes of what goes in: what a stage that begins here receives."""

    def __post_init__(self) -> None:
        seconds = require_at_least("Cost", "seconds", self.seconds, 0)
        object.__setattr__(self, "seconds", seconds)
        for key in ("weights", "activations", "input"):
            count = require_count("Cost", key, getattr(self, key), least=0)
            object.__setattr__(self, key, count)

    def __add__(self, after: "Cost") -> "Cost":
        return Cost(
            self.seconds + after.seconds,
            self.weights + after.weights,
            self.activations + after.activations,
            self.input,
        )


def measure(
    parts: Sequence[tuple[str, nn.Module]],
    sample: Tensor,
    *,
    repeats: int = 5,
    group: Group = None,
) -> list[Cost]:
    """The cost of each part on `sample`, which goes into the first.

    Ranks time differently, but must split alike: the slowest rank's figures count, so all ranks of
    `group` (all by default) must call this. Gradients that the parts held are cleared; random state
    and buffers are left alone.
    """
    rows = require_items("measure", "parts", parts, _PARTS)
    if not rows:
        raise refusal("measure", "parts", _PARTS, parts)
    require_kind("measure", "sample", sample, Tensor, "a tensor that goes into the first part")
    repeats = require_count("measure", "repeats", repeats)
    require_group("measure", "group", group)
    costs, x = [], sample
    for name, module in map(_checked_part, rows):
        out, cost = _measure_part(module, x, repeats)
        if not isinstance(out, Tensor):
            raise ValueError(f"part {name!r} must give one tensor, it gave {type(out).__name__}")
        costs.append(cost)
        x = out.detach()
    return _agreed(costs, group)


def _checked_part(part: Any) -> tuple[str, nn.Module]:
    two = isinstance(part, tuple | list) and len(part) == 2
    if not two or not isinstance(part[0], str) or not isinstance(part[1], nn.Module):
        raise refusal("measure", "parts", _PARTS, part)
    return part[0], part[1]


def _measure_part(module: nn.Module, x: Tensor, repeats: int) -> tuple[object, Cost]:
    x = x.detach().requires_grad_(x.is_floating_point())
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    kept, times, out = 0, [], None
    devices = [x.device] if x.is_cuda else []
    with torch.random.fork_rng(devices):
        for repeat in range(repeats + 1):
            begun = _clock(x)
            if repeat == 0:  # counted, and not timed: the first call of anything is slow
                out, kept = _counted(module, x)
            else:
                out = _call(module, x)
            if isinstance(out, Tensor) and out.requires_grad:
                out.backward(torch.ones_like(out))
            times.append(_clock(x) - begun)
    module.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(buffers[name])
    weights = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    return out, Cost(statistics.median(times[1:]), weights, kept, x.nbytes)


def _call(module: nn.Module, x: Tensor) -> object:
    out: object = module(x)
    return out


def _counted(module: nn.Module, x: Tensor) -> tuple[object, int]:
    """The output, and the bytes of the tensors saved for the backward, weights not counted."""
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = _call(module, x)
    return out, sum(saved.values())


def _clock(x: Tensor) -> float:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter()


def _agreed(costs: list[Cost], group: Group) -> list[Cost]:
    wire = Wire(group, name="measure")
    try:
        seconds = wire.agree([cost.seconds for cost in costs], "max")
    finally:
        wire.close()
    return [
        Cost(slowest, cost.weights, cost.activations, cost.input)
        for slowest, cost in zip(seconds, costs, strict=True)
    ]

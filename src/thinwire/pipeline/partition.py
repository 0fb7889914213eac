"""Partition: a sequence of modules cut into contiguous stages, by hand or by measured cost.

With c_1 .. c_n seconds of forward and backward for n parts, P stages are cut where the slowest one
is fastest,

    minimise over cuts   max_s  sum of c_i over the parts of stage s

by dynamic programming, n^2 P steps; among equally slow cuts the one whose stages' times have the
least sum of squares. With a limit on memory a stage s may not need more than that:

    M_s = 4 W_s + (copies_s) W_s + (held_s) A_s     W_s bytes of weights, A_s of saved activations

(the weights, their gradients and two moments; versions and graphs as the schedule says).

A parameter may not be shared between stages: its two gradients would have different ages.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import nn

from thinwire.checks import (
    require_at_least,
    require_bool,
    require_choice,
    require_count,
    require_items,
    require_kind,
    require_positive,
    shown,
)
from thinwire.pipeline.cost import Cost
from thinwire.pipeline.schedule import NAMES, Name, Schedule

_MODEL = "an nn.Sequential, a model with parts(), or modules or (name, module) in order"
Part = tuple[str, nn.Module]


@runtime_checkable
class HasParts(Protocol):
    """A model that can list itself as a sequence: its output is that of the last part."""

    def parts(self) -> list[Part]:
        """(name, module) in order; the name is the prefix of the part's parameters."""


Parts = nn.Sequential | HasParts | Iterable[nn.Module] | Iterable[Part]


class Stage(nn.Module):
    """Some parts of a model in a row.

    Every part hangs where it hangs in the whole model, so its parameters and buffers keep their
    names ("blocks.3.mlp.0.weight"): a checkpoint does not depend on how the model was split.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__()
        parts = _checked_parts("Stage", "parts", parts)
        self.names = [name for name, _ in parts]
        for name, module in parts:
            *path, last = name.split(".")
            place: nn.Module = self
            for piece in path:
                if piece not in dict(place.named_children()):
                    place.add_module(piece, nn.Module())
                place = place.get_submodule(piece)
            place.add_module(last, module)

    def forward(self, x: Any) -> Any:
        for name in self.names:
            x = self.get_submodule(name)(x)
        return x

    def extra_repr(self) -> str:
        return ", ".join(self.names)


def split(
    model: Parts,
    stages: int,
    *,
    at: Sequence[int] | None = None,
    costs: Sequence[Cost] | None = None,
    memory: float | None = None,
    schedule: Name = "1f1b",
    accumulate: int = 1,
) -> list[Stage]:
    """The stages of a model, in order, on the modules it consists of (they are not copied).

    Args:
        model: an nn.Sequential, anything with `parts()`, or modules or (name, module) in order.
        stages: how many.
        at: by hand: the first part of every stage but the first, such as [3, 6] for three stages.
        costs: by cost: what `measure` found, equal on all ranks. Without either, by the number of
            parameters.
        memory: most bytes a stage may need, by the formula above; with `costs` only.
        schedule, accumulate: how the stages will be run, for that formula.
    """
    parts = _parts_of("split", model)
    stages = _checked_stages(
        "split", stages, len(parts), "the model has {} parts that can be told apart"
    )
    _check_plan("split", memory, schedule, accumulate)
    if at is None and memory is not None and costs is None:
        raise ValueError(f"split(memory={memory!r}) takes costs=... too, by which it is reckoned")
    if at is not None:
        if costs is not None or memory is not None:
            raise ValueError("split takes cuts by hand (at=...) or by cost (costs=...), not both")
        cuts = _checked_cuts(at, stages, len(parts))
    else:
        cuts = balance(
            _by_size(parts) if costs is None else _checked_costs("split", costs, len(parts)),
            stages,
            memory=memory,
            schedule=schedule,
            accumulate=accumulate,
        )
    edges = [0, *cuts, len(parts)]
    groups = [parts[a:b] for a, b in itertools.pairwise(edges)]
    _require_untied(groups)
    return [Stage(group) for group in groups]


def parts_of(model: Parts) -> list[Part]:
    """A model as (name, module) in order."""
    return _parts_of("parts_of", model)


def _parts_of(caller: str, model: Any) -> list[Part]:
    if isinstance(model, nn.Sequential):
        return _checked_parts(caller, "model", list(model.named_children()))
    if isinstance(model, HasParts) and not isinstance(model, type):
        return _checked_parts(caller, "model", model.parts())
    if isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList):
        raise ValueError(
            f"{caller}(model=...): {type(model).__name__} cannot be split: it is no nn.Sequential "
            "and has no parts() that lists its (name, module) in order"
        )
    rows = list(model) if isinstance(model, nn.ModuleList) else model
    entries = require_items(caller, "model", rows, _MODEL)
    named = [e if isinstance(e, tuple) else (str(index), e) for index, e in enumerate(entries)]
    return _checked_parts(caller, "model", named)


def _checked_parts(caller: str, key: str, parts: Any) -> list[Part]:
    entries = require_items(caller, key, parts, "parts, (name, module) in order")
    for index, entry in enumerate(entries):
        two = isinstance(entry, tuple | list) and len(entry) == 2
        if not two or not isinstance(entry[0], str) or not isinstance(entry[1], nn.Module):
            raise ValueError(
                f"{caller}({key}=...) takes parts, (name, module) in order, but entry {index} is "
                f"{shown(entry)}"
            )
    if not entries:
        raise ValueError(f"{caller}({key}=...) takes parts, (name, module) in order, got none")
    return [(name, module) for name, module in entries]


def balance(
    costs: Sequence[Cost],
    stages: int,
    *,
    memory: float | None = None,
    schedule: Name = "1f1b",
    accumulate: int = 1,
) -> list[int]:
    """The first part of every stage but the first, such that the slowest stage is fastest."""
    costs = _checked_costs("balance", costs)
    stages = _checked_stages("balance", stages, len(costs), "there are {} costs")
    _check_plan("balance", memory, schedule, accumulate)
    count, limit = len(costs), memory if memory is not None else math.inf
    plans = [Schedule(schedule, s, stages, accumulate) for s in range(stages)]
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}
    for stage in range(stages):
        reached: dict[int, tuple[float, float, list[int]]] = {}
        for start, (slowest, squares, cuts) in best.items():
            for end, group in _groups(costs, start, count - (stages - 1 - stage)):
                if stage_memory(plans[stage], group) > limit:
                    break
                time = group.seconds
                found = (max(slowest, time), squares + time * time, [*cuts, end])
                if end not in reached or found[:2] < reached[end][:2]:
                    reached[end] = found
        best = reached
    if count not in best:
        raise ValueError(
            f"no split into {stages} stages needs at most memory={memory:.3g} bytes a stage; use "
            "more stages, recompute=True or smaller micro-batches"
        )
    return best[count][2][:-1]


def stage_memory(
    schedule: Schedule,
    cost: Cost,
    *,
    stash: bool = True,
    recompute: bool = False,
    look_ahead: float = 0.0,
) -> float:
    """M_s, in bytes: weights, gradients, two moments, versions, and the graphs that are held."""
    name = "stage_memory"
    require_kind(name, "schedule", schedule, Schedule, "the Schedule of a stage")
    require_kind(name, "cost", cost, Cost, "a Cost, as measure() finds it")
    stash, recompute = (
        require_bool(name, "stash", stash),
        require_bool(name, "recompute", recompute),
    )
    look_ahead = require_at_least(name, "look_ahead", look_ahead, 0)
    copies = schedule.copies if stash else 0
    copies += 1 if copies and look_ahead else 0
    again = (recompute or not stash) and schedule.warmup > 0
    graphs = 1 if again else schedule.held
    inputs = schedule.held * cost.input if again else 0
    return (4 + copies) * cost.weights + graphs * cost.activations + inputs


def _groups(costs: Sequence[Cost], start: int, end: int) -> Iterator[tuple[int, Cost]]:
    """Parts start..stop-1 as one cost, for every stop up to `end`."""
    if start >= end:
        return
    total = costs[start]
    yield start + 1, total
    for stop in range(start + 1, end):
        total = total + costs[stop]
        yield stop + 1, total


def _by_size(parts: Sequence[Part]) -> list[Cost]:
    """Compute of a matrix goes with its size; a part without weights still costs something."""
    sizes = [sum(p.numel() for p in module.parameters()) for _, module in parts]
    return [Cost(seconds=1.0 + size, weights=4 * size, activations=0, input=0) for size in sizes]


def _checked_cuts(at: Sequence[int], stages: int, count: int) -> list[int]:
    given = require_items("split", "at", at, "the first part of each further stage, or None")
    cuts = [require_count("split", "at", cut, least=0) for cut in given]
    if len(cuts) != stages - 1 or cuts != sorted(set(cuts)) or not all(0 < c < count for c in cuts):
        raise ValueError(
            f"split(at=...) takes the first part of stages 1..{stages - 1}: {stages - 1} rising "
            f"numbers of 1..{count - 1}, got {cuts}"
        )
    return cuts


def _checked_stages(caller: str, stages: Any, most: int, found: str) -> int:
    count = require_count(caller, "stages", stages)
    if count > most:
        raise ValueError(
            f"{caller}(stages={count}): {count} stages were asked for, but {found.format(most)}; "
            f"take 1 to {most} stages"
        )
    return count


def _checked_costs(caller: str, costs: Any, parts: int | None = None) -> list[Cost]:
    wants = "a list of Cost, one for each part, as measure() gives it"
    entries = require_items(caller, "costs", costs, wants)
    for entry in entries:
        require_kind(caller, "costs", entry, Cost, wants)
    if not entries or len(entries) != (parts or len(entries)):
        raise ValueError(
            f"{caller}(costs=...) takes {wants}, got {len(entries)}"
            + (f" for {parts} parts" if parts else "")
        )
    return entries


def _check_plan(caller: str, memory: Any, schedule: Any, accumulate: Any) -> None:
    if memory is not None:
        require_positive(caller, "memory", memory)
    require_choice(caller, "schedule", schedule, NAMES)
    require_count(caller, "accumulate", accumulate)


def _require_untied(groups: Sequence[Sequence[Part]]) -> None:
    owner: dict[int, tuple[int, str]] = {}
    for stage, group in enumerate(groups):
        for prefix, module in group:
            for name, parameter in module.named_parameters(remove_duplicate=False):
                full = f"{prefix}.{name}"
                there, first = owner.setdefault(id(parameter), (stage, full))
                if there != stage:
                    raise ValueError(
                        f"{first!r} (stage {there}) and {full!r} (stage {stage}) are one "
                        "parameter; its gradients would come with different delays. Untie them "
                        "(a thinwire GPT: tied=False), or split so that both are in one stage"
                    )

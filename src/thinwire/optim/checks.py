"""Checks of what optimizers are given; those of single values are in thinwire/checks.py."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.checks import (
    pair_of_numbers,
    plain_number,
    refusal,
    require_at_least,
    require_bool,
    require_callable,
    require_choice,
    require_count,
    require_count_or,
    require_items,
    require_kind,
    require_model,
    require_part,
    require_positive,
    require_share,
    require_tensors,
    require_text,
    require_weight,
    require_whole,
    shown,
)
from thinwire.wire.checks import require_codec, require_group

__all__ = [
    "plain_number",
    "refusal",
    "require_at_least",
    "require_betas",
    "require_bool",
    "require_bounds",
    "require_buffers",
    "require_callable",
    "require_choice",
    "require_codec",
    "require_count",
    "require_count_or",
    "require_dense_gradient",
    "require_group",
    "require_inner",
    "require_items",
    "require_kind",
    "require_model",
    "require_nonnegative",
    "require_params",
    "require_part",
    "require_positive",
    "require_share",
    "require_tensors",
    "require_text",
    "require_weight",
    "require_whole",
    "shown",
]

_PARAMS = "tensors or groups of them in an order, as in model.parameters()"


def require_nonnegative(name: str, values: Any, *keys: str) -> None:
    """Of a mapping of settings, whose numbers become Python's own. A tensor of one value, as torch
    takes it for a learning rate, stays one."""
    for key in keys:
        value = values[key]
        single = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
        number = plain_number(value.item() if single else value)
        if number is None or number < 0:
            raise refusal(name, key, "a number >= 0", value)
        if not single:
            values[key] = number


def require_betas(name: str, betas: Any) -> tuple[float, float]:
    pair = pair_of_numbers(betas)
    if pair is None or not all(0 <= b < 1 for b in pair):
        raise refusal(name, "betas", "two numbers in [0, 1)", betas)
    return pair


def require_bounds(name: str, key: str, bounds: Any) -> tuple[float, float]:
    pair = pair_of_numbers(bounds)
    if pair is None or not 0 <= pair[0] <= pair[1] > 0:
        raise refusal(name, key, "two numbers, 0 <= lower <= upper > 0", bounds)
    return pair


def require_inner(name: str, inner: Any, key: str = "inner") -> None:
    require_kind(
        name, key, inner, torch.optim.Optimizer, "a torch.optim.Optimizer over the parameters"
    )


def require_params(name: str, params: Any) -> list[Any]:
    """What torch takes - tensors, pairs with their names, or groups of them - with every generator
    read into a list, for it can be read only once."""
    hint = "; pass its parameters()" if isinstance(params, nn.Module) else ""
    if isinstance(params, set | frozenset | nn.Module):
        raise refusal(name, "params", _PARAMS, params, hint=hint)
    entries = require_items(name, "params", params, _PARAMS)
    groups = [g if isinstance(g, Mapping) else {"params": [g]} for g in entries]
    checked = [_checked_group(name, index, group) for index, group in enumerate(groups)]
    if not any(group["params"] for group in checked):
        raise ValueError(
            f"{name}(params=...) takes {_PARAMS}, got none; a generator that was read before is "
            "empty"
        )
    return [
        group if isinstance(entry, Mapping) else entry
        for entry, group in zip(entries, checked, strict=True)
    ]


def _checked_group(name: str, index: int, group: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same one where it may be read again, with a list in it; torch keeps it as it is."""
    if "params" not in group:
        known = ", ".join(map(str, group))
        raise ValueError(f"{name}(params=...): group {index} has no 'params', only {known}")
    given = group["params"]
    members = (
        [given] if isinstance(given, Tensor) else require_items(name, "params", given, _PARAMS)
    )
    for member in members:
        pair = isinstance(member, tuple) and len(member) == 2 and isinstance(member[0], str)
        if not isinstance(member[1] if pair else member, Tensor):
            raise ValueError(
                f"{name}(params=...) takes {_PARAMS}, but entry {index} has {shown(member)}"
            )
    return group if isinstance(given, list) else {**group, "params": members}


def require_buffers(name: str, buffers: Any) -> list[Tensor]:
    """As a list: `model.buffers()` is a generator."""
    return require_tensors(name, "buffers", buffers, "tensors, as in model.buffers()")


def require_dense_gradient(name: str, parameter: Tensor) -> None:
    if parameter.grad is not None and parameter.grad.is_sparse:
        raise ValueError(
            f"{name}: a parameter of shape {tuple(parameter.shape)} has a sparse gradient, which "
            "one flat buffer for all values cannot take; build its embedding with sparse=False"
        )

"""Checks of settings: each error names the setting, what it got and what it takes."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def require_nonnegative(name: str, values: Mapping[str, Any], *keys: str) -> None:
    for key in keys:
        value = float(values[key]) if isinstance(values[key], Tensor) else values[key]
        if not _number(value) or value < 0:
            raise ValueError(f"{name}({key}=...) takes a number >= 0, got {values[key]!r}")


def require_betas(name: str, betas: Any) -> None:
    two = isinstance(betas, tuple | list) and len(betas) == 2
    if not two or not all(_number(b) and 0 <= b < 1 for b in betas):
        raise ValueError(f"{name}(betas=...) takes two numbers in [0, 1), got {betas!r}")


def require_bounds(name: str, key: str, bounds: Any) -> None:
    two = isinstance(bounds, tuple | list) and len(bounds) == 2
    if not two or not all(_number(b) for b in bounds) or not 0 <= bounds[0] <= bounds[1] > 0:
        raise ValueError(
            f"{name}({key}=...) takes two numbers, 0 <= lower <= upper > 0, got {bounds!r}"
        )


def require_share(name: str, key: str, value: Any) -> None:
    if not _number(value) or not 0 <= value < 1:
        raise ValueError(f"{name}({key}=...) takes a number in [0, 1), got {value!r}")


def require_count(name: str, key: str, value: Any, least: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}({key}=...) takes a whole number >= {least}, got {value!r}")


def require_positive(name: str, key: str, value: Any) -> None:
    if not _number(value) or value <= 0:
        raise ValueError(f"{name}({key}=...) takes a number > 0, got {value!r}")


def require_dense_gradient(name: str, parameter: Tensor) -> None:
    if parameter.grad is not None and parameter.grad.is_sparse:
        raise ValueError(
            f"{name}: a parameter of shape {tuple(parameter.shape)} has a sparse gradient, which "
            "one flat buffer for all values cannot take; build its embedding with sparse=False"
        )

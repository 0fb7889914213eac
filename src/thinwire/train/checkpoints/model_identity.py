"""Which model a checkpoint is of: names and shapes of its parameters, and the settings it had."""

from collections.abc import Mapping
from typing import Any, NoReturn

from torch import nn

from thinwire.errors import UsageError


def describe_model(model: nn.Module) -> dict[str, list[int]]:
    """Names and shapes of the parameters; keep it in meta["parameters"] for `check_model`."""
    return {name: list(parameter.shape) for name, parameter in model.named_parameters()}


def check_model(
    meta: Mapping[str, Any], model: nn.Module, settings: Mapping[str, Any] | None = None
) -> None:
    """Refuse the checkpoint of another model: names the first difference that is found.

    Compares meta["model"] with `settings` (heads, for one, leave no trace in the shapes), then
    meta["parameters"] with the parameters of `model`.
    """
    saved, before = meta.get("model", {}), meta.get("parameters", {})
    if not isinstance(saved, dict) or not isinstance(before, dict):
        _refuse_model("it describes none")
    for key, value in (settings or {}).items():
        if key not in saved or saved[key] != value:
            _refuse_model(f"{key} is {saved.get(key)!r} there and {value!r} here")
    now = describe_model(model)
    for name in [*now, *before]:
        if name not in before or name not in now:
            place = "here" if name in now else "there"
            _refuse_model(f"the parameter {name} exists {place} only")
        if before[name] != now[name]:
            _refuse_model(f"{name} has the shape {before[name]} there and {now[name]} here")


def _refuse_model(difference: str) -> NoReturn:
    raise UsageError(
        f"the checkpoint is of another model: {difference}; "
        "use the settings it was made with, or another run directory"
    )

"""Names that have moved: they work for one release more, with a warning that says where to."""

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def moved(module: str, name: str, table: Mapping[str, str]) -> Any:
    """For a module's `__getattr__`: what `name` is called today, by the table of old names."""
    if name not in table:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    room, _, today = table[name].rpartition(".")
    warnings.warn(
        f"{module}.{name} is now {table[name]}; the old name goes with the next release",
        DeprecationWarning,
        stacklevel=3,
    )
    return getattr(import_module(room), today)


def renamed_arguments(**renamed: str) -> Callable[[Function], Function]:
    """For a function whose arguments have new names: `renamed_arguments(old="new")`."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            for old, new in renamed.items():
                if old not in given:
                    continue
                if new in given:
                    raise TypeError(f"{old}= is the old name of {new}=; give it once")
                warnings.warn(
                    f"{old}= is now {new}=; the old name goes with the next release",
                    DeprecationWarning,
                    stacklevel=2,
                )
                given[new] = given.pop(old)
            return function(*args, **given)

        call.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return decorate

"""Flags: settings by name, from a command line, a TOML file or JSON, into dataclasses.

A setting has one flat name whatever part of a configuration it belongs to: `--eval-every` on the
command line, `eval_every` in a file.
"""

import dataclasses
import difflib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from thinwire.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

Config = TypeVar("Config")


def by_flag(error: ValueError, **renamed: str) -> UsageError:
    """A constructor's refusal, `Threshold(value_bits=...) takes ...`, in the words of the command
    line: `--value-bits takes ...`. `renamed` are settings whose flags have other names."""

    def flag(setting: "re.Match[str]") -> str:
        return "--" + renamed.get(setting[1], setting[1]).replace("_", "-")

    return UsageError(re.sub(r"\b\w+\((\w+)=\.\.\.\)", flag, str(error), count=1))


def flat_values(config: Any) -> dict[str, Any]:
    """Every setting by its flag's name (underscores), whatever part it belongs to."""
    return {f.name: getattr(part, f.name) for part, f in leaves(config)}


def leaves(config: Any) -> Iterator[tuple[Any, "dataclasses.Field[Any]"]]:
    for f in fields(config):
        value = getattr(config, f.name)
        if is_dataclass(value):
            yield from leaves(value)
        elif f.name != "settings":
            yield config, f


def as_flag(name: str) -> str:
    return name.replace("_", "-")


def take_flag(argv: list[str], flag: str) -> tuple[str | None, list[str]]:
    """The last value of `--flag VALUE` or `--flag=VALUE`, and the other arguments."""
    value, rest, words = None, [], iter(argv)
    for word in words:
        if word == flag:
            value = next(words, None)
            if value is None:
                raise UsageError(f"{flag} needs a value")
        elif word.startswith(flag + "="):
            value = word.split("=", 1)[1]
        else:
            rest.append(word)
    return value, rest


def read_toml(path: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path} is not TOML: {error}") from error
    return {key.replace("-", "_"): value for key, value in content.items()}


def with_values(config: Config, values: dict[str, Any], source: str = "") -> Config:
    """Sets values by name. Those of an earlier run, which have no source, may be of another method
    or version: what does not fit is left out, and the checkpoint itself is compared later."""
    places = {f.name: (part, f) for part, f in leaves(config)}
    for name, value in values.items():
        if name not in places:
            if not source:
                continue
            near = difflib.get_close_matches(name, places, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(f"{source}: there is no setting {name!r}{hint}")
        part, f = places[name]
        kind = get_type_hints(type(part))[f.name]
        try:
            setattr(part, f.name, fitting(value, kind))
        except TypeError:
            if source:
                wanted = f"{source}: {name} takes {spoken(kind)}, got {value!r}"
                raise UsageError(wanted) from None
    return config


def fitting(value: Any, kind: Any) -> Any:
    """The value as `kind` has it, or TypeError. TOML and JSON have no tuples, and 1 may be 1.0."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is float and type(value) is int:
        return float(value)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(fitting(item, inner[0]) for item in value)
    if origin in (Union, UnionType):
        return None if value is None else fitting(value, _without_none(kind))
    if value in inner if origin is Literal else type(value) is kind:
        return value
    raise TypeError


def _without_none(kind: Any) -> Any:
    return next(option for option in get_args(kind) if option is not NoneType)


def spoken(kind: Any) -> str:
    """What a setting of this type takes, for people."""
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return spoken(_without_none(kind))
    if origin is Literal:
        return " or ".join(json.dumps(choice) for choice in get_args(kind))
    if origin is tuple:
        return "a list, each of it " + spoken(get_args(kind)[0])
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text in quotes"}
    return words[kind]

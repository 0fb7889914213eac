"""Flags: settings by name, from a command line, a TOML file or JSON, into dataclasses.

A setting has one flat name whatever part of a configuration it belongs to: `--eval-every` on the
command line, `eval_every` in a file.
"""

import dataclasses
import difflib
import re
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from thinwire.command_line import (
    RENAMED,
    check_text,
    check_whole,
    shown,
    spoken,
    without_none,
)
from thinwire.errors import UsageError
from thinwire.files import MOST_SETTINGS, read_bytes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

Config = TypeVar("Config")


def by_flag(error: Exception, **renamed: str) -> UsageError:
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


def take_flag(argv: list[str], *flags: str) -> tuple[str | None, list[str]]:
    """The last value of `--flag VALUE` or `--flag=VALUE`, and the other arguments. Several are
    names of the same flag."""
    value, rest, words = None, [], iter(argv)
    for word in words:
        if word in flags:
            value = next(words, None)
            if value is None:
                raise UsageError(f"{word} needs a value")
        elif word.startswith(tuple(flag + "=" for flag in flags)):
            value = word.split("=", 1)[1]
        else:
            rest.append(word)
    return value, rest


def read_toml(path: Path) -> dict[str, Any]:
    if path == Path():
        raise UsageError("--config takes the name of a TOML file, got ''")
    check_text("--config", str(path))
    try:
        content = tomllib.loads(read_bytes(path, MOST_SETTINGS, follow=True).decode())
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from error
    except RecursionError:
        raise UsageError(f"--config {path} is nested too deeply to be settings") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path} is not TOML: {error}") from error
    named = {key.replace("-", "_"): value for key, value in content.items()}
    return {RENAMED.get(key, key): value for key, value in named.items()}


def with_values(
    config: Config, values: dict[str, Any], source: str = "", *, others: bool = False
) -> Config:
    """Sets values by name. Without a source what does not fit is left out; with `others` there may
    be names that are no settings here, such as those of another version."""
    places = {f.name: (part, f) for part, f in leaves(config)}
    for name, value in values.items():
        if name not in places:
            if not source or others:
                continue
            near = difflib.get_close_matches(name, places, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(f"{source}: there is no setting {shown(name)}{hint}")
        part, f = places[name]
        kind = get_type_hints(type(part))[f.name]
        try:
            setattr(part, f.name, fitting(value, kind, "--" + as_flag(name)))
        except TypeError:
            if source:
                wanted = f"{source}: {name} takes {spoken(kind)}, got {shown(value)}"
                raise UsageError(wanted) from None
        except UsageError as error:
            if source:
                raise UsageError(f"{source}: {error}") from None
    return config


def fitting(value: Any, kind: Any, flag: str) -> Any:
    """The value as `kind` has it, or TypeError; a UsageError where it is of this kind and cannot be
    used. TOML and JSON have no tuples, and 1 may be 1.0."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is float and type(value) is int:
        return float(check_whole(flag, value))
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(fitting(item, inner[0], flag) for item in value)
    if origin in (Union, UnionType):
        return None if value is None else fitting(value, without_none(kind), flag)
    if origin is Literal and isinstance(value, str) and value in inner:
        return value
    if origin is Literal or type(value) is not kind:
        raise TypeError
    if kind is int:
        check_whole(flag, value)
    return check_text(flag, value) if kind is str else value

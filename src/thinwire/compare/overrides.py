"""Overrides: `--set co2.every=8`, the settings in which single methods differ from the others.

A method has its own settings and may have an optimizer of its own (LAMB wants another learning rate
than Adam) and stages. Everything else - model, data, batch, seed, budget - is what the comparison
keeps equal.
"""

import dataclasses
import difflib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from thinwire.command_line import spoken, value_of
from thinwire.errors import UsageError
from thinwire.train.config import TrainConfig, config_type
from thinwire.train.flags import as_flag, leaves
from thinwire.train.methods.registry import METHODS

_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@dataclass(frozen=True)
class Override:
    """One word of --set; `method` is empty where it is for all that have the setting."""

    method: str
    name: str
    value: str
    word: str


class Overrides:
    def __init__(self, words: Sequence[str]) -> None:
        self._given = [_parse(word) for word in words]

    def check(self, methods: Sequence[str]) -> None:
        """Refuses a word that no method in the comparison can use."""
        for given in self._given:
            if given.method and given.method not in methods:
                raise UsageError(
                    f"--set {given.word}: {given.method!r} is not compared here; "
                    f"the methods are {', '.join(methods)}"
                )
            owners = [given.method] if given.method else list(methods)
            if not any(given.name in _settable(name) for name in owners):
                raise _no_such_setting(given, owners)

    def apply(self, method: str, config: TrainConfig) -> None:
        """Sets what is meant for the method; a word with its name beats one for all."""
        places = _settable(method, config)
        for given in sorted(self._given, key=lambda g: bool(g.method)):
            if given.method in ("", method) and given.name in places:
                part, kind = places[given.name]
                setattr(part, given.name, _converted(given, kind))


def _parse(word: str) -> Override:
    place, equals, value = word.partition("=")
    method, dot, name = place.rpartition(".")
    if not equals or not value.strip() or not name.strip() or (dot and not method):
        raise UsageError(f"--set takes METHOD.SETTING=VALUE, as in co2.every=8; got {word!r}")
    return Override(method.strip(), name.strip().replace("-", "_"), value.strip(), word)


def _settable(method: str, config: TrainConfig | None = None) -> dict[str, tuple[Any, Any]]:
    """Where each setting of a method that may differ lives, and its type."""
    if method not in METHODS:
        return {}
    config = config or config_type(method)()
    own = {
        f.name
        for part in (config.settings, config.optimizer, config.pipeline)
        for f in fields(part)
    }
    return {
        f.name: (part, get_type_hints(type(part))[f.name])
        for part, f in leaves(config)
        if f.name in own and not dataclasses.is_dataclass(getattr(part, f.name))
    }


def _no_such_setting(given: Override, owners: list[str]) -> UsageError:
    names = {name for owner in owners for name in _settable(owner)}
    if given.name in {f.name for _, f in leaves(config_type(owners[0])())} - names:
        flag = as_flag(given.name)
        return UsageError(
            f"--set {given.word}: {flag} is the same for all methods; set it with --{flag}"
        )
    near = difflib.get_close_matches(given.name, names, n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; takes {', '.join(sorted(names))}"
    who = given.method or "none of the methods"
    has = "has no" if given.method else "has a"
    return UsageError(f"--set {given.word}: {who} {has} setting {given.name!r}{hint}")


def _converted(given: Override, kind: Any) -> Any:
    try:
        return _value(given, given.value, kind)
    except UsageError:
        raise
    except ValueError:
        raise UsageError(
            f"--set {given.word}: {as_flag(given.name)} takes {spoken(kind)}, got {given.value!r}"
        ) from None


def _value(given: Override, text: str, kind: Any) -> Any:
    """The text as a value of this type, or ValueError."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        some = next(option for option in inner if option is not NoneType)
        return None if text.lower() == "none" else _value(given, text, some)
    if origin is tuple:
        return tuple(_value(given, part, inner[0]) for part in text.split(";"))
    if origin is Literal:
        return inner[[str(choice) for choice in inner].index(text)]
    if kind is bool:
        if text.lower() not in _WORDS:
            raise ValueError(text)
        return _WORDS[text.lower()]
    return value_of(f"--set {given.word}: {as_flag(given.name)}", text, kind)

"""Bad words for every kind of flag, from the types of the dataclasses that hold them."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from thinwire.command_line import without_none
from thinwire.train.flags import leaves

NUMBERS = ["", "x", "1.5.2", "--", "0x10", "1e", "٣", "½", "1 2", "\x00", "9" * 5000, "None."]
WHOLE = [*NUMBERS, "1.5", "1e3", "nan", "inf", "-inf", str(2**31), str(2**63), str(-(2**63)), "_1"]
REAL = [*NUMBERS, "nan", "inf", "-inf", "1e999", "-1e999", "1_", "0,5"]
CHOICE = ["", "x", "None.", "AUTO", "auto ", "\x1b[31m", "é" * 200]
# Refused whatever they are for: they would break a line, a terminal or a file's name.
TEXT = ["a\nb", "a\x00b", "\x1b[2J", "\udcff"]


def bad_words(kind: Any) -> list[str]:
    """Values that no flag of this type takes."""
    origin = get_origin(kind)
    if origin is Union or type(kind).__name__ == "UnionType":
        return [word for word in bad_words(without_none(kind)) if word != "None"]
    if origin is tuple:
        return bad_words(get_args(kind)[0])
    if origin is Literal:
        return CHOICE
    return {int: WHOLE, float: REAL, str: TEXT, bool: []}[kind]


def flags_of(config: Any) -> Iterator[tuple[str, Any]]:
    """(flag, type) of every leaf of a configuration."""
    for part, field in leaves(config):
        kind = get_type_hints(type(part))[field.name]
        yield "--" + field.name.replace("_", "-"), kind


def flags_of_class(kind: type) -> Iterator[tuple[str, Any]]:
    """The same of a class with no defaults for some of its fields."""
    hints = get_type_hints(kind)
    for field in fields(kind):
        yield "--" + field.name.replace("_", "-"), hints[field.name]


def bad_lines(flags: Iterator[tuple[str, Any]]) -> Iterator[list[str]]:
    """Command lines, each with one flag that cannot be used."""
    for flag, kind in flags:
        if kind is bool:
            yield [f"{flag}=yes"]
            yield [flag, "yes"]
            continue
        yield [flag]
        yield [flag, "--steps"]
        # A seed may have 63 bits.
        words = [word for word in bad_words(kind) if (flag, word) != ("--seed", str(2**31))]
        yield from ([f"{flag}={word}"] for word in words)
        yield from ([flag, word] for word in bad_words(kind)[:3] if not word.startswith("--"))
        yield [f"{flag}x=1"]

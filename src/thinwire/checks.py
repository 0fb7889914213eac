"""Checks of arguments. Each error is one line: whose argument, what it takes, what it got.

A check returns the argument as plain Python has it. numpy's scalars are taken wherever a number is
(`np.int64` for a count, `np.float32` for a rate), and none is kept: it would compare, print and be
saved differently on a rank that was given Python's own. True and False are no numbers, and 0 and 1
no truth values.
"""

import math
import reprlib
import threading
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
from torch import Tensor, nn

LARGEST = 2**63 - 1
"""Of a count: what the integers of tensors and checkpoints hold."""

T = TypeVar("T")
_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = 80


def shown(value: Any) -> str:
    """A value in one short line, whatever it is."""
    kind = type(value).__name__
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, nn.Module):
        return f"a model ({kind})"
    if isinstance(value, Tensor) and value.dim() > 0:
        return f"a tensor of shape {tuple(value.shape)}"
    try:
        text = _brief.repr(value)
    except Exception:  # a repr of the user's own, or of an integer too long to print
        return f"a {kind}"
    return f"a {kind}" if "\n" in text else text


def refusal(name: str, key: str, wants: str, value: Any, *, hint: str = "") -> ValueError:
    return ValueError(f"{name}({key}=...) takes {wants}, got {shown(value)}{hint}")


# -- numbers ---------------------------------------------------------------------------------------


def plain_number(value: Any) -> int | float | None:
    """A finite number as Python's own; None for anything else."""
    if isinstance(value, np.integer | np.floating):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an integer beyond what a float can be
        return None


def require_count(name: str, key: str, value: Any, least: int = 1, most: int = LARGEST) -> int:
    number = plain_number(value)
    if not isinstance(number, int) or not least <= number <= most:
        bound = f">= {least}" if most == LARGEST else f"of {least} to {most}"
        tail = " below 2**63" if isinstance(number, int) and number > LARGEST == most else ""
        raise refusal(name, key, f"a whole number {bound}{tail}", value)
    return number


def require_multiple(name: str, key: str, value: Any, of: int) -> int:
    number = plain_number(value)
    if not isinstance(number, int) or not 0 < number <= LARGEST or number % of:
        raise refusal(name, key, f"a multiple of {of}", value)
    return number


def require_count_or(name: str, key: str, value: Any, word: str, least: int = 1) -> Any:
    """A count, or the one word that stands for another way."""
    if isinstance(value, str) and value == word:
        return value
    number = plain_number(value)
    if not isinstance(number, int) or not least <= number <= LARGEST:
        raise refusal(name, key, f'a whole number >= {least} or "{word}"', value)
    return number


def require_whole(name: str, key: str, value: Any) -> int:
    """Of any size and sign, as seeds are."""
    if isinstance(value, np.integer):
        value = value.item()
    if not isinstance(value, int) or isinstance(value, bool):
        raise refusal(name, key, "a whole number", value)
    return value


def require_positive(name: str, key: str, value: Any) -> float:
    number = plain_number(value)
    if number is None or number <= 0:
        raise refusal(name, key, "a number > 0", value)
    return number


def require_at_least(name: str, key: str, value: Any, least: float) -> float:
    number = plain_number(value)
    if number is None or number < least:
        raise refusal(name, key, f"a number >= {least:g}", value)
    return number


def require_share(name: str, key: str, value: Any) -> float:
    """In [0, 1)."""
    number = plain_number(value)
    if number is None or not 0 <= number < 1:
        raise refusal(name, key, "a number in [0, 1)", value)
    return number


def require_part(name: str, key: str, value: Any) -> float:
    """In (0, 1]."""
    number = plain_number(value)
    if number is None or not 0 < number <= 1:
        raise refusal(name, key, "a number in (0, 1]", value)
    return number


def require_weight(name: str, key: str, value: Any) -> float:
    """In [0, 1]."""
    number = plain_number(value)
    if number is None or not 0 <= number <= 1:
        raise refusal(name, key, "a number in [0, 1]", value)
    return number


def require_seconds(name: str, key: str, value: Any) -> float:
    """A time to wait; longer ones than the system can wait for are refused."""
    number = plain_number(value)
    if number is None or not 0 < number <= threading.TIMEOUT_MAX:
        raise refusal(name, key, f"seconds > 0, up to {threading.TIMEOUT_MAX:.2g}", value)
    return number


def pair_of_numbers(value: Any) -> tuple[float, float] | None:
    """Two finite numbers in a tuple or list; None for anything else."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        return None
    first, second = (plain_number(v) for v in value)
    return None if first is None or second is None else (first, second)


# -- everything else -------------------------------------------------------------------------------


def require_bool(name: str, key: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise refusal(name, key, "True or False", value)
    return bool(value)


def require_choice(name: str, key: str, value: Any, choices: Iterable[str]) -> str:
    known = list(choices)
    if not isinstance(value, str) or value not in known:
        raise refusal(name, key, f"one of {', '.join(known)}", value)
    return value


def require_text(name: str, key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise refusal(name, key, "a text", value)
    return value


def require_callable(name: str, key: str, value: Any, call: str) -> None:
    """`call` is how it will be called, as in loss(output, y). A class is none, though it can be."""
    if not callable(value) or isinstance(value, type):
        raise refusal(name, key, f"a function, called as {call}", value)


def require_kind(name: str, key: str, value: T, kind: Any, wants: str) -> T:
    if not isinstance(value, kind):
        raise refusal(name, key, wants, value)
    return value


def require_model(name: str, key: str, value: Any) -> None:
    require_kind(name, key, value, nn.Module, "a model (torch.nn.Module)")


def require_items(name: str, key: str, values: Any, wants: str) -> list[Any]:
    """What an iterable holds. A text, a mapping, a tensor or a model holds something else."""
    wrong = (str, bytes, Mapping, Tensor, nn.Module, type)
    if isinstance(values, wrong) or not isinstance(values, Iterable):
        raise refusal(name, key, wants, values)
    return list(values)


def require_tensors(name: str, key: str, values: Any, wants: str) -> list[Tensor]:
    entries = require_items(name, key, values, wants)
    for index, entry in enumerate(entries):
        if not isinstance(entry, Tensor):
            raise ValueError(
                f"{name}({key}=...) takes {wants}, but entry {index} is {shown(entry)}"
            )
    return entries

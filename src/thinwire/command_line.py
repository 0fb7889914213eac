"""Words of a command line into a dataclass; every one that cannot be used is refused in one line.

A field is a flag: `eval_every: int` is `--eval-every 5`, `--eval_every=5`. A bool is `--bf16` or
`--no-bf16`. A tuple takes the words that follow, and goes on where the flag comes again. A field
marked `tyro.conf.Positional` has no name on the command line. Parts that are dataclasses are flat.

tyro, which lays out `--help` from the same dataclass, answers a bad word with a box of several
lines that names the Python type: so the words are read here.
"""

import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NoReturn,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from thinwire.errors import UsageError

Config = TypeVar("Config")

# Names that flags and settings had once -> their names now. `torchrun ... --run` never reaches us:
# torchrun takes it for its own --run-path.
RENAMED = {"run": "run_dir", "late": "delayed_step"}
MOST = 2**31 - 1  # of whole numbers, but for seeds: products of two of them still fit 64 bits
_MOST_SEED = 2**63 - 1
_LARGEST = 3e38  # of numbers
_SHOWN = 60  # characters of a bad value that a message repeats
_WHOLE = re.compile(r"[+-]?[0-9]+(_[0-9]+)*")
_HELP = {"-h", "--help"}


def parse_words(
    kind: type[Config],
    argv: Sequence[str],
    *,
    prog: str,
    default: Config | None = None,
    description: str | None = None,
) -> Config:
    """A `kind` with the values that the words give, over those of `default`."""
    if _HELP & set(argv):
        show_help(kind, prog=prog, default=default, description=description)
    reader = _Reader(_places(default if default is not None else kind), prog)
    reader.read(list(argv))
    if default is None:
        reader.require_all()
        return kind(**reader.given)
    for name, value in reader.given.items():
        setattr(reader.places[name].part, name, value)
    return default


def show_help(
    kind: type[Any], *, prog: str, default: Any = None, description: str | None = None
) -> NoReturn:
    import tyro

    more: dict[str, Any] = {} if default is None else {"default": default}
    tyro.cli(
        kind,
        args=["--help"],
        config=(tyro.conf.OmitArgPrefixes,),
        prog=prog,
        description=description,
        **more,
    )
    raise SystemExit(0)


@dataclass(frozen=True)
class _Place:
    """Where a flag's value goes, and what it takes."""

    name: str
    kind: Any
    part: Any
    positional: bool
    required: bool
    default: Any

    @property
    def flag(self) -> str:
        return self.name.upper() if self.positional else f"--{self.name.replace('_', '-')}"

    @property
    def several(self) -> bool:
        return get_origin(self.kind) is tuple


class _Reader:
    def __init__(self, places: dict[str, _Place], prog: str) -> None:
        self.places, self._prog = places, prog
        self.given: dict[str, Any] = {}
        self._positional = iter([p for p in places.values() if p.positional])

    def read(self, words: list[str]) -> None:
        while words:
            word = words.pop(0)
            if not word.startswith("--"):
                self._take_positional(word)
                continue
            name, equals, value = word[2:].partition("=")
            place, on = self._find(name, word)
            if place.kind is bool:
                if equals:
                    raise UsageError(f"--{name} takes no value, got {shown(value)}")
                self.given[place.name] = on
            elif place.several:
                self._take_several(place, [value] if equals else _until_flag(words))
            else:
                text = value if equals else _next_value(place, words)
                self.given[place.name] = value_of(place.flag, text, place.kind, place.default)

    def require_all(self) -> None:
        for place in self.places.values():
            if place.required and place.name not in self.given:
                how = f"{self._prog} --help says how it is written"
                raise UsageError(f"{self._prog} takes {place.flag}, which is missing: {how}")

    def _take_several(self, place: _Place, texts: list[str]) -> None:
        if not texts:
            raise UsageError(f"{place.flag} needs a value")
        inner = get_args(place.kind)[0]
        values = tuple(value_of(place.flag, text, inner) for text in texts)
        self.given[place.name] = self.given.get(place.name, ()) + values

    def _take_positional(self, word: str) -> None:
        place = next(self._positional, None)
        if place is None:
            raise UsageError(
                f"{self._prog} takes flags, such as --help, and no word of its own: "
                f"got {shown(word)}"
            )
        self.given[place.name] = value_of(place.flag, word, place.kind)

    def _find(self, name: str, word: str) -> tuple[_Place, bool]:
        key = name.replace("-", "_")
        key = RENAMED.get(key, key) if key not in self.places else key
        if key in self.places and not self.places[key].positional:
            return self.places[key], True
        negated = self.places.get(key.removeprefix("no_")) if key.startswith("no_") else None
        if negated is not None and negated.kind is bool:
            return negated, False
        flags = [p.flag[2:] for p in self.places.values() if not p.positional]
        near = difflib.get_close_matches(name.replace("_", "-"), flags, n=1)
        hint = f"did you mean --{near[0]}?" if near else f"{self._prog} --help lists them"
        raise UsageError(f"there is no flag {shown(word.partition('=')[0])} here: {hint}")


def _next_value(place: _Place, words: list[str]) -> str:
    if not words or words[0].startswith("--"):
        raise UsageError(f"{place.flag} needs a value: it takes {spoken(place.kind)}")
    return words.pop(0)


def _until_flag(words: list[str]) -> list[str]:
    values = []
    while words and not words[0].startswith("--"):
        values.append(words.pop(0))
    return values


def _places(config: Any) -> dict[str, _Place]:
    """Every leaf of a configuration, or of a class of one, by its field's name."""
    return {place.name: place for place in _walk(config)}


def _walk(config: Any) -> Iterator[_Place]:
    kind = config if isinstance(config, type) else type(config)
    hints = get_type_hints(kind, include_extras=True)
    for f in fields(kind):
        value = None if config is kind else getattr(config, f.name)
        if is_dataclass(value):
            yield from _walk(value)
        elif f.name != "settings":
            bare, marks = _unmarked(hints[f.name])
            positional = any("Positional" in repr(mark) for mark in marks)
            required = f.default is MISSING and f.default_factory is MISSING
            yield _Place(f.name, bare, config, positional, required, f.default)


def _unmarked(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    if get_origin(kind) is Annotated:
        bare, *marks = get_args(kind)
        return bare, tuple(marks)
    return kind, ()


# Values


def value_of(flag: str, text: str, kind: Any, default: Any = None) -> Any:
    """The text as a value of `kind`, or a UsageError that names the flag."""
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return None if text == "None" else value_of(flag, text, without_none(kind), default)
    if origin is Literal:
        if text not in get_args(kind):
            raise UsageError(f"{flag} takes {spoken(kind)}, got {shown(text)}")
        return text
    return _READ[kind](flag, text, default)


def _whole(flag: str, text: str, default: Any) -> int:
    if not _WHOLE.fullmatch(text):
        raise UsageError(f"{flag} takes {spoken(int)}, got {shown(text)}")
    digits = text.lstrip("+-0_")
    # Python itself refuses to read thousands of digits.
    number = int(text) if len(digits) < 40 else (-1 if text.startswith("-") else 1) * 10**40
    return check_whole(flag, number, text)


def check_whole(flag: str, number: int, text: str = "") -> int:
    """The number, if it is one that every sum of a run can hold."""
    most = _MOST_SEED if flag == "--seed" else MOST
    if abs(number) > most:
        limit = "2**63" if flag == "--seed" else "2**31"
        raise UsageError(f"{flag} takes a whole number below {limit}, got {shown(text or number)}")
    return number


def _number(flag: str, text: str, default: Any) -> float:
    try:
        number = float(text) if text.isascii() else None
    except ValueError:
        number = None
    if number is None:
        raise UsageError(f"{flag} takes {spoken(float)}, got {shown(text)}")
    return check_number(flag, number, shown(text, quoted=False))


def check_number(flag: str, number: float, text: str = "") -> float:
    """The number, if float32 can hold it: that is what it meets."""
    if not abs(number) <= _LARGEST:
        raise UsageError(f"{flag} takes a finite number, up to {_LARGEST:g}, got {text or number}")
    return number


def _text(flag: str, text: str, default: Any) -> str:
    if not text and default != "":
        raise UsageError(f"{flag} takes text, got none: ''")
    return check_text(flag, text)


def check_text(flag: str, text: str) -> str:
    """The text, if every file name and every terminal can hold it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{flag} takes text in UTF-8, got {shown(text)}") from None
    bad = next((c for c in text if not c.isprintable()), None)
    if bad is not None:
        raise UsageError(f"{flag} takes printable text, got {shown(text)} with {bad!r} in it")
    return text


_READ: dict[Any, Callable[[str, str, Any], Any]] = {int: _whole, float: _number, str: _text}


def without_none(kind: Any) -> Any:
    return next(option for option in get_args(kind) if option is not NoneType)


def spoken(kind: Any) -> str:
    """What a setting of this type takes, for people."""
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return spoken(without_none(kind))
    if origin is Literal:
        return " or ".join(f'"{choice}"' for choice in get_args(kind))
    if origin is tuple:
        return "a list, each of it " + spoken(get_args(kind)[0])
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text in quotes"}
    return words[kind]


def shown(value: object, *, quoted: bool = True) -> str:
    """A value as a message repeats it: one line, and not all of a long one."""
    text = repr(value) if quoted or not isinstance(value, str) else ascii(value)[1:-1]
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"

"""The command line of a benchmark, its tables, and the line of JSON that ends its output."""

import argparse
import json
import math
from enum import Enum
from typing import Any, TypeVar

T = TypeVar("T")


class Size(str, Enum):
    """How much a benchmark does."""

    FULL = "full"
    """What the documents quote."""
    QUICK = "quick"
    """At most a minute on two cores: a first look, with figures to be taken with care."""
    TINY = "tiny"
    """Some seconds: every line runs, and no figure means anything. For tests."""

    def of(self, full: T, quick: T, tiny: T) -> T:
        return {Size.FULL: full, Size.QUICK: quick, Size.TINY: tiny}[self]

    def emulated(self, link: T) -> T | None:
        """The link; None, this machine's loopback, where no figure means anything."""
        return None if self is Size.TINY else link


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Knows --quick and --tiny; what it parses has a `size`. `doc` is the benchmark's own."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = made.add_mutually_exclusive_group()
    for size, text in ((Size.QUICK, "at most a minute"), (Size.TINY, "some seconds, for tests")):
        flag = f"--{size.value}"
        sizes.add_argument(
            flag, dest="size", action="store_const", const=size, default=Size.FULL, help=text
        )
    return made


class Table:
    """Rows printed as they come: the first column to the left, the others to the right."""

    def __init__(self, *columns: str, first: int = 30, width: int = 10) -> None:
        self._first = first
        self._widths = [max(width, len(name) + 2) for name in columns[1:]]
        self.row(*columns)

    def row(self, *cells: str) -> None:
        others = (
            f" {cell:>{width - 1}}" for cell, width in zip(cells[1:], self._widths, strict=True)
        )
        print(f"{cells[0]:{self._first}}" + "".join(others), flush=True)


def end(figures: dict[str, Any], size: Size) -> None:
    """The last line: the figures, and how much was done for them."""
    print(json.dumps(_json(figures | {"size": size.value})), flush=True)


def _json(figures: Any) -> Any:
    """JSON has no infinity: what was never reached is null."""
    if isinstance(figures, dict):
        return {str(key): _json(value) for key, value in figures.items()}
    if isinstance(figures, list | tuple):
        return [_json(value) for value in figures]
    return None if isinstance(figures, float) and not math.isfinite(figures) else figures

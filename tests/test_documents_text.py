"""The text of the documents: its width, and the files that it names. Links: `make docs`."""

import re
from pathlib import Path

import pytest

from tests.documented import DOCUMENTS, ROOT, paths, prose


@pytest.mark.parametrize("path", [*DOCUMENTS, ROOT / "CHANGELOG.md"], ids=lambda path: path.name)
def test_lines_have_at_most_100_columns(path: Path) -> None:
    lines = list(prose(path.read_text()))
    assert lines
    # A link's target may reach beyond: it cannot be broken.
    long = [n for n, line in lines if len(re.sub(r"\]\([^)]*\)", "]()", line)) > 100]
    assert not long, f"{path.name} has longer lines: {long}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_exist(path: Path) -> None:
    rooms = (ROOT, ROOT / "src" / "thinwire")
    named = paths(path.read_text())
    assert not [name for name in named if not any((room / name).exists() for room in rooms)]

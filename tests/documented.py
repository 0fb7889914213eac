"""What our documents hold: command lines, in blocks of code and inside of sentences; lines of
prose; paths of files."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
_OURS = re.compile(
    r"(?:[A-Z_]+=\S+ )*"
    r"(?:thinwire |torchrun |make |(?:\S+/)?python3? (?:-m thinwire|-m benchmarks\.|examples/)"
    r"|benchmarks/\S+\.(?:py|sh)\b)"
)
# After a command in a block: a comment, or a remark set off by spaces.
_REMARK = re.compile(r"\s+#.*$|\s{3,}\S.*$")


@dataclass(frozen=True)
class Command:
    document: str
    text: str
    """In one line, with single spaces and without remarks."""

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text)


def commands() -> list[Command]:
    found = []
    for path in DOCUMENTS:
        name = str(path.relative_to(ROOT))
        found += [Command(name, text) for text in _commands_in(path.read_text())]
    return found


def _commands_in(text: str) -> Iterator[str]:
    parts = re.split(r"^```.*$", text, flags=re.MULTILINE)
    for number, part in enumerate(parts):
        yield from _in_block(part) if number % 2 else _in_sentences(part)


def _in_block(block: str) -> Iterator[str]:
    for line in re.sub(r"\\\n\s*", "", block).splitlines():
        if _OURS.match(line):
            yield " ".join(_REMARK.sub("", line).split())


def _in_sentences(text: str) -> Iterator[str]:
    for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", text):
        span = " ".join(span.split())
        if _OURS.match(span + " "):
            yield span


def prose(text: str) -> Iterator[tuple[int, str]]:
    """The lines of a document with their numbers, without code, tables and what a program wrote."""
    fenced = made = indented = False
    before = ""
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif line.startswith("<!-- "):
            made = line.startswith("<!-- made by ") or (made and not line.startswith("<!-- end"))
        else:
            # Four spaces after an empty line: a formula.
            indented = line.startswith("    ") and (indented or not before.strip())
            if not (fenced or made or indented or line.lstrip().startswith("|")):
                yield number, line
        before = line


def paths(text: str) -> set[str]:
    """Files of the repository that are named in backticks, from its root or from src/thinwire."""
    spans = re.findall(r"(?<!`)`([^`\s]+)`(?!`)", text)
    rooms = "(?:tests|benchmarks|examples|docs|tools|wire|optim|pipeline|train|compare|report|lab)"
    return {span for span in spans if re.fullmatch(rooms + r"/[\w./-]+\.(?:py|sh|toml|md)", span)}

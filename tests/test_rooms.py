"""The rooms of the source tree: which may import which, and that any of them may come first."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"
BELOW = {  # what each room may import, besides itself and the files beside the rooms
    "wire": set(),
    "optim": {"wire"},
    "methods": {"optim", "wire"},
    "extras": {"methods", "optim", "wire"},
    "pipeline": {"methods", "optim", "wire"},
    "lab": set(),
}


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("room", BELOW)
def test_a_room_imports_only_rooms_below_it(room: str) -> None:
    rooms = {entry.name for entry in (SRC / "thinwire").iterdir() if entry.is_dir()}
    for path in (SRC / "thinwire" / room).rglob("*.py"):
        for name in imported(path):
            parts = name.split(".")
            if parts[0] == "thinwire" and len(parts) > 1 and parts[1] in rooms:
                assert parts[1] in BELOW[room] | {room}, f"{path.name} imports {name}"


def test_any_module_may_be_imported_first() -> None:
    """In forks of one process that has torch: a circle shows only from some of its members."""
    paths = [p for p in (SRC / "thinwire").rglob("*.py") if p.name not in ("__init__.py",)]
    names = [".".join(p.relative_to(SRC).with_suffix("").parts) for p in paths]
    script = (
        "import importlib, os, sys, torch, torch.distributed.tensor\n"
        "for name in sys.argv[1:]:\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        try:\n"
        "            importlib.import_module(name)\n"
        "        except ImportError as error:\n"
        "            print(name, error)\n"
        "        sys.stdout.flush()\n"
        "        os._exit(0)\n"
        "    os.waitpid(pid, 0)\n"
    )
    wanted = [name for name in names if not name.endswith("__main__")]
    done = subprocess.run(
        [sys.executable, "-c", script, *wanted], capture_output=True, text=True, timeout=170
    )
    assert done.stdout == ""

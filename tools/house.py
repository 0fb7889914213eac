"""Figures of the source tree: how deep classes stand, how many names mean several things.

    python tools/house.py                       this tree
    python tools/house.py --before PATH         beside another checkout's src, as a table
    python tools/house.py --json                one JSON object

Static figures come from the syntax trees; levels and hops from running the code of each tree in a
process of its own. A hop is a function of thinwire that one training step enters, on one rank, with
a model of two layers; each function counts once. docs/design.md holds the table this prints.
"""

import argparse
import ast
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[1] / "src"
METHODS = ("Overlapped", "CO2", "OneBitLamb", "ZeroOneAdam", "GradientAverage", "DecentLaM")
ROWS = {
    "levels of a method above torch.optim.Optimizer, at most": "levels",
    "definitions in OneBitLamb and its bases": "definitions",
    "files in the largest folder": "largest_folder",
    "class names that stand for several classes": "shared_names",
    "isinstance checks on codecs": "codec_checks",
    "classes called ...Settings": "settings",
    "longest chain of imports": "import_chain",
    "hops of a step: Overlapped": "hops_overlapped",
    "hops of a step: OneBitLamb": "hops_one_bit_lamb",
    "hops of a step: AsyncMesh": "hops_async_mesh",
    "longest file, lines": "longest_file",
    "longest function, lines": "longest_function",
}
PROBE = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch
from torch import nn
import thinwire as tw
from thinwire import pipeline

def levels(kind):
    bases = kind.__mro__
    return sum(issubclass(b, torch.optim.Optimizer) for b in bases) - 1

def definitions(kind):
    own = [b for b in kind.__mro__ if b.__module__.startswith("thinwire")]
    return sum(callable(v) or isinstance(v, property) for b in own for v in vars(b).values())

class Hops:
    def __enter__(self):
        self.seen = set()
        sys.setprofile(self.note)
        return self
    def note(self, frame, event, arg):
        if event == "call" and "/thinwire/" in frame.f_code.co_filename:
            self.seen.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))
    def __exit__(self, *_):
        sys.setprofile(None)

def hops(build):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = build(net)
    for step in range(10):
        loss = net(torch.randn(4, 4)).square().mean()
        if step < 9:
            loss.backward(); optimizer.step(); optimizer.zero_grad()
    with Hops() as found:
        loss.backward()
        optimizer.step()
    return len(found.seen)

def mesh_hops():
    parts = [nn.Linear(4, 8), nn.Linear(8, 1)]
    net = nn.Sequential(*parts)
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    pipe = tw.AsyncPipeline(net, tw.SparseAverage(inner, fraction=0.5, delay=1),
                            loss=lambda y, t: (y - t).square().mean())
    batches = [(torch.randn(4, 4), torch.randn(4, 1)) for _ in range(12)]
    list(pipe.train(iter(batches[:6]), 6))
    with Hops() as found:
        list(pipe.train(iter(batches[6:7]), 1))
    return len(found.seen)

adamw = lambda net: torch.optim.AdamW(net.parameters())
print(json.dumps({
    "levels": max(levels(getattr(tw, m)) for m in sys.argv[1].split(",")),
    "definitions": definitions(tw.OneBitLamb),
    "hops_overlapped": hops(lambda net: tw.Overlapped(adamw(net), every=1)),
    "hops_one_bit_lamb": hops(lambda net: tw.OneBitLamb(net.parameters(), freeze_at=3)),
    "hops_async_mesh": mesh_hops(),
}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--before", type=Path, default=None, help="the src of another checkout")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    after = figures(HERE)
    if given.json:
        print(json.dumps(after))
        return
    before = None if given.before is None else figures(given.before)
    print("| | before | now |\n|---|---|---|" if before else "| | now |\n|---|---|")
    for title, key in ROWS.items():
        cells = [after[key]] if before is None else [before[key], after[key]]
        print(f"| {title} | " + " | ".join(map(str, cells)) + " |")


def figures(src: Path) -> dict[str, Any]:
    trees = {path: ast.parse(path.read_text()) for path in sorted(src.rglob("*.py"))}
    folders = Counter(path.parent for path in trees if path.name != "__init__.py")
    classes = Counter(node.name for node in every(trees, ast.ClassDef) if node.name[0] != "_")
    functions = [n.end_lineno - n.lineno + 1 for n in every(trees, ast.FunctionDef) if n.end_lineno]
    lines = [len(path.read_text().splitlines()) for path in trees]
    static = {
        "largest_folder": max(folders.values()),
        "shared_names": sum(count > 1 for count in classes.values()),
        "codec_checks": sum(map(asks_codec, every(trees, ast.Call))),
        "settings": sum(name.endswith("Settings") for name in classes.elements()),
        "import_chain": longest_chain(src, trees),
        "longest_file": max(lines),
        "longest_function": max(functions),
    }
    return static | probe(src)


def every(trees: dict[Path, ast.Module], kind: type) -> Iterator[Any]:
    return (node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, kind))


def asks_codec(call: ast.Call) -> bool:
    """Whether it is isinstance(..., Codec), Feedback or one of their kinds."""
    if not isinstance(call.func, ast.Name) or call.func.id not in ("isinstance", "issubclass"):
        return False
    kinds = {"Codec", "Feedback", "ErrorFeedback", "Dense", "Threshold", "Stream"}
    named = {n.id if isinstance(n, ast.Name) else n.attr for n in ast.walk(call.args[1])
             if isinstance(n, ast.Name | ast.Attribute)}  # fmt: skip
    return bool(named & kinds)


def longest_chain(src: Path, trees: dict[Path, ast.Module]) -> int:
    """Modules in the longest chain of imports at module level, one importing the next."""
    names = {module_name(src, path): path for path in trees}
    imports = {name: imported(trees[path], set(names)) for name, path in names.items()}
    depth: dict[str, int] = {}

    def follow(name: str, above: tuple[str, ...] = ()) -> int:
        if name not in depth:
            below = [m for m in sorted(imports[name]) if m not in above and m != name]
            depth[name] = 1 + max((follow(m, (*above, name)) for m in below), default=0)
        return depth[name]

    return max(map(follow, sorted(names)))


def module_name(src: Path, path: Path) -> str:
    parts = path.relative_to(src).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.Module, known: set[str]) -> set[str]:
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & known


def probe(src: Path) -> dict[str, Any]:
    env = os.environ | {"PYTHONPATH": str(src), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, ",".join(METHODS)], env=env, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{src}: {done.stderr.strip().splitlines()[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()

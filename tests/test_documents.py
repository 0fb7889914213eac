"""Every command line in README.md, CONTRIBUTING.md and docs/ is run: the one that is shown, with
flags behind it that make it small. One that is shown and not listed here fails."""

import multiprocessing
import os
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import free_port
from tests.documented import ROOT, commands
from tests.programs import Program, Start, corpus, thinwire  # noqa: F401
from thinwire.errors import LabError
from thinwire.lab import Lab, Link

_context = multiprocessing.get_context("forkserver")

SIZES = ["--eval-windows", "4", "--eval-every", "0", "--warmup", "1"]
TEXT = ["--context", "16", "--batch", "2", "--model", "gpt-0.3m", "--data", "files:texts/*.txt"]
STEPS = ["--steps", "3"]
TRAIN = [*TEXT, *SIZES, *STEPS]
LINK = ["--rate", "50mbit", "--delay", "1ms"]  # a link that any machine can emulate
COMPARE = [*TEXT[:6], "--data", "files:texts/*.txt", *LINK, "--hosts", "2", "--steps", "2"]
COMPARE += ["--evals", "1", "--eval-windows", "4", "--overtime", "1", "--timed", "0"]

# What is shown -> the flags behind it. None: it only names a command, whose --help is asked for.
SHOWN: dict[str, list[str] | None] = {
    "thinwire train": None,
    "thinwire compare": None,
    "thinwire lab": None,
    "thinwire export": None,
    "thinwire report": None,
    "thinwire top": None,
    "thinwire train --workers": None,
    "thinwire train --workers N": None,
    "thinwire train --stages": None,
    "thinwire train --lab": None,
    "thinwire train --help": [],
    "thinwire train --method co2 --help": [],
    # README.md
    "thinwire train --workers 4 --lab --rate 100mbit --method overlapped": [
        *TRAIN,
        *LINK,
        "--workers",
        "2",
    ],
    "thinwire train --stages 2 --replicas 2 --method asyncmesh": TRAIN,
    "thinwire train --run-dir runs/NAME --resume": ["--steps", "4"],
    "thinwire top runs/NAME": [],
    "thinwire export runs/NAME --out model.safetensors": [],
    "thinwire lab --hosts 4 --rate 100mbit --delay 10ms -- python script.py": [
        *LINK,
        "--hosts",
        "2",
    ],
    "thinwire compare --methods ddp,overlapped,one-bit-adam --rate 100mbit": COMPARE,
    # docs/train.md
    "thinwire train --method overlapped --model gpt-3m --steps 500": TRAIN,
    "thinwire train --workers 4 --lab --rate 100mbit --delay 5ms": [
        *TRAIN,
        *LINK,
        "--workers",
        "2",
    ],
    "thinwire train --workers 4": [*TRAIN, "--workers", "2"],
    "thinwire train --config run.toml --lr 3e-4": [*TRAIN, *LINK, "--workers", "2"],
    "thinwire train --run-dir DIR --resume": ["--steps", "4"],
    "thinwire train --stages 4 --method none": [*TRAIN, "--stages", "2"],
    # docs/compare.md
    "thinwire compare --methods ddp,co2,overlapped,one-bit-adam --hosts 4 --rate 100mbit "
    "--delay 10ms": [*COMPARE, "--methods", "ddp,co2"],
    "thinwire compare --methods all --rate 1gbit,100mbit,10mbit --timed 10": [
        *COMPARE,
        "--methods",
        "ddp",
        "--rate",
        "50mbit,20mbit",
    ],
    "thinwire compare --methods ddp,co2 --rate 1gbit,10mbit --run-dir runs/a --only 1gbit": [
        *COMPARE,
        "--rate",
        "50mbit,20mbit",
        "--only",
        "50mbit",
    ],
    "thinwire compare --seconds 300 --model gpt-3m --data 'files:texts/**/*.txt'": [
        *COMPARE,
        "--methods",
        "ddp",
        "--seconds",
        "1",
    ],
    "thinwire compare --set every=8 --set co2.every=12 --set one-bit-lamb.lr=0.01": [
        *COMPARE,
        "--methods",
        "co2,one-bit-lamb",
    ],
    "thinwire report runs/compare-NAME": [],
    "thinwire top runs/compare-NAME": ["--once"],
    # docs/lab.md and docs/quickstart.md
    "thinwire lab --hosts 3 --rate 1gbit --host 2:up=10mbit,down=50mbit,delay=30ms "
    "-- python script.py": LINK,
    "thinwire lab --hosts 2 --rate 100mbit --delay 5ms -- python train.py": LINK,
    "thinwire train --method ddp": TRAIN,
    # docs/results.md
    "thinwire compare --config benchmarks/time_to_loss/grid.toml": [
        *COMPARE,
        "--methods",
        "ddp,overlapped",
        "--set",
        "every=2",
    ],
    # docs/methods
    "thinwire train --method sparse-average --fraction 0.05 --averaging-delay 10": TRAIN,
    "thinwire train --data digits --model resnet-0.1m --batch 256 --workers 2 --method average "
    "--optimizer Lars --optimizer-arg trust=0.02 --lr 2 --adversarial 0.0625": [
        *SIZES,
        *STEPS,
        "--batch",
        "4",
    ],
    "thinwire train --method decentlam --topology ring --momentum 0.9 --lr 0.1": TRAIN,
    "thinwire train --workers 4 --model gpt-3m --batch 4 --lr 1e-3 --final-lr 1 --steps 120 "
    "--method overlapped --every E --outer-momentum M": [*TRAIN, "--workers", "2"],
    "thinwire train --method one-bit-adam": TRAIN,
    "thinwire train --method dct --optimizer SGD --lr 0.3": TRAIN,
}
_RESULTS = (
    "thinwire compare --methods ddp,ddp-fp16,powersgd,post-local-sgd,overlapped,co2,one-bit-adam,"
    "sparse-average --hosts 4 --rate 100mbit --delay 1ms --model gpt-3m --batch 2 --context 128 "
    "--lr 1e-3 --steps 80 --evals 10 --overtime 2 --set overlapped.every=2 overlapped.codec=int8 "
    "overlapped.outer_momentum=0 co2.every=2 co2.codec=int8 co2.outer_momentum=0 "
    "post-local-sgd.every=4 one-bit-adam.freeze_at=16 sparse-average.every=1"
)
SHOWN[_RESULTS] = [*COMPARE, "--steps", "18"]  # more than the dense steps it asks for
SHOWN[_RESULTS] += ["--methods", "overlapped,co2,post-local-sgd,one-bit-adam,sparse-average"]
TORCHRUN: dict[str, list[str] | None] = {
    "torchrun": None,
    "torchrun --nproc-per-node 2 examples/ten_lines.py": [],
    # Run by test_examples.py, on ranks that start sooner than torchrun's.
    "torchrun --nproc-per-node 2 examples/ddp_to_thinwire.py": None,
    "torchrun --nproc-per-node 4 examples/fsdp2_inside_a_node.py": None,
    "torchrun --nproc-per-node 2 examples/deepspeed_one_bit.py": None,
    "torchrun --nproc-per-node 2 examples/torchft_diloco.py": None,
    "torchrun --nproc-per-node 2 examples/recommender.py --density D --value-bits B": [
        "--steps",
        "5",
    ],
    "torchrun --nnodes 2 --node-rank N --master-addr A --master-port P train.py": [],
    "torchrun --nnodes 2 --node-rank N --master-addr A --master-port P -m thinwire train "
    "--method overlapped": TRAIN,
    "torchrun --nnodes 2 --node-rank N --master-addr A --master-port P -m thinwire train "
    "--method overlapped --run-dir runs/NAME": [*TRAIN, "--run-dir", "runs/fresh"],
    "torchrun --nnodes 2 --node-rank N --master-addr A --master-port P -m thinwire train "
    "--run-dir runs/NAME --resume": ["--steps", "4"],
    "torchrun --nproc-per-node 6 -m thinwire train --stages 3 --method overlapped": TRAIN,
}
# Placeholders of the documents, and what stands for them here.
MEANT = {"E": "2", "M": "0.5", "D": "0.1", "B": "8", "DIR": "runs/NAME", "FILE": "results.json"}
MEANT["..."] = "5 %, delay 0"  # of the methods of benchmarks/quality/sparse.py
# Other libraries', in an environment that no test has.
ELSEWHERE = ("benchmarks/rivals/", "benchmarks.rivals.", "rivals/bin/python")

SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
assert total == dist.get_world_size()
print("of", int(total))
dist.destroy_process_group()
"""


def shown(program: str) -> list[str]:
    texts = {command.text for command in commands()}
    return sorted(text for text in texts if text.split()[0] == program)


def in_lab(text: str) -> bool:
    return "--lab" in text or "--config" in text or text.split()[1] in ("lab", "compare")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory, corpus: str) -> Path:
    """What the commands find beside them: scripts, texts, settings, and a run."""
    shelf = tmp_path_factory.mktemp("shelf")
    shutil.copytree(Path(corpus.removeprefix("files:")).parent, shelf / "texts")
    for name in ("script.py", "train.py"):
        (shelf / name).write_text(SCRIPT)
    shutil.copy(ROOT / "examples" / "train.toml", shelf / "run.toml")
    words = ["train", *TRAIN, "--run-dir", "runs/NAME", "--save-every", "1", "--steps", "2"]
    done = _context.Process(target=_main, args=(words, str(shelf)))
    done.start()
    done.join(120)
    assert done.exitcode == 0
    return shelf


def _main(words: list[str], folder: str) -> None:
    os.chdir(folder)
    from thinwire.cli import main

    sys.exit(main(words))


@pytest.fixture
def desk(shelf: Path, thinwire: Start) -> Path:
    shutil.copytree(shelf, Path.cwd(), dirs_exist_ok=True)
    return Path.cwd()


def words_of(text: str, more: list[str]) -> list[str]:
    """The command's words, its files found and its placeholders filled, with `more` flags."""
    words = [MEANT.get(word, word) for word in shlex.split(text)]
    words = [str(ROOT / w) if w.startswith(("examples/", "benchmarks/")) else w for w in words]
    if "--" in words:
        at = words.index("--")
        command = [sys.executable if word == "python" else word for word in words[at:]]
        return [*words[:at], *more, *command]
    return [*words, *more]


def test_every_command_that_is_shown_is_known() -> None:
    for name, known in (("thinwire", SHOWN), ("torchrun", TORCHRUN)):
        listed = shown(name) if name == "thinwire" else [static(text) for text in shown(name)]
        assert not set(listed) - set(known), f"a document shows what no test runs: {name}"
        assert not set(known) - set(listed), f"no document shows this any more: {name}"
    rest = {c.text for c in commands() if c.text.split()[0] not in ("thinwire", "torchrun")}
    modules = "python -m benchmarks.", "OMP_NUM_THREADS=1 python -m benchmarks."
    kinds = ("make ", *modules, "benchmarks/")
    assert not [text for text in rest if not text.startswith((*kinds, *ELSEWHERE))]


def test_nothing_that_is_shown_unpickles_from_an_open_port() -> None:
    assert not [c for c in commands() if "rdzv" in c.text]


def run_shown(text: str, thinwire: Start) -> None:
    more = SHOWN[text]
    words = words_of(text, []) if more is None else words_of(text, more)
    if more is None:
        words = [*words[:2], "--help"]
    finish(thinwire(*words[1:]))


def finish(program: Program) -> None:
    code = program.wait(within=170)
    if "the lab does not keep to its links" in program.err:
        pytest.skip("other programs keep this machine from emulating the link")
    assert code == 0, f"{program.out}\n{program.err}"


@pytest.mark.parametrize("text", [t for t in SHOWN if not in_lab(t) or SHOWN[t] is None])
def test_thinwire(desk: Path, thinwire: Start, text: str) -> None:
    if text.startswith(("thinwire report runs", "thinwire top runs/compare")):
        pytest.skip("with the comparisons")
    run_shown(text, thinwire)


@pytest.fixture
def lab() -> None:
    try:
        with Lab(2, Link.of("50mbit")):
            pass
    except LabError as error:
        pytest.skip(str(error))


@pytest.mark.alone
@pytest.mark.parametrize("text", [t for t in SHOWN if in_lab(t) and SHOWN[t] is not None])
def test_thinwire_in_the_lab(desk: Path, lab: None, thinwire: Start, text: str) -> None:
    run_shown(text, thinwire)
    if "--methods all" not in text:
        return
    (found,) = Path("runs").glob("compare-*")
    found.rename("runs/compare-NAME")
    for again in ("thinwire report runs/compare-NAME", "thinwire top runs/compare-NAME"):
        run_shown(again, thinwire)


# -- torchrun --------------------------------------------------------------------------------------


def static(text: str) -> str:
    """A command of one of several machines, as that of any of them."""
    words = text.split()
    for flag, letter in (("--node-rank", "N"), ("--master-addr", "A"), ("--master-port", "P")):
        if flag in words:
            words[words.index(flag) + 1] = letter
    return " ".join(words)


def start_torchrun(text: str, node: int, port: int) -> "subprocess.Popen[str]":
    given = {"N": str(node), "A": "127.0.0.1", "P": str(port)}
    words = [given.get(word, word) for word in words_of(text, TORCHRUN[text] or [])]
    if "--node-rank" not in words:  # torchrun's own choice is a port that any run may have
        words[1:1] = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    command = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize("text", [text for text, more in TORCHRUN.items() if more is not None])
def test_torchrun(desk: Path, text: str) -> None:
    port = free_port()
    nodes = [start_torchrun(text, node, port) for node in range(2 if "--nnodes 2" in text else 1)]
    try:
        told = [node.communicate(timeout=170)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0] * len(nodes), "\n".join(told)


# -- make, benchmarks ------------------------------------------------------------------------------


@pytest.mark.parametrize("text", shown("make"))
def test_make(text: str) -> None:
    done = subprocess.run([*text.split(), "-n"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    wanted = {
        "demo": "thinwire compare --config examples/demo.toml",
        "test": "-m pytest",
        "lint": "/mypy",
        "docs": "mkdocs build --strict",
        "golden": "tests/golden",
    }
    assert wanted[text.split()[1]] in done.stdout


@pytest.mark.alone
def test_what_make_demo_runs(desk: Path, lab: None, thinwire: Start) -> None:
    more = [*COMPARE, "--methods", "ddp,overlapped", "--set", "every=2"]
    finish(thinwire("compare", "--config", ROOT / "examples" / "demo.toml", *more))


def benchmarks() -> Iterator[str]:
    for command in commands():
        words = [word for word in command.text.split() if "=" not in word[:16] or word[0] == "-"]
        first = words[2] if words[:2] == ["python", "-m"] else words[0]
        if first.startswith(("benchmarks/", "benchmarks.")) and not first.startswith(ELSEWHERE):
            yield command.text


class Parsed(BaseException):
    """The flags were understood; nothing is measured."""


def _parse_flags(words: list[str]) -> None:
    """A benchmark up to where it knows what is asked of it."""
    import argparse

    parse = argparse.ArgumentParser.parse_args

    def parse_args(self: argparse.ArgumentParser, *args: object, **more: object) -> None:
        parse(self, *args, **more)  # type: ignore[call-overload]
        raise Parsed

    argparse.ArgumentParser.parse_args = parse_args  # type: ignore[method-assign, assignment]
    sys.argv = words
    sys.path.insert(0, str(ROOT))
    os.chdir(ROOT)
    run = runpy.run_path if words[0].endswith(".py") else runpy.run_module
    try:
        run(words[0], run_name="__main__")
    except Parsed:
        os._exit(0)
    os._exit(1)


@pytest.mark.parametrize("text", sorted(set(benchmarks())))
def test_flags_of_benchmarks(text: str) -> None:
    words = [word for word in words_of(text, []) if not word.startswith("OMP_")]
    words = words[2:] if words[0] == "python" else words
    process = _context.Process(target=_parse_flags, args=(words,))
    process.start()
    process.join(120)
    assert process.exitcode == 0, text

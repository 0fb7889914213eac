"""Our command line as processes that a test starts, signals and reads.

Each is a fork of the server behind the `ranks` fixture, which has imported torch already: it starts
in milliseconds, and is a process of its own in everything else.
"""

import json
import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch", "thinwire.wire", "thinwire.optim", "thinwire.train.launch", "torch._dynamo"]
)

WITHIN = 60.0  # s, after which a process counts as hung
_WORDS = ["wire", "thin", "slow", "model", "step", "worker", "replica", "mean", "the", "of", "a"]


class Program:
    """A running `thinwire ...`, in the directory and with the environment given."""

    def __init__(
        self, argv: list[str], folder: Path, number: int, env: Mapping[str, str], before: Any
    ) -> None:
        self._out, self._err = folder / f"out-{number}", folder / f"err-{number}"
        streams = str(self._out), str(self._err)
        self._process = _context.Process(
            target=_run, args=(argv, os.getcwd(), dict(env), streams, before), daemon=True
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def wait(self, within: float = WITHIN) -> int:
        """Its exit code, negative for the signal that killed it."""
        self._process.join(within)
        code = self._process.exitcode
        if code is None:
            pytest.fail(f"still running after {within} s:\n{self.out}\n{self.err}")
        return code

    @property
    def out(self) -> str:
        return self._out.read_text() if self._out.exists() else ""

    @property
    def err(self) -> str:
        return self._err.read_text() if self._err.exists() else ""

    @property
    def running(self) -> bool:
        return self._process.exitcode is None

    def signal(self, signum: int) -> None:
        os.kill(self.pid, signum)

    def until(self, condition: Callable[[], Any], within: float = WITHIN) -> Any:
        """Waits for something the program brings about; fails when it ends or takes too long."""
        for _ in range(int(within / 0.05)):
            if found := condition():
                return found
            if wait([self._process.sentinel], timeout=0.05):
                break
        if found := condition():
            return found
        pytest.fail(f"it never came to that:\n{self.out}\n{self.err}")

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


Start = Callable[..., Program]


@pytest.fixture
def thinwire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """`thinwire("train", "--steps", 3)` starts it in the test's own directory, here `desk`."""
    forkserver.ensure_running()  # here, and not among what the test puts into its desk
    desk, logs = tmp_path / "desk", tmp_path / "logs"
    desk.mkdir()
    logs.mkdir()
    monkeypatch.chdir(desk)
    started: list[Program] = []

    def start(*argv: Any, env: Mapping[str, str] | None = None, before: Any = None) -> Program:
        program = Program([str(word) for word in argv], logs, len(started), env or {}, before)
        started.append(program)
        return program

    yield start
    for program in started:
        program.kill()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A value of --data: a few kilobytes of words, in four files."""
    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(0)
    for number in range(4):
        (folder / f"{number}.txt").write_text(" ".join(draw.choices(_WORDS, k=600)))
    return f"files:{folder}/*.txt"


@pytest.fixture
def small(corpus: str) -> list[str]:
    """Flags of the smallest useful run."""
    flags = ["--data", corpus, "--context", "16", "--batch", "2"]
    return [*flags, "--eval-windows", "8", "--warmup", "2"]


def listing(folder: Path) -> dict[str, bytes | None]:
    """Every file below the folder with its content."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


TIMES = {"seconds", "tokens_per_s", "exposed", "hidden"}  # not the same in two runs


def records(run: Path, rank: int = 0) -> list[dict[str, Any]]:
    """A worker's metrics, without what the clock says."""
    lines = (run / "metrics" / f"rank-{rank}.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def steps_done(run: Path, rank: int = 0) -> int:
    """Steps in a worker's metrics, 0 before there are any; for `until`."""
    path = run / "metrics" / f"rank-{rank}.jsonl"
    if not path.exists():
        return 0
    whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return max((int(json.loads(line)["step"]) for line in whole), default=0)


def worker_pid(run: Path, rank: int) -> int:
    """The process of a worker that a launcher has started for this run."""
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            env = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if os.fsencode(run) in words and f"RANK={rank}".encode() in env:
            return int(entry.name)
    raise LookupError(f"no worker {rank} of {run}")


def _run(
    argv: list[str],
    folder: str,
    env: dict[str, str],
    streams: tuple[str, str],
    before: Callable[[], None] | None,
) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, path in enumerate(streams, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.chdir(folder)
    os.environ |= env
    if before is not None:
        before()
    from thinwire.cli import main

    try:
        code: Any = main(argv)
    except SystemExit as end:  # tyro's way out
        code = end.code
    sys.stdout.flush()
    os._exit(int(code or 0))

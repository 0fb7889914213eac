"""Every benchmark runs: with --tiny, to a last line of JSON with the keys that its header names."""

import importlib.util
import json
import multiprocessing
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from tests.documented import ROOT
from thinwire.errors import LabError
from thinwire.lab import Lab, Link

_context = multiprocessing.get_context("forkserver")  # which has imported torch (conftest.py)

KEYS: dict[str, list[str]] = {
    "lab.compare_check": ["methods"],
    "lab.link": ["worst_error", "within_10_percent", "cases"],
    "quality.conadv": ["accuracy", "gain"],
    "quality.decentralized": ["steps", "lr", "momentum", "methods"],
    "quality.decentralized_quadratic": [
        *("error", "dmsgd / decentlam", "codecs", "adam", "real ranks")
    ],
    "quality.freeze_streams": ["streams"],
    "quality.freeze_training": ["trainings"],
    "quality.local_updates": ["loss", "checks"],
    "quality.mesh": ["lr", "delay", "ratio", "seeds"],
    "quality.noise_scale": ["known", "gpt", "cost"],
    "quality.one_bit": ["loss", "over_dense"],
    "quality.pipeline": ["loss", "checks"],
    "quality.sparse": ["loss", "checks"],
    "quality.threshold": ["loss", "checks"],
    "rivals.compare": ["methods"],
    "rivals.deepspeed_one_bit": ["figures", "faster"],
    "speed.codecs": ["ratio"],
    "speed.one_bit": ["efficiency", "target"],
    "speed.overlap": ["efficiency", "outer_bytes_per_parameter"],
    "speed.pipeline": ["figures", "checks"],
    "speed.sparse": ["rate", "figures"],
    "speed.uneven": ["cases"],
    "time_to_loss.grid": ["workers"],
    "time_to_loss.mesh": ["target", "sync", "async", "ratio"],
    "time_to_loss.one_bit": ["ms_per_step", "sooner"],
    "time_to_loss.overlapped": ["ratio", "ratio_at_equal_batch", "seeds"],
}
IN_LAB = {"lab.compare_check", "lab.link", "rivals.compare", "time_to_loss.grid"}
NEEDS = {"quality.conadv": "sklearn", "rivals.deepspeed_one_bit": "deepspeed"}


def source(name: str) -> str:
    return (ROOT / "benchmarks" / f"{name.replace('.', '/')}.py").read_text()


def test_every_benchmark_is_known() -> None:
    files = [path for path in (ROOT / "benchmarks").glob("*/*.py") if path.parent.name != "harness"]
    names = {f"{path.parent.name}.{path.stem}" for path in files if "parser(" in path.read_text()}
    assert names == set(KEYS)


@pytest.mark.parametrize("name", KEYS)
def test_the_header_names_the_keys(name: str) -> None:
    header = source(name).split('"""')[1]
    assert f"python -m benchmarks.{name}" in header
    assert not [key for key in KEYS[name] if f'"{key}"' not in header]


def test_the_readme_names_every_benchmark() -> None:
    readme = (ROOT / "benchmarks" / "README.md").read_text()
    assert not [name for name in KEYS if f"`{name}`" not in readme]


@pytest.fixture(scope="session")
def namespaces() -> None:
    try:
        with Lab(1, Link.of()):
            pass
    except LabError as error:
        if "cannot build its network here" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.mark.parametrize("name", KEYS)
def test_benchmark(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    if name in IN_LAB:
        request.getfixturevalue("namespaces")
    process: Any = _context.Process(target=_run, args=(name, str(tmp_path)))
    process.start()
    process.join(170)
    if process.exitcode is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
    out, err = (tmp_path / "out").read_text(), (tmp_path / "err").read_text()
    if "the lab does not keep to its links" in err:
        pytest.skip("other programs keep this machine from emulating the link")
    assert process.exitcode == 0, f"{out}\n{err}"
    last = json.loads(out.splitlines()[-1])
    assert last["size"] == "tiny"
    assert not set(KEYS[name]) - set(last)


def _run(name: str, folder: str) -> None:
    """As `python -m benchmarks.NAME --tiny` would, with its output in files."""
    os.setsid()
    os.chdir(folder)
    for fd, stream in ((1, "out"), (2, "err")):
        os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT, 0o600), fd)
    sys.path.insert(0, str(ROOT))
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    sys.argv = [name, "--tiny"]
    code: Any = 0
    try:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) or end.code is None else _fail(end.code)
    except BaseException:
        code = _fail(traceback.format_exc())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def _fail(reason: object) -> int:
    print(reason, file=sys.stderr)
    return 1

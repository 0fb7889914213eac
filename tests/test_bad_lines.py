"""Every bad command line, generated from the flags' types, is refused in one line."""

import re
from pathlib import Path

import pytest

from tests.fuzz import bad_lines, flags_of, flags_of_class
from tests.programs import Start, corpus, small, thinwire  # noqa: F401
from thinwire.cli import main
from thinwire.compare.config import CompareConfig
from thinwire.lab.command import LabConfig
from thinwire.lab.network import Lab
from thinwire.report.top import TopConfig
from thinwire.train import worker
from thinwire.train.config import parse
from thinwire.train.methods.registry import METHODS


def said(capsys: pytest.CaptureFixture[str], argv: list[str]) -> str:
    """What the command line answers to words it refuses; fails if it does anything else."""
    try:
        code = main(argv)
    except (Exception, Started) as error:
        pytest.fail(f"{argv!r:.300}: {type(error).__name__}: {error!s:.300}")
    out, err = capsys.readouterr()
    if code != 2 or out or not re.fullmatch(r"thinwire: [^\n\r\x00-\x1f]{5,900}\n", err):
        pytest.fail(f"{argv!r:.200}: {code} {out[:200]} {err[:500]}")
    return err


def accepted(capsys: pytest.CaptureFixture[str], argv: list[str]) -> str:
    """What went otherwise than it should; empty if the line was refused."""
    try:
        said(capsys, argv)
    except pytest.fail.Exception as error:
        return str(error)
    return ""


def check_all(
    capsys: pytest.CaptureFixture[str], before: list[str], lines: list[list[str]], after: list[str]
) -> None:
    assert len(lines) > 5
    for line in lines:
        err = said(capsys, [*before, *line, *after])
        flag = line[0].partition("=")[0]
        assert flag in err or "takes no" in err or "no word of its own" in err, (line, err)


class Started(BaseException):
    """A line that should have been refused has come to start something."""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*args: object, **more: object) -> None:
        raise Started

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(worker, "trainer_of", start)
    monkeypatch.setattr(Lab, "open", start)


@pytest.mark.parametrize("method", METHODS)
def test_train(capsys: pytest.CaptureFixture[str], method: str) -> None:
    own = {flag for flag, _ in flags_of(parse(["--method", "none"]))}
    flags = list(flags_of(parse(["--method", method])))
    if method != "none":  # what all methods share is tried once
        flags = [(flag, kind) for flag, kind in flags if flag not in own]
    lines = list(bad_lines(iter(flags)))
    check_all(capsys, ["train", "--method", method], lines, []) if lines else None


def test_compare(capsys: pytest.CaptureFixture[str]) -> None:
    check_all(capsys, ["compare"], list(bad_lines(flags_of(CompareConfig()))), [])


def test_lab(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for line in bad_lines(flags_of(LabConfig())) if "--" not in line]
    check_all(capsys, ["lab"], lines, ["--", "true"])


def test_top(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ((flag, kind) for flag, kind in flags_of_class(TopConfig) if flag != "--run")
    check_all(capsys, ["top", "."], list(bad_lines(flags)), [])


# What a flag's type allows and its meaning does not.
TRAIN = {
    "--method": ["", "DDP", "ddp ", "best", "x" * 5000],
    "--data": [
        "",
        "web",
        "files:",
        "files:none/*",
        "tokens:none",
        "files:" + "x" * 5000,
        "files:/",
    ],
    "--tokenizer": ["none.json", "."],
    "--vocab": ["0", "-1", "5"],
    "--context": ["0", "-1", "100000000"],
    "--batch": ["0", "-1", "100000000", "2147483647"],
    "--validation": ["0", "1", "-0.5", "2", "1e300"],
    "--model": ["", "gpt", "GPT-3m", "gpt-9t", "resnet-1m"],
    "--steps": ["0", "-1", "-2147483647"],
    "--accumulate": ["0", "-3"],
    "--seed": ["-1", str(2**63), "9" * 99],
    "--eval-every": ["-1"],
    "--eval-windows": ["0"],
    "--save-every": ["-1"],
    "--keep": ["0"],
    "--run-dir": ["", "/proc/x", "/dev/null", "/dev/null/x", "x" * 5000, "/" + "a/" * 3000],
    "--workers": ["0", "-1", "999", "2147483647"],
    "--replicas": ["-1", "2147483647"],
    "--stages": ["0", "-1", "2147483647"],
    "--shards": ["0", "-2"],
    "--timeout": ["0", "-1", "1e300", "1e-300"],
    "--lr": ["-1"],
    "--weight-decay": ["-1"],
    "--warmup": ["-1"],
    "--final-lr": ["-1"],
    "--clip": ["-1"],
    "--optimizer": ["", "Adamm", "LBFGS", "Optimizer"],
    "--optimizer-arg": [
        "x",
        "=",
        "=1",
        "x=1",
        "betas=1",
        "betas=[1,2,3]",
        "eps=no",
        "eps={",
        "lr=1",
    ],
    "--adversarial": ["-1", "0.1"],
    "--rate": ["1mbit"],
    "--host": ["0:rate=1mbit"],
    "--config": ["", "none.toml", ".", "/dev/zero", "/dev/null/x", "x" * 5000, "a\x1bb"],
    "--codec": ["int8"],
}
LAB = {
    "--rate": ["", "fast", "0mbit", "-1mbit", "1", "1e3mbit", "9" * 400 + "mbit", "1bit"],
    "--up": ["x", "0mbit"],
    "--down": ["x"],
    "--delay": ["x", "-1ms", "1", "9999999s", "9" * 400 + "s"],
    "--jitter": ["x", "1ms", "9999999s"],
    "--loss": ["-0.1", "1", "2"],
    "--host": [
        "",
        "x",
        "9:rate=1mbit",
        "0:",
        "0:x=1",
        "0:rate=x",
        "0:loss=x",
        "-1:rate=1mbit",
        "0",
    ],
    "--hosts": ["0", "-1", "100000", "2147483647"],
    "--per-host": ["0", "-1", "2147483647"],
}
COMPARE = {
    "--methods": ["", ",", "best", "ddp,ddp", "ddp,,co2", "x" * 5000],
    "--hosts": ["0", "1", "-1", "129", "2147483647"],
    "--steps": ["0"],
    "--seconds": ["-1"],
    "--timed": ["-1"],
    "--limit": ["0"],
    "--overtime": ["0"],
    "--seeds": ["0", "2147483647"],
    "--evals": ["0", "2147483647"],
    "--batch": ["0", "2147483647"],
    "--rate": ["", "fast", "1gbit,1gbit", "1gbit,1000mbit", ","],
    "--set": ["x", "=", "every=", "ddp.every=3", "co2.every=x", "co2.penalty=x", "nope.lr=1"],
    "--set=": ["co2.lr=nan", "co2.every=" + "9" * 5000, "lr=" + "9" * 5000],
    "--only": ["5mbit"],
    "--run-dir": ["/proc/x", "/dev/null", "x" * 5000],
    "--config": ["none.toml", "."],
    "--delay": ["x", "9999999s"],
    "--model": ["gpt-9t"],
    "--data": ["web"],
}
OTHERS = [
    ["top", "nowhere"],
    ["top", "/dev/null"],
    ["top", ".", "--interval", "0"],
    ["top", ".", "x"],
    ["report", "nowhere"],
    ["report", "/dev/null"],
    ["report"],
    ["export", "nowhere", "--out", "x"],
    ["export", "nowhere"],
    ["export", "--out", "x"],
    ["export", ".", "--out", "x"],
    ["export", "/dev/zero", "--out", "x"],
    ["export", "x" * 5000, "--out", "x"],
    ["export", ".", "--out", "/dev/full/x"],
    ["export", ".", "--out", "x" * 5000],
    ["methods", "x\ny"],
    ["lab"],
    ["lab", "--"],
    ["lab", "--", ""],
    ["lab", "x", "--", "true"],
    ["tr\nain"],
    ["x" * 5000],
    ["train", "train"],
    ["train", "--"],
    ["train", "-x"],
    ["train", "--steps=3", "--stpes=3"],
    ["train", "--resume"],
    ["train", "--resume", "--run-dir", "nowhere"],
]


def meant(command: str, table: dict[str, list[str]], after: list[str]) -> list[list[str]]:
    lines = []
    for flag, values in table.items():
        for value in values:
            word = [f"{flag}{value}"] if flag.endswith("=") else [f"{flag}={value}"]
            lines.append([command, *word, *after])
    return lines


@pytest.mark.parametrize(
    "lines",
    [
        meant("train", TRAIN, []),
        meant("lab", LAB, ["--", "true"]),
        meant("compare", COMPARE, []),
        OTHERS,
    ],
    ids=["train", "lab", "compare", "others"],
)
def test_meaning(capsys: pytest.CaptureFixture[str], lines: list[list[str]]) -> None:
    assert not [problem for line in lines if (problem := accepted(capsys, line))]


def test_a_file_is_as_strict_as_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    for text in (
        "steps = 99999999999",
        f"seed = {2**63}",
        "lr = nan",
        "lr = inf",
        'run = "a\\u0000b"',
        'data = "files:\\u001b[2J"',
        'optimizer_arg = ["a\\nb"]',
        "a = " + "[" * 100_000 + "]" * 100_000,
        "a.b = 1",
        '"" = 1',
        f'"{"x" * 5000}" = 1',
        "steps = [1]",
        "noise_scale = []",
        "noise_scale = {}",
        "steps = 1\nsteps = 2",
        "steps = 1979-05-27",
    ):
        Path("run.toml").write_text(text)
        said(capsys, ["train", "--config", "run.toml"])
        said(capsys, ["compare", "--config", "run.toml"])


@pytest.mark.parametrize("argv", [["train", "--steps", "x"], ["compare", "--hosts", "1"]])
def test_as_processes(thinwire: Start, argv: list[str]) -> None:
    program = thinwire(*argv)
    assert program.wait() == 2
    assert re.fullmatch(r"thinwire: [^\n]+\n", program.err)
    assert program.out == ""

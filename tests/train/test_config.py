"""Settings: where they may be written, which of them wins, and what is refused."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from thinwire.errors import UsageError
from thinwire.lab.command import LinkConfig
from thinwire.train import config as config_module
from thinwire.train.config import TrainConfig, flat_values, parse
from thinwire.train.flags import leaves
from thinwire.train.methods.registry import METHODS


def toml(folder: Path, text: str) -> str:
    path = folder / "run.toml"
    path.write_text(text)
    return str(path)


def refusal(*argv: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse(argv)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("method", METHODS)
def test_a_flag_has_one_meaning(method: str) -> None:
    names = Counter(f.name for _, f in leaves(parse(["--method", method])))
    assert not [name for name, count in names.items() if count > 1]


def test_a_flag_beats_the_file_and_the_file_beats_the_default(tmp_path: Path) -> None:
    file = toml(tmp_path, 'steps = 7\nbatch = 3\nlr = 1\neval-every = 9\noptimizer_arg = ["a=1"]')
    config = parse(["--config", file, "--steps", "5"])
    assert (config.loop.steps, config.data.batch, config.loop.eval_every) == (5, 3, 9)
    assert config.optimizer.lr == 1.0
    assert isinstance(config.optimizer.lr, float)
    assert config.optimizer.optimizer_arg == ("a=1",)
    assert config.data.context == TrainConfig().data.context


def test_the_last_flag_counts() -> None:
    argv = ["--method", "ddp", "--method", "average", "--codec=int8", "--steps=3", "--steps", "4"]
    config = parse(argv)
    assert (config.method, config.settings.codec, config.loop.steps) == ("average", "int8", 4)


def test_the_file_may_name_the_method_and_set_its_flags(tmp_path: Path) -> None:
    config = parse(["--config", toml(tmp_path, 'method = "average"\ncodec = "int4+ef"')])
    assert (config.method, config.settings.codec) == ("average", "int4+ef")


def test_a_methods_flags_are_its_own() -> None:
    assert parse(["--method", "ddp", "--bucket-mb", "1"]).settings.bucket_mb == 1
    assert "bucket_mb" not in flat_values(parse(["--method", "average"]))
    assert "there is no flag '--codec'" in refusal("--method", "none", "--codec", "int8")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stpes = 3", "no setting 'stpes'; did you mean steps?"),
        ("zzz = 3", "no setting 'zzz'"),
        ('method = "none"\ncodec = "int8"', "no setting 'codec'"),
        ('steps = "3"', "steps takes a whole number, got '3'"),
        ("steps = 3.5", "steps takes a whole number, got 3.5"),
        ("steps = true", "steps takes a whole number, got True"),
        ('lr = "fast"', "lr takes a number, got 'fast'"),
        ("bf16 = 1", "bf16 takes true or false, got 1"),
        ("data = 3", "data takes text in quotes, got 3"),
        ('vocab = "many"', "vocab takes a whole number, got 'many'"),
        ("run = 3", "run_dir takes text in quotes, got 3"),
        ('objective = "both"', 'objective takes "causal" or "masked", got \'both\''),
        ("optimizer_arg = [1]", "optimizer_arg takes a list, each of it text in quotes, got [1]"),
        ("[loop]\nsteps = 3", "no setting 'loop'"),
        ("steps =", "is not TOML"),
        ('method = "best"', "--method takes one of none, ddp, average"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    file = toml(tmp_path, text)
    refused = refusal("--config", file)
    assert said in refused
    assert file in refused or said.startswith("--")


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    assert "No such file" in refusal("--config", str(tmp_path / "none.toml"))
    assert "Is a directory" in refusal("--config", str(tmp_path))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    assert "is not TOML" in refusal("--config", str(tmp_path / "binary.toml"))
    assert refusal("--config") == "--config needs a value"


@pytest.mark.parametrize(("name", "least"), config_module._LEAST.items())
def test_bounds(name: str, least: int) -> None:
    flag = "--" + name.replace("_", "-")
    at_bound = parse([flag, str(least)])
    assert flat_values(at_bound)[name] == least
    assert refusal(f"{flag}={least - 1}").startswith(f"{flag} takes a number >= {least}, got ")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--timeout", "0"], "--timeout takes seconds > 0"),
        (["--timeout", "nan"], "--timeout takes a finite number"),
        (["--timeout", "inf"], "--timeout takes a finite number"),
        (["--clip", "nan"], "--clip takes a finite number"),
        (["--lr", "inf"], "--lr takes a finite number"),
        (["--seed", str(2**63)], "--seed takes a whole number below 2**63"),
        (["--bucket-mb", "0"], "--bucket-mb takes a number > 0"),
        (["--method", "average", "--codec", "int3"], "int3"),
        (["--resume"], "--resume continues an earlier run: name its directory with --run-dir"),
        (["--method"], "--method needs a value"),
    ],
)
def test_values_nobody_could_use_are_refused(argv: list[str], said: str) -> None:
    assert said in refusal(*argv)


@pytest.mark.parametrize("name", [f.name for f in config_module.fields(LinkConfig)])
def test_links_are_shaped_in_the_lab_only(name: str) -> None:
    value = {"loss": "0.5", "host": "0:rate=1mbit"}.get(name, "5ms" if name == "delay" else "9mbit")
    assert (
        refusal(f"--{name}", value)
        == f"--{name} shapes emulated links: add --lab to run in the lab"
    )
    assert parse([f"--{name}", value, "--lab"]).place.lab


def test_a_mistyped_flag_is_refused_and_the_right_one_named() -> None:
    assert refusal("--stpes", "3") == "there is no flag '--stpes' here: did you mean --steps?"


class TestResumedRun:
    """`--run DIR --resume` alone takes the settings the run was made with."""

    @pytest.fixture
    def run(self, tmp_path: Path) -> str:
        argv = ["--method", "average", "--codec", "int8", "--lr", "2e-4", "--steps", "9"]
        argv += ["--workers", "3", "--lab", "--rate", "5mbit", "--optimizer-arg", "eps=1e-6"]
        made = parse(argv)
        (tmp_path / config_module.CONFIG).write_text(json.dumps(flat_values(made)))
        return str(tmp_path)

    def test_nothing_needs_to_be_said_again(self, run: str) -> None:
        config = parse(["--run", run, "--resume"])
        assert (config.method, config.settings.codec, config.optimizer.lr) == (
            "average",
            "int8",
            2e-4,
        )
        assert (config.place.workers, config.network.rate, config.loop.steps) == (3, "5mbit", 9)
        assert config.optimizer.optimizer_arg == ("eps=1e-6",)
        assert (config.loop.run_dir, config.loop.resume) == (run, True)

    def test_flags_and_file_come_first(self, run: str, tmp_path: Path) -> None:
        file = toml(tmp_path, f'steps = 11\nlr = 0.5\nrun = "{run}"\nresume = true')
        config = parse(["--config", file, "--lr", "0.25"])
        assert (config.loop.steps, config.optimizer.lr, config.settings.codec) == (11, 0.25, "int8")

    def test_a_new_run_does_not_look_there(self, run: str) -> None:
        assert parse(["--run", run]).method == "ddp"

    def test_another_method_is_not_confused_with_it(self, run: str) -> None:
        config = parse(["--run", run, "--resume", "--method", "ddp"])
        assert config.settings.bucket_mb == 25.0

    def test_who_starts_a_worker_decides_where_it_runs(
        self, run: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(os.environ, "RANK", "0")
        config = parse(["--run", run, "--resume"])
        assert (config.place.workers, config.place.lab, config.loop.steps) == (1, False, 9)

    def test_garbled_settings_are_refused(self, run: str) -> None:
        Path(run, config_module.CONFIG).write_text("{")
        assert "cannot read the settings in" in refusal("--run", run, "--resume")


def test_what_ranks_must_share_and_what_a_run_must_keep() -> None:
    config = parse(["--method", "average", "--codec", "int8", "--optimizer-arg", "eps=1"])
    shared: dict[str, Any] = config.shared()
    assert shared["codec"] == "int8"
    assert {"run_dir", "resume", "steps", "timeout"} <= set(shared)
    assert not {"workers", "lab", "rate", "tensorboard"} & set(shared)
    assert config.kept() == {
        "method": "average",
        "seed": 0,
        "shards": 1,
        "optimizer": "AdamW",
        "optimizer_arg": ["eps=1"],
        "weight_decay": 0.01,
        "stages": 1,
        "schedule": "1f1b",
        "stash": True,
        "lead": 0,
        "codec": "int8",
    }

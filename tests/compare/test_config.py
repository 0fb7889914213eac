"""The flags of `thinwire compare`: what they mean, and how bad ones are refused."""

from pathlib import Path

import pytest

from thinwire.compare.config import CompareConfig, parse
from thinwire.errors import UsageError
from thinwire.train.flags import flat_values, with_values
from thinwire.train.methods.registry import METHODS


def test_the_yardstick_always_runs_and_runs_once() -> None:
    assert parse(["--methods", "ddp,co2"]).methods == ["none", "ddp", "co2"]
    assert parse(["--methods", "ddp, none"]).methods == ["none", "ddp"]
    assert sorted(parse(["--methods", "all"]).methods) == sorted(METHODS)


def test_rates_come_fastest_first() -> None:
    assert parse(["--rate", "10mbit,1gbit,100mbit"]).rates == ["1gbit", "100mbit", "10mbit"]


def test_settings_of_single_methods() -> None:
    flags = ["--methods", "ddp,co2,overlapped,lamb", "--lr", "1e-3"]
    flags += ["--set", "every=8", "co2.every=12", "--set", "lamb.lr=0.01"]
    flags += ["--set=overlapped.offload=yes", "--rate", "10mbit"]
    config = parse(flags)
    assert config.rates == ["10mbit"]
    co2, overlapped = config.of_method("co2", 3), config.of_method("overlapped", 3)
    assert (co2.settings.every, overlapped.settings.every) == ("12", "8")
    assert overlapped.settings.offload is True
    assert config.of_method("lamb", 0).optimizer.lr == 0.01
    assert co2.optimizer.lr == 1e-3
    assert co2.loop.seed == 3
    assert co2.optimizer.final_lr == 1.0  # so that a curve does not depend on the budget


def test_every_method_reads_the_same() -> None:
    config = parse(["--hosts", "3", "--batch", "5", "--context", "64", "--accumulate", "2"])
    assert config.samples_per_step() == 3 * 5 * 2
    for name in config.methods:
        of_method = config.of_method(name, 0)
        assert (of_method.data.batch, of_method.data.context) == (5, 64)
        assert of_method.loop.accumulate == 2
        assert of_method.place.workers == 3


def test_settings_survive_the_disk() -> None:
    config = parse(["--set", "ddp.bucket-mb=1", "--rate", "1gbit,10mbit", "--seeds", "2"])
    again = with_values(CompareConfig(), flat_values(config))
    assert again == config


def test_a_file_gives_settings(tmp_path: Path) -> None:
    file = tmp_path / "race.toml"
    file.write_text('methods = "ddp"\nsteps = 7\nset = ["ddp.bucket-mb=2"]\nrate = "10mbit"\n')
    config = parse(["--config", str(file), "--steps", "9"])
    assert (config.race.steps, config.methods, config.rates) == (9, ["none", "ddp"], ["10mbit"])
    assert config.of_method("ddp", 0).settings.bucket_mb == 2
    file.write_text("stepps = 7\n")
    with pytest.raises(UsageError, match="no setting 'stepps'; did you mean steps"):
        parse(["--config", str(file)])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--methods", "ddp,overlaped"], "no method 'overlaped' (did you mean overlapped?)"),
        (["--methods", "best"], "name all, or some of none, ddp"),
        (["--methods", "ddp,,co2"], "--methods takes names with commas between"),
        (["--methods", "ddp,ddp"], "'ddp' is named twice"),
        (["--methods", "asyncmesh", "--hosts", "3"], "2 stages, a host each, and --hosts 3 is no"),
        (["--methods", "asyncmesh", "--hosts", "3"], "give --hosts 2 or 4, or --set asyncmesh.st"),
        (["--rate", "1gbit,10mbit", "--only", "1mbit"], "--only 1mbit: --rate is 1gbit,10mbit"),
        (["--hosts", "1"], "--hosts takes 2 or more: one host has nobody to talk to, got 1"),
        (["--hosts", "999"], "--hosts takes 2 to 128, got 999"),
        (["--rate", "fast"], "rate: got 'fast', takes a number above zero with kbit"),
        (["--rate", "100mbit,fast"], "rate: got 'fast'"),
        (["--rate", "1gbit,1000mbit"], "the same rate is named twice"),
        (["--rate", "1gbit,10mbit", "--up", "1mbit"], "--up with several rates"),
        (["--delay", "long"], "duration: got 'long'"),
        (["--steps", "0"], "--steps takes a number >= 1, got 0"),
        (["--seconds", "-1"], "--seconds takes a number >= 0, got -1"),
        (["--seconds", "nan"], "--seconds takes a finite number"),
        (["--seconds", "60", "--final-lr", "0.1"], "give --steps, or --final-lr 1"),
        (["--limit", "0"], "--limit takes a number >= 1, got 0"),
        (["--timed", "-1"], "--timed takes a number >= 0, got -1"),
        (["--overtime", "0.5"], "--overtime takes a number >= 1, got 0.5"),
        (["--seeds", "0"], "--seeds takes a number >= 1, got 0"),
        (["--evals", "0"], "--evals takes a number >= 1, got 0"),
        (["--timeout", "0"], "--timeout takes seconds > 0"),
        (["--batch", "0"], "--batch takes a number >= 1"),
        (["--set", "co2.every"], "--set takes METHOD.SETTING=VALUE"),
        (["--set", ".every=8"], "--set takes METHOD.SETTING=VALUE"),
        (["--set", "diloco.every=8"], "'diloco' is not compared here"),
        (["--set", "co2.evry=8"], "co2 has no setting 'evry'; did you mean every?"),
        (["--set", "nothing=8"], "none of the methods has a setting 'nothing'"),
        (["--set", "co2.batch=8"], "batch is the same for all methods; set it with --batch"),
        (["--set", "co2.outer-lr=fast"], "outer-lr takes a number, got 'fast'"),
        (["--set", "co2.every=often"], "--every takes a number of steps or auto"),
        (["--set", "co2.offload=maybe"], "offload takes true or false, got 'maybe'"),
        (["--set", "co2.clip_by=both"], 'clip-by takes "norm" or "value", got'),
        (["--host", "7:rate=1mbit"], "host 7 does not exist"),
    ],
)
def test_bad_input(flags: list[str], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse(flags)
    assert said in str(refused.value)

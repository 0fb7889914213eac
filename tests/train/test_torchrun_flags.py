"""torchrun reads every word of its command line: a flag of ours that abbreviates one of its own
never gets to us."""

import pytest
from torch.distributed.run import get_args_parser

from thinwire.train.config import RUN_FLAGS, parse
from thinwire.train.flags import leaves
from thinwire.train.methods.registry import METHODS

TORCHRUNS = [option for action in get_args_parser()._actions for option in action.option_strings]


def flags_of(method: str) -> list[str]:
    names = [field.name for _, field in leaves(parse(["--method", method]))]
    words = [*names, *(f"no_{name}" for name in names), "config"]
    return [f"--{form}" for word in words for form in (word, word.replace("_", "-"))]


@pytest.mark.parametrize("method", METHODS)
def test_no_flag_is_taken_for_one_of_torchruns(method: str) -> None:
    taken = [(flag, own) for flag in flags_of(method) for own in TORCHRUNS if own.startswith(flag)]
    assert not taken


def test_torchrun_passes_the_run_directory_on() -> None:
    given = get_args_parser().parse_args(
        ["--nproc-per-node", "2", "-m", "thinwire", "train", "--run-dir", "runs/a", "--resume"]
    )
    assert given.training_script_args == ["train", "--run-dir", "runs/a", "--resume"]


@pytest.mark.parametrize("flag", RUN_FLAGS)
def test_the_old_name_still_works_where_torchrun_is_not(flag: str) -> None:
    assert parse([flag, "runs/a"]).loop.run_dir == "runs/a"
    assert parse([f"{flag}=runs/a"]).loop.run_dir == "runs/a"

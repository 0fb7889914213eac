"""The bytes in the metrics say what was launched: the same at every step, run after run."""

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Ranks
from tests.programs import corpus, records, small  # noqa: F401
from thinwire.train.config import parse
from thinwire.train.worker import run_worker


def train(argv: list[str]) -> dict[str, Any]:
    return run_worker(parse(argv))[1]


@pytest.mark.parametrize(
    "flags",
    [
        ["--method", "overlapped", "--every", "2", "--codec", "int8"],
        ["--method", "streaming-diloco", "--every", "8", "--fragment-delay", "1"],
        ["--method", "sparse-average", "--averaging-delay", "3"],
        ["--method", "one-bit-adam", "--freeze-at", "3", "--delayed-step", "--clip", "0"],
    ],
    ids=lambda flags: flags[1],
)
def test_two_runs_have_sent_as_much_at_every_step(
    ranks: Ranks, small: list[str], tmp_path: Path, flags: list[str]
) -> None:
    columns = []
    for number in range(2):
        run = tmp_path / f"run-{number}"
        ranks(2, train, [*small, *flags, "--steps", "9", "--run-dir", str(run)])
        steps = [[r for r in records(run, rank) if r["kind"] == "step"] for rank in (0, 1)]
        columns.append([[record["bytes"] for record in rank] for rank in steps])
    assert columns[0] == columns[1]
    assert columns[0][0][-1] > 0

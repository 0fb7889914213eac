"""Values that a flag's type allows: each is refused by name or trains, and none is a traceback."""

from pathlib import Path
from typing import Any, Literal, get_origin

import pytest

from tests.fuzz import flags_of
from tests.programs import corpus, small  # noqa: F401
from thinwire.errors import ThinwireError
from thinwire.train.config import parse
from thinwire.train.methods.registry import METHODS
from thinwire.train.worker import run_worker

WHOLE = ["-1", "0", "2147483647"]
REAL = ["-1", "1e-300", "1e300"]
TEXT = ["x", "-1", "9" * 20, "nan", "threshold:", "edges:0-0", "torus:0", "int4+ef"]
SHARED = {flag for flag, _ in flags_of(parse(["--method", "none"]))}
# Of the flags that all methods share: what the trainer makes figures of.
TRIED = {
    "--lr",
    "--weight-decay",
    "--clip",
    "--final-lr",
    "--warmup",
    "--eval-windows",
    "--save-every",
    "--keep",
    "--optimizer",
    "--optimizer-arg",
    "--timeout",
    "--lead",
    "--cut",
    "--activation-codec",
    "--validation",
    "--vocab",
}


def values_of(kind: Any) -> list[str]:
    if kind is bool or get_origin(kind) is Literal:
        return []
    return {int: WHOLE, float: REAL}.get(kind, TEXT)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", METHODS)
def test_it_is_refused_or_trains(small: list[str], tmp_path: Path, method: str) -> None:
    wanted = TRIED if method == "none" else None
    flags = [(f, k) for f, k in flags_of(parse(["--method", method])) if f not in SHARED]
    if wanted is not None:
        flags = [(f, k) for f, k in flags_of(parse(["--method", method])) if f in wanted]
    for flag, kind in flags:
        for value in values_of(kind):
            argv = [*small, "--method", method, "--steps", "2", f"{flag}={value}"]
            run = tmp_path / f"{flag}-{value}"
            try:
                run_worker(parse([*argv, "--run-dir", str(run)]))
            except ThinwireError:
                continue
            except Exception as error:
                pytest.fail(f"{flag}={value}: {type(error).__name__}: {error}")

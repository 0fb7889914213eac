"""The gate of a redesign: the same digests before and after.

    make golden                  writes .golden.json with the code as it is (a few minutes)
    make test ARGS=tests/golden  checks every case against it

The digests are of this machine: another torch, numpy or processor may round the last bit another
way. So the file is not kept in the repository; write it from the commit that a change starts from.
Where there is none, or it is of another machine, a few cases are held to themselves: two runs, and
one that is saved and loaded in the middle, must have one digest. The methods' oracles, which need
no file, are in tests/optim.
"""

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import Ranks
from tests.golden.cases import CASES, RESUMED, run

FILE = Path(__file__).parents[2] / ".golden.json"
WRITING = os.environ.get("GOLDEN") == "write"
SAMPLE = ["overlapped int4+ef", "one-bit-lamb late", "average threshold"]
MIDDLE = 11  # with every kind of flight in the air


def machine() -> dict[str, str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    cpu = next(named, platform.machine())
    return {"cpu": cpu, "torch": torch.__version__, "numpy": np.__version__}


def recorded() -> dict[str, Any]:
    """Digests by case; empty where there is no file of this machine."""
    if WRITING or not FILE.exists():
        return {}
    kept = json.loads(FILE.read_text())
    return dict(kept["digests"]) if kept["machine"] == machine() else {}


GOLDEN = recorded()


def put(name: str, digest: list[str]) -> None:
    kept = json.loads(FILE.read_text()) if FILE.exists() else {"digests": {}}
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    kept |= {"machine": machine(), "commit": commit.strip()}
    kept["digests"][name] = digest
    FILE.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


@pytest.mark.parametrize("name", CASES if GOLDEN or WRITING else SAMPLE)
def test_the_digest_is_what_it_was(ranks: Ranks, name: str) -> None:
    digest = ranks(CASES[name].ranks, run, name)
    if WRITING:
        put(name, digest)
    assert digest == (GOLDEN.get(name) or ranks(CASES[name].ranks, run, name))


@pytest.mark.parametrize("name", RESUMED if GOLDEN or WRITING else SAMPLE[:1])
def test_and_the_same_with_a_save_and_a_load_in_the_middle(ranks: Ranks, name: str) -> None:
    expected = GOLDEN.get(name) or ranks(CASES[name].ranks, run, name)
    assert ranks(CASES[name].ranks, run, name, MIDDLE) == expected

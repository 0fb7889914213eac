"""Programs on the emulated hosts of the lab, and what each of them printed as JSON."""

import json
import sys
from typing import Any

import pytest

from thinwire.errors import LabError
from thinwire.lab import Lab, Link

_PRELUDE = """
import json

def tx_bytes():
    for line in open("/proc/self/net/dev"):
        name, _, counts = line.partition(":")
        if name.strip() == "wire0":
            return int(counts.split()[8])
    raise SystemExit("this host has no wire0")
"""


def on_hosts(script: str, hosts: int, link: Link) -> list[Any]:
    """The lists and figures that the hosts printed, in order of arrival. `tx_bytes()` and `json`
    are there for the script. Skips the test where the kernel lets nobody build a network."""
    lines: list[str] = []
    try:
        with Lab(hosts, link) as lab:
            command = [sys.executable, "-c", _PRELUDE + script]
            outcome = lab.start(command, sink=lambda line: lines.append(line.text)).wait()
    except LabError as error:
        if "cannot build its network here" not in str(error):
            raise
        pytest.skip(str(error))
    assert outcome.code == 0, lines
    return [json.loads(line) for line in lines if line.startswith("[")]

"""What a checkpoint says of itself."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEP_NAME = re.compile(r"step-[0-9]{8,18}")
_MOST_REPLICAS = 1 << 20


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself."""

    path: Path
    step: int
    replicas: int
    meta: dict[str, Any]
    parts: dict[str, int]
    """CRC-32 of each part's metadata."""


def part_of(replica: int) -> str:
    """The name of what is a replica's own."""
    return f"replica-{replica}"


def manifest_of(checkpoint: Path, body: dict[str, Any]) -> Manifest:
    """ValueError where a figure is none that a save has written."""
    step, replicas, meta, parts = (body[key] for key in ("step", "replicas", "meta", "parts"))
    if type(step) is not int or step < 0:
        raise ValueError(f"step {step!r:.40}")
    named = STEP_NAME.match(checkpoint.name)
    if named is not None and int(named[0].removeprefix("step-")) != step:
        raise ValueError(f"it is of step {step}, not of that in its directory's name")
    if type(replicas) is not int or not 0 < replicas <= _MOST_REPLICAS:
        raise ValueError(f"{replicas!r:.40} replicas")
    if not isinstance(meta, dict) or not isinstance(parts, dict):
        raise ValueError("meta and parts by name are missing")
    if set(parts) != {"shared", *map(part_of, range(replicas))}:
        raise ValueError(f"its parts are not those of {replicas} replicas")
    return Manifest(checkpoint, step, replicas, meta, parts)

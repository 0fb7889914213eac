"""How much memory there is for this process: the machine's, and what its control groups leave."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ENDLESS = 1 << 62  # bytes: a number of them that cannot be counted


def available(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still take; None where the system does not tell."""
    found = []
    with suppress(OSError, ValueError, KeyError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines if ":" in line}
        found.append(1024 * (kilobytes["MemAvailable"] + kilobytes.get("SwapFree", 0)))
    found += _cgroup_limits(root)
    return min(found) if found else None


def _cgroup_limits(root: Path) -> Iterator[int]:
    """What each of this process' groups leaves, its pages of files counted as free."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, kind, path = line.split(":", 2)
            if kind == "":
                base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
            elif "memory" in kind.split(","):
                base = root / "sys/fs/cgroup/memory"
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            else:
                continue
            group = base / path.strip("/")
            while True:
                yield from _left(group, *names)
                if group == base or base not in group.parents:
                    break
                group = group.parent


def _left(group: Path, limit: str, usage: str) -> Iterator[int]:
    with suppress(OSError, ValueError):  # "max" is no number
        most, used = (int((group / name).read_text()) for name in (limit, usage))
        with suppress(OSError):
            for line in (group / "memory.stat").read_text().splitlines():
                name, _, value = line.partition(" ")
                used -= int(value) if name in ("inactive_file", "total_inactive_file") else 0
        if most < ENDLESS:
            yield max(0, most - used)

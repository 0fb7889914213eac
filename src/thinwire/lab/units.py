"""Rates and durations as people write them: `100mbit`, `1.5Gbit/s`, `20ms`."""

import re

from thinwire.command_line import shown
from thinwire.errors import UsageError

_NUMBER = r"\s*(\d+(?:\.\d*)?|\.\d+)\s*"
# Only `bit`: "100MBps" and "100mbps" mean bytes to some tools and bits to others.
_RATE = re.compile(_NUMBER + r"([kmgt]?)bit(?:/s|ps)?\s*", re.IGNORECASE)
_DURATION = re.compile(_NUMBER + r"(us|ms|s)\s*", re.IGNORECASE)
_ZERO = re.compile(r"\s*0+(?:\.0*)?\s*")

_BITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_rate(text: str) -> float:
    """Bits per second."""
    match = _RATE.fullmatch(text)
    if match is None or float(match[1]) == 0:
        raise UsageError(
            f"rate: got {shown(text)}, takes a number above zero with kbit, mbit or gbit, "
            "such as 100mbit or 1.5Gbit/s"
        )
    return float(match[1]) * _BITS[match[2].lower()]


def parse_duration(text: str) -> float:
    """Seconds."""
    if _ZERO.fullmatch(text):
        return 0.0
    match = _DURATION.fullmatch(text)
    if match is None:
        raise UsageError(
            f"duration: got {shown(text)}, takes 0 or a number with us, ms or s, such as 10ms or "
            "1.5s"
        )
    return float(match[1]) * _SECONDS[match[2].lower()]


def format_rate(rate: float) -> str:
    """`100 Mbit/s`, from bits per second."""
    for unit, scale in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if rate >= scale:
            return f"{rate / scale:.4g} {unit}"
    return f"{rate:.4g} bit/s"


def format_duration(seconds: float) -> str:
    """`20 ms`, from seconds."""
    if seconds == 0:
        return "0 s"
    if seconds == float("inf"):
        return "no reply"
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds * 1e6:.4g} us"

"""Text for people: what somebody else wrote, made safe for a terminal; and sizes."""

import re

# All control characters but tab and newline, whatever turns the direction of writing, and halves of
# characters, which no terminal's encoding has.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: object) -> str:
    """As it reads, with each unsafe character as its escape: `\\x1b[2J` clears no screen."""
    return _UNSAFE.sub(lambda found: ascii(found[0])[1:-1], str(text))


def format_bytes(count: float) -> str:
    """1234567 -> '1.23 MB' (decimal units, as links are rated)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"

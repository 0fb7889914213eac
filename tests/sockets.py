"""Which addresses a process listens on, by the kernel's own tables."""

import ipaddress
import os
from pathlib import Path


def listening(pid: int | str) -> set[str]:
    """Addresses of the sockets on which a process waits for connections."""
    held = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            held.add(os.readlink(entry))
        except OSError:
            continue  # closed meanwhile
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in held:
                found.add(_address(words[1].split(":")[0]))
    return found


def _address(digits: str) -> str:
    """The kernel writes each 32-bit word in the order of bytes of x86 and ARM: the last first."""
    raw = bytes.fromhex(digits)
    words = (raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
    return str(ipaddress.ip_address(b"".join(words)))

"""What several tests of the lab share: code for workers, and a look at what is left of them."""

import os
import sys
from collections.abc import Callable

from thinwire.lab import Lab

MakeLab = Callable[..., Lab]

CONNECT = """
import os, socket, sys
def connect(host):
    while True:
        try:
            return socket.create_connection((host, 5000))
        except ConnectionRefusedError:  # not listening yet
            pass
def accept():
    with socket.create_server(("", 5000)) as server:
        return server.accept()[0]
rank = int(os.environ["RANK"])
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def processes_in(inode: int) -> list[int]:
    """Living processes in a network namespace."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{pid}/ns/net").st_ino == inode:
                found.append(int(pid))
        except OSError:
            pass
    return found


def descendants(root: int) -> list[int]:
    """Every process below one, but not itself."""
    parents = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as file:
                parents[int(pid)] = int(file.read().rpartition(")")[2].split()[1])
        except OSError:
            pass
    family = [root]
    for ancestor in family:
        family += [pid for pid, parent in parents.items() if parent == ancestor]
    return family[1:]

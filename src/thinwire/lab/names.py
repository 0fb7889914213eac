"""Names for the hosts: `host2` resolves on every host, and its address back to it.

PyTorch looks up the names of its peers and warns when there are none. The names stand in a copy of
/etc/hosts that only the lab's mount namespace sees, on a file system that ends with it.
"""

import os

from thinwire.lab import kernel
from thinwire.lab.relay import address

_FILE = "/etc/hosts"
_DESK = "/tmp"  # covered for a moment, in this mount namespace alone, to have a place to write


def name_hosts(count: int) -> None:
    """Best effort, OSError where mounts are refused: everything but the names works without."""
    with open(_FILE) as file:
        text = file.read()
    for host in range(count):
        # PyTorch's sockets speak IPv4 through IPv6, and look their peers up in that form.
        text += f"{address(host)} host{host}\n::ffff:{address(host)} host{host}\n"
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("", "/", "", kernel.MS_SLAVE | kernel.MS_REC)  # or the host would see ours
    kernel.mount("tmpfs", _DESK, "tmpfs", 0)
    try:
        copy = os.path.join(_DESK, "hosts")
        with open(copy, "w") as file:
            file.write(text)
        os.chmod(copy, 0o644)
        kernel.mount(copy, _FILE, "", kernel.MS_BIND)
    finally:
        kernel.detach(_DESK)

"""The environment torchrun would give each worker."""

import socket
from collections.abc import Mapping

from thinwire.errors import UsageError
from thinwire.lab.host import INTERFACE
from thinwire.lab.relay import address

_PORT = 29500  # torchrun's own; a host of the lab has all its ports to itself
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def worker_environment(
    hosts: int, per_host: int, emulated: bool, given: Mapping[str, str]
) -> list[dict[str, str]]:
    """What to add to `given` for every rank, in order.

    Without emulation all workers share one machine, and torchrun would call them its local ranks.
    They listen on loopback alone, unless the user has named an interface.
    """
    world = hosts * per_host
    groups, local_size = (hosts, per_host) if emulated else (1, world)
    common = {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(local_size),
        "GROUP_WORLD_SIZE": str(groups),
        "MASTER_ADDR": address(0) if emulated else "127.0.0.1",
        "MASTER_PORT": str(_PORT if emulated else free_port()),
        **{name: INTERFACE if emulated else given.get(name, "lo") for name in _INTERFACES},
        "THINWIRE_LAUNCHED": "1",
        "PYTHONUNBUFFERED": "1",
        # Several workers share this machine's cores: more threads each would only collide.
        "OMP_NUM_THREADS": given.get("OMP_NUM_THREADS", "1"),
    }
    return [
        {
            **common,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % local_size),
            "GROUP_RANK": str(rank // local_size),
        }
        for rank in range(world)
    ]


def free_port() -> int:
    with socket.socket() as sock:
        try:
            sock.bind(("127.0.0.1", 0))
        except OSError as error:
            raise UsageError(f"no free port on 127.0.0.1: {error.strerror}") from error
        return int(sock.getsockname()[1])

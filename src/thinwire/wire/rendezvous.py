"""Rendezvous: what a launcher's environment asks for, and the store where the ranks meet.

[Note: where the store listens] torch's store answers whoever reaches its port, and listens on every
address of rank 0's machine. Where MASTER_ADDR is an address of this machine, rank 0 makes the
listening socket itself, on that address alone: loopback for workers of one machine, the host's own
address in the lab. A host name is left to torch: /etc/hosts often gives a machine's own name as
127.0.1.1, where no other machine could reach it. Under torchrun the store is that of its agent.
"""

import ipaddress
import os
import socket
import struct
import warnings
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from thinwire.errors import UsageError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_LISTEN = "0A"  # the kernel's name of the state
_SIOCGIFADDR = 0x8915
_MOST_FILES = 1 << 16  # descriptors; some programs walk through all that are allowed
_warned = False


@dataclass(frozen=True)
class Place:
    """This process among those that a launcher has started."""

    rank: int
    size: int
    host: str
    """MASTER_ADDR, where rank 0's store is."""
    port: int


def launched() -> bool:
    """Whether the environment says which rank this is; half of an environment is refused."""
    if "RANK" in os.environ:
        return True
    if (size := _number("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            f"WORLD_SIZE={size} is set but RANK not: start with torchrun or thinwire, or unset "
            "WORLD_SIZE to train alone"
        )
    return False


def require_alone() -> None:
    """Refuses a world of one where a launcher has started more: each would train by itself."""
    size = _number("WORLD_SIZE", "1")
    if size > 1:
        raise UsageError(
            f"WORLD_SIZE={size} RANK={os.environ.get('RANK', 'not set')}: {size} processes were "
            "started to train together, but this one has joined no process group; call "
            "thinwire.init() first, or unset WORLD_SIZE (start it without torchrun) to train alone"
        )


def place() -> Place:
    """As torchrun's environment has it, checked."""
    missing = [k for k in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if k not in os.environ]
    if missing:
        raise UsageError(
            f"RANK is set but {', '.join(missing)} not: start with torchrun, thinwire, or neither"
        )
    rank, size, port = (_number(key) for key in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if not 0 <= rank < size:
        raise UsageError(f"RANK takes 0 to WORLD_SIZE - 1, got RANK={rank} with WORLD_SIZE={size}")
    if not 0 <= port < 1 << 16:
        raise UsageError(f"MASTER_PORT takes 0 to 65535, got {port}")
    return Place(rank, size, os.environ["MASTER_ADDR"], port)


def _number(key: str, default: str = "") -> int:
    text = os.environ.get(key) or default
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{key} takes a number, got {text!r}") from None


def store(here: Place, timeout: timedelta) -> dist.Store:
    """The store that all ranks share; rank 0 makes it where no agent of torchrun's has."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    listener = None if agent or here.rank else _listener(here)
    if listener is None:
        torchs_own: dist.Store = next(iter(dist.rendezvous("env://", timeout=timeout)))[0]
        return torchs_own
    return dist.TCPStore(
        here.host,
        listener.getsockname()[1],
        here.size,
        is_master=True,
        timeout=timeout,
        multi_tenant=True,
        master_listen_fd=listener.detach(),  # the store closes it
    )


def _listener(here: Place) -> socket.socket | None:
    """See [Note: where the store listens]; None where torch has to listen in its own way.

    So it has to where MASTER_ADDR is a name, or an address that a router maps to this machine; and
    where the port is taken, by the store of an earlier world of this process, which torch uses
    again, or by somebody else, of whom it complains.
    """
    try:
        address = ipaddress.ip_address("127.0.0.1" if here.host == "localhost" else here.host)
    except ValueError:
        return None
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    made = socket.socket(family)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((str(address), here.port))
        made.listen(socket.SOMAXCONN)
    except OSError:
        made.close()
        return None
    return made


# -- who can reach it ------------------------------------------------------------------------------


def warn_if_public(here: Place, stacklevel: int) -> None:
    """Once, on rank 0: a store that the whole internet may reach."""
    global _warned
    if _warned or here.rank:
        return
    found = sorted({str(a) for a in (*_resolved(here.host), *_listening(here.port)) if a.is_global})
    if found:
        _warned = True
        warnings.warn(
            f"the store of this run is on port {here.port} of {', '.join(found)}: a public "
            "address, where whoever reaches it can read and change the run; close it with a "
            "firewall or join the machines by a private network, see docs/security.md",
            stacklevel=stacklevel,
        )


def _resolved(host: str) -> list[Address]:
    with suppress(OSError, UnicodeError):
        return [_address(str(info[4][0])) for info in socket.getaddrinfo(host, None)]
    return []


def _address(text: str) -> Address:
    return ipaddress.ip_address(text.partition("%")[0])  # without the zone of fe80::1%eth0


def _listening(port: int) -> set[Address]:
    """The addresses of this machine on which somebody listens at a port, where /proc tells."""
    found: set[Address] = set()
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                local, state = line.split()[1:4:2]
                if state == _LISTEN and int(local.split(":")[1], 16) == port:
                    found.add(_from_kernel(local.split(":")[0]))
    return found if not any(a.is_unspecified for a in found) else {*found, *_own_addresses()}


def _from_kernel(digits: str) -> Address:
    """/proc/net/tcp has addresses as 32-bit words in this machine's order of bytes."""
    words = (int(digits[at : at + 8], 16) for at in range(0, len(digits), 8))
    found = ipaddress.ip_address(b"".join(struct.pack("=I", word) for word in words))
    return getattr(found, "ipv4_mapped", None) or found


def _own_addresses() -> Iterable[Address]:
    """Of this machine's interfaces: the first of IPv4 of each, all of IPv6."""
    try:
        import fcntl
    except ImportError:  # no Unix
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                yield ipaddress.ip_address(answer[20:24])
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            yield ipaddress.ip_address(bytes.fromhex(line.split()[0]))


def allow_more_files() -> None:
    """A connection to every rank for every wire is more than the usual 1024 descriptors allow."""
    try:
        import resource
    except ImportError:  # no Unix
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

"""The few Linux calls the lab needs, through ctypes and ioctl: no `ip`, `tc` or `unshare` program.

Numbers are those of the kernel's own headers, the same on every architecture Python's wheels of
PyTorch are built for.
"""

import ctypes
import fcntl
import os
import signal
import socket
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_BIND = 0x1000
MS_REC = 0x4000
MS_SLAVE = 0x80000
_MNT_DETACH = 2

_PR_SET_PDEATHSIG = 1
_PR_SET_TIMERSLACK = 29
_PR_SET_CHILD_SUBREAPER = 36

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_IFF_UP, _IFF_RUNNING = 0x1, 0x40
_SIOCSIFFLAGS = 0x8914
_SIOCSIFADDR = 0x8916
_SIOCSIFNETMASK = 0x891C
_SIOCSIFMTU = 0x8922

_RTM_NEWLINK, _IFLA_TXQLEN = 16, 13
_NLM_F_REQUEST, _NLM_F_ACK = 1, 4

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *args: object) -> None:
    if getattr(_libc, name)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def unshare(flags: int) -> None:
    _call("unshare", ctypes.c_int(flags))


def setns(fd: int, kind: int) -> None:
    _call("setns", ctypes.c_int(fd), ctypes.c_int(kind))


def set_hostname(name: str) -> None:
    socket.sethostname(name)


def mount(source: str, target: str, kind: str, flags: int) -> None:
    texts = (source.encode(), target.encode(), kind.encode())
    _call("mount", *texts, ctypes.c_ulong(flags), None)


def detach(target: str) -> None:
    _call("umount2", target.encode(), ctypes.c_int(_MNT_DETACH))


def _prctl(option: int, value: int) -> None:
    zero = ctypes.c_ulong(0)
    _call("prctl", ctypes.c_int(option), ctypes.c_ulong(value), zero, zero, zero)


def die_with_parent() -> None:
    """SIGKILL when the thread that made this process ends. A change of user clears it again."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ended."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def precise_timers() -> None:
    """Wake within a microsecond of the asked time, not within the usual 50."""
    _prctl(_PR_SET_TIMERSLACK, 1)


def open_tun(name: str) -> int:
    """A new TUN interface in this network namespace; it lives as long as the descriptor."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _TUNSETIFF, _request(name, struct.pack("H", _IFF_TUN | _IFF_NO_PI)))
    except OSError:
        os.close(fd)
        raise
    return fd


def bring_up(name: str) -> None:
    _configure(name, _SIOCSIFFLAGS, struct.pack("H", _IFF_UP | _IFF_RUNNING))


def set_address(name: str, ip: str, mask: str) -> None:
    _configure(name, _SIOCSIFADDR, _sockaddr(ip))
    _configure(name, _SIOCSIFNETMASK, _sockaddr(mask))


def set_mtu(name: str, mtu: int) -> None:
    _configure(name, _SIOCSIFMTU, struct.pack("i", mtu))


def set_queue_length(name: str, packets: int) -> None:
    """By netlink: the ioctl for it is refused in a user namespace."""
    attribute = struct.pack("HHI", 8, _IFLA_TXQLEN, packets)
    link = struct.pack("BxHiII", 0, 0, socket.if_nametoindex(name), 0, 0)  # struct ifinfomsg
    flags = _NLM_F_REQUEST | _NLM_F_ACK
    size = 16 + len(link) + len(attribute)
    header = struct.pack("IHHII", size, _RTM_NEWLINK, flags, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as sock:  # 0: rtnetlink
        sock.send(header + link + attribute)
        number = struct.unpack_from("i", sock.recv(4096), 16)[0]  # 0 or minus an errno
    if number:
        raise OSError(-number, os.strerror(-number))


def _sockaddr(ip: str) -> bytes:
    return struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(ip))


def _request(name: str, value: bytes) -> bytes:
    return struct.pack("16s24s", name.encode(), value)  # struct ifreq


def _configure(name: str, request: int, value: bytes) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock.fileno(), request, _request(name, value))


def write_proc(path: str, value: str) -> None:
    with open(path, "w") as file:
        file.write(value)

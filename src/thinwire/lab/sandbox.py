"""Sandbox: the namespaces the lab lives in, and what to enable where they are refused.

A PID namespace is what makes the lab leave nothing behind: when its first process ends, for any
reason, the kernel kills every other process in it, and with the last of them go the network
namespaces and their interfaces.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from thinwire.errors import LabError
from thinwire.lab import kernel

TUN = "/dev/net/tun"
# (file, the value that forbids, what to run instead)
_SWITCHES = (
    (
        "/proc/sys/kernel/unprivileged_userns_clone",
        "0",
        "sysctl kernel.unprivileged_userns_clone=1",
    ),
    ("/proc/sys/user/max_user_namespaces", "0", "sysctl user.max_user_namespaces=10000"),
    ("/proc/sys/user/max_net_namespaces", "0", "sysctl user.max_net_namespaces=10000"),
    ("/proc/sys/user/max_pid_namespaces", "0", "sysctl user.max_pid_namespaces=10000"),
    (
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "sysctl kernel.apparmor_restrict_unprivileged_userns=0",
    ),
)


def isolate() -> None:
    """Put the children of this process in new PID and IPC namespaces, as root or not.

    Without root a user namespace comes first. It maps the user to itself, not to root: workers
    keep their name and their files, and the lab needs its powers only until it starts them.
    """
    flags = kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC
    if os.geteuid() == 0:
        # A container's root may lack the right and still be allowed a user namespace.
        with suppress(OSError):
            kernel.unshare(flags)
            return
    user, group = os.geteuid(), os.getegid()
    with attempt("unshare the user and PID namespaces"):
        kernel.unshare(flags | kernel.CLONE_NEWUSER)
    with attempt("map the user in the new namespace"):
        kernel.write_proc("/proc/self/setgroups", "deny")  # the kernel asks for it before gid_map
        kernel.write_proc("/proc/self/uid_map", f"{user} {user} 1")
        kernel.write_proc("/proc/self/gid_map", f"{group} {group} 1")


@contextmanager
def attempt(what: str) -> Iterator[None]:
    """Turn the kernel's refusal into an error that says what to enable."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise LabError(
            f"the lab cannot build its network here: tried to {what}: {reason}. {advice()}"
        ) from error


def advice() -> str:
    """One sentence: the settings of this machine that stand in the way."""
    found = [fix for path, forbids, fix in _SWITCHES if _read(path) == forbids]
    if not os.path.exists(TUN):
        found.append(f"modprobe tun (there is no {TUN}; for a container: --device {TUN})")
    elif not os.access(TUN, os.R_OK | os.W_OK):
        found.append(f"chmod 666 {TUN}")
    if found:
        return "To enable it, as root: " + "; ".join(found)
    return (
        "Nothing in sysctl forbids it, so a container or a security policy does: "
        f"run it with --cap-add SYS_ADMIN --cap-add NET_ADMIN --device {TUN}, "
        "or with a seccomp profile that allows unshare"
    )


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""

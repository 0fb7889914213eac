"""Host: one network namespace with a TUN interface, whose packets the relay reads and writes."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from thinwire.lab import kernel
from thinwire.lab.link import Link
from thinwire.lab.relay import address
from thinwire.lab.sandbox import attempt

INTERFACE = "wire0"
_QUEUE_PACKETS = 10000  # between the kernel and the relay, which empties it at once
_SMALLEST_BUFFER = 6 << 20  # bytes, the kernel's own default for the largest TCP window


@dataclass(frozen=True)
class Counters:
    """What the kernel counted on one host's interface since the lab started."""

    host: int
    tx_bytes: int
    tx_packets: int
    rx_bytes: int
    rx_packets: int


class Host:
    """Built by entering a new namespace: the caller stays in it, and builds the next from there."""

    def __init__(self, index: int, link: Link, buffer: int) -> None:
        self.index = index
        with attempt("unshare a network namespace"):
            kernel.unshare(kernel.CLONE_NEWNET)
        with attempt("open /dev/net/tun"):
            self.tun = kernel.open_tun(INTERFACE)
        with attempt("configure the network interface"):
            _tune_tcp(buffer)
            kernel.set_mtu(INTERFACE, link.mtu)
            kernel.set_queue_length(INTERFACE, _QUEUE_PACKETS)
            kernel.set_address(INTERFACE, address(index), "255.255.0.0")
            kernel.bring_up("lo")
            kernel.bring_up(INTERFACE)
        self.namespace = os.open("/proc/self/ns/net", os.O_RDONLY)
        self.inode = os.fstat(self.namespace).st_ino
        # An open file keeps showing the namespace it was opened in.
        self._devices = os.open("/proc/thread-self/net/dev", os.O_RDONLY)

    def counters(self) -> Counters:
        return read_counters(os.pread(self._devices, 65536, 0), self.index)


def read_counters(devices: bytes, host: int) -> Counters:
    """From the text of /proc/net/dev: 8 columns of received, then 8 of sent."""
    for line in devices.decode().splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == INTERFACE:
            column = [int(word) for word in rest.split()]
            return Counters(host, column[8], column[9], column[0], column[1])
    raise ValueError(f"no {INTERFACE} in /proc/net/dev")


def tcp_buffer(links: Sequence[Link]) -> int:
    """Bytes for TCP's largest window: 4 times what the longest, fastest path holds in the air.

    Twice for the kernel's bookkeeping, which counts against it, and twice for the queue.
    """
    fastest = max(max(link.up, link.down) for link in links)
    longest = 2 * max(link.delay + link.jitter for link in links)
    packets = 8 * max(link.mtu for link in links)
    return max(_SMALLEST_BUFFER, int(4 * (fastest * longest / 8 + packets)))


def _tune_tcp(buffer: int) -> None:
    # Containers may mount /proc/sys read-only; then the kernel's defaults stand, and the
    # self-check does not depend on TCP.
    with suppress(OSError):
        kernel.write_proc("/proc/sys/net/ipv4/tcp_rmem", f"4096 1048576 {buffer}")
        kernel.write_proc("/proc/sys/net/ipv4/tcp_wmem", f"4096 1048576 {buffer}")
    with suppress(OSError):  # one figure on every machine, whichever control it prefers itself
        kernel.write_proc("/proc/sys/net/ipv4/tcp_congestion_control", "cubic")
    with suppress(OSError):  # its neighbour chatter would show up in the counters
        kernel.write_proc(f"/proc/sys/net/ipv6/conf/{INTERFACE}/disable_ipv6", "1")

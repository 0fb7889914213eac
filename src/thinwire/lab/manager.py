"""Manager: the first process of the lab's PID namespace. It builds the hosts and runs the relay.

It talks with the launcher in JSON lines over one inherited socket: commands with an `id` come in,
a reply with the same `id` or an `event` goes out, descriptors travel beside `spawn`. When the
socket closes, the lab ends.
"""

import gc
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from thinwire.errors import LabError
from thinwire.lab import kernel, sandbox
from thinwire.lab.host import Host, tcp_buffer
from thinwire.lab.link import Link
from thinwire.lab.names import name_hosts
from thinwire.lab.relay import Relay
from thinwire.lab.workers import Workers

_BATCH = 64  # packets read from one host before the clock is looked at again
_PACKET = 65536


class Manager:
    def __init__(self, control: socket.socket, links: Sequence[Link], seed: int, alone: bool):
        self._control = control
        self._text = b""
        self._fds: list[int] = []
        buffer = tcp_buffer(links) if links else 0
        self._hosts = [Host(index, link, buffer) for index, link in enumerate(links)]
        if links:
            kernel.unshare(kernel.CLONE_NEWNET)  # step out of the last host
            with suppress(OSError):
                name_hosts(len(links))
        self._relay = Relay(links, seed)
        self._workers = Workers(self._hosts, alone)
        self._hosts_by_tun = {host.tun: host.index for host in self._hosts}
        self._wake, wake = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._running = True

    def run(self) -> None:
        self._send({"event": "ready", "pid": int(os.readlink("/proc/self"))})
        kernel.precise_timers()
        gc.freeze()
        gc.disable()  # nothing here makes cycles, and a collection would hold up packets
        watched = [self._control.fileno(), self._wake, *self._hosts_by_tun]
        while self._running:
            due = self._relay.next_time()
            wait = None if due is None else max(0.0, due - time.monotonic())
            # select, not epoll: epoll rounds its timeout up to a millisecond.
            ready, _, _ = select.select(watched, [], [], wait)
            now = time.monotonic()
            self._deliver(now)
            for fd in ready:
                host = self._hosts_by_tun.get(fd)
                if host is not None:
                    self._collect(now, fd, host)
                elif fd == self._wake:
                    self._bury()
                else:
                    self._listen()

    def _deliver(self, now: float) -> None:
        for host, data in self._relay.advance(now):
            with suppress(OSError):  # an interface a worker took down loses its packets
                os.write(self._hosts[host].tun, data)

    def _collect(self, now: float, tun: int, host: int) -> None:
        """Read eagerly: a packet's time in the link starts when it leaves its host."""
        for _ in range(_BATCH):
            try:
                data = os.read(tun, _PACKET)
            except OSError:
                return
            self._relay.push(now, host, data)

    def _bury(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._wake, 4096)
        for number, code in self._workers.reap():
            self._send({"event": "exit", "worker": number, "code": code})

    def _listen(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._control, 1 << 16, 16)
        except ConnectionResetError:  # closed with an answer of ours unread
            data, fds = b"", []
        self._fds += fds
        if not data:
            self._running = False
            return
        *lines, self._text = (self._text + data).split(b"\n")
        for line in lines:
            self._obey(json.loads(line))

    def _obey(self, command: dict[str, Any]) -> None:
        number = command.pop("id")
        handler: Callable[..., object] = getattr(self, "do_" + command.pop("do"))
        try:
            self._send({"id": number, "result": handler(**command)})
        except (OSError, LabError) as error:
            self._send({"id": number, "error": str(error)})

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._control.sendall(json.dumps(message).encode() + b"\n")
        except OSError:  # the launcher is gone
            self._running = False

    def do_spawn(
        self, worker: int, host: int, argv: list[str], env: dict[str, str], cwd: str
    ) -> int:
        fds, self._fds = self._fds[:3], self._fds[3:]
        try:
            return self._workers.spawn(worker, host, argv, env, cwd, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def do_signal(self, workers: list[int], signum: int) -> None:
        for worker in workers:
            self._workers.signal(worker, signum)

    def do_kill(self, host: int) -> None:
        self._workers.kill_host(host)

    def do_sweep(self) -> None:
        self._workers.sweep()

    def do_partition(self, host: int, cut: bool) -> None:
        self._relay.partition(host, cut)

    def do_link(self, host: int, link: dict[str, float]) -> None:
        self._relay.set_link(host, Link(**link))

    def do_flush(self) -> None:
        self._relay.flush()

    def do_counters(self) -> list[dict[str, int]]:
        return [asdict(host.counters()) for host in self._hosts]

    def do_tallies(self) -> list[dict[str, int]]:
        return [asdict(tally) for tally in self._relay.tallies]

    def do_quit(self) -> None:
        self._running = False


def main() -> None:
    """`manager FD SETTINGS`: the outer process, which waits for the inner one and does no more."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    settings = json.loads(sys.argv[2])
    try:
        links = [Link(**link) for link in settings["links"]]
        alone = _isolate(must=bool(links))
        kernel.die_with_parent()  # after the change of user, which clears it
        if os.getppid() != settings["launcher"]:
            return  # it died before the line above
        child = os.fork()
        if child:
            control.close()
            os.waitpid(child, 0)
            return
        kernel.die_with_parent()
        kernel.adopt_orphans()
        Manager(control, links, settings["seed"], alone).run()
    except LabError as error:
        control.sendall(json.dumps({"event": "refused", "error": str(error)}).encode() + b"\n")


def _isolate(must: bool) -> bool:
    """Whether this process' children will have a PID namespace of their own.

    Plain local workers can do without one: each still dies with its parent. There the attempt is
    made in a child first, for one that fails half-way leaves a process without its user.
    """
    if not must:
        trial = os.fork()
        if trial == 0:
            try:
                sandbox.isolate()
            except LabError:
                os._exit(1)
            os._exit(0)
        if os.waitpid(trial, 0)[1] != 0:
            return False
    sandbox.isolate()
    return True


if __name__ == "__main__":
    main()

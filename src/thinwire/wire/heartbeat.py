"""Heartbeat: who is alive, by small notes in the store that every rank already shares.

A rank that is killed, frozen or cut off stops writing; a rank that found a peer lost says so in its
last note, so that the ones who notice later blame the first to go and not each other. Only counters
are compared, never clocks: hosts need not agree on the time.
"""

import contextlib
import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import Store

_PREFIX = "thinwire/beat/"


@dataclass(frozen=True)
class Beat:
    """One rank's note: a counter, what it was doing, and the ranks it found lost."""

    count: int
    note: str
    host: str
    lost: tuple[int, ...]


class Heartbeat:
    """Writes this rank's note every `interval` seconds from a thread of its own."""

    def __init__(self, store: Store, rank: int, size: int, *, host: str, interval: float) -> None:
        # A client of its own: a rank blocked in another store call must not look dead.
        self._store = store.clone() if hasattr(store, "clone") else store
        self._store.set_timeout(timedelta(seconds=max(5.0, 2 * interval)))
        self._rank, self._size, self._host, self.interval = rank, size, host, interval
        self._count, self._lost = 0, ()  # type: int, tuple[int, ...]
        self.note = "starting"
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._write()
        threading.Thread(target=self._run, name="thinwire-heartbeat", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def found_lost(self, ranks: Iterable[int]) -> None:
        """Publishes the ranks this one holds to be lost."""
        self._lost = tuple(ranks)
        self._attempt(self._write)

    def beats(self) -> dict[int, Beat]:
        """The latest note of every rank; raises when the store cannot be reached."""
        with self._lock:
            raw = self._store.multi_get([f"{_PREFIX}{rank}" for rank in range(self._size)])
        return {rank: _parse(text) for rank, text in enumerate(raw)}

    def suspects(self, among: Iterable[int]) -> dict[int, str]:
        """Ranks of `among` that are lost, each with what is known of it; blocks a few beats.

        Empty when all of them still write. If the store itself is gone, the rank that hosts it is.
        """
        try:
            before = self.beats()
            named = {peer: "reported by others" for b in before.values() for peer in b.lost}
            if not named:
                self._stop.wait(3 * self.interval)
                after = self.beats()
                named = {peer: "reported by others" for b in after.values() for peer in b.lost}
                named |= self._silent(before, after, among)
        except Exception:
            return {0: "the store that rank 0's host keeps cannot be reached"}
        return {peer: why for peer, why in named.items() if peer != self._rank}

    def _silent(
        self, before: dict[int, Beat], after: dict[int, Beat], among: Iterable[int]
    ) -> dict[int, str]:
        return {
            peer: f"on {after[peer].host}, silent since {after[peer].note}"
            for peer in among
            if peer != self._rank and after[peer].count == before[peer].count
        }

    def _run(self) -> None:
        while not self._stop.wait(self.interval):
            self._attempt(self._write)

    def _write(self) -> None:
        self._count += 1
        beat = {"count": self._count, "note": self.note, "host": self._host, "lost": self._lost}
        with self._lock:
            self._store.set(f"{_PREFIX}{self._rank}", json.dumps(beat))

    def _attempt(self, action: Callable[[], None]) -> None:
        # A store that is gone is found out by whoever waits for a transfer, with a better message.
        with contextlib.suppress(Exception):
            action()


def _parse(text: bytes) -> Beat:
    value = json.loads(text)
    return Beat(value["count"], value["note"], value["host"], tuple(value["lost"]))

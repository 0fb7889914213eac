"""Heartbeat: who is alive, by small notes in the store that every rank already shares.

A rank that is killed, frozen or cut off stops writing; a rank that found a peer lost says so in its
note, so that the ones who notice later blame the first to go and not each other. Only counters are
compared, never clocks: hosts need not agree on the time.

[Note: one thread talks to the store] A call to a store whose host is frozen or cut off may never
return, whatever its timeout. So only the heartbeat's own thread makes such calls; everybody else
looks at what it has read, and takes its silence for the loss of the store's host.

[Note: blame] Who finds a peer lost writes it into its note and raises an alarm, a counter that all
ranks look at with every beat. Those who hear it repeat it in their own notes. Rank 0, whose process
may hold the store, stays until the others have heard: else they would find the store gone and blame
rank 0.
"""

import json
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import TracebackType

from torch.distributed import Store

from thinwire.text import printable

_ABSENT = "-"  # what compare_set returns for a key that is not there
_LONGEST = 1 << 20  # bytes of a note that is looked at
_WORDS = 300  # characters of what a peer says of itself or others
_BEATS = 4  # intervals of silence after which a peer is taken for lost
_generation = 0  # worlds this process has been in; each has its own keys


@dataclass(frozen=True)
class Beat:
    """One rank's note: a counter, what it was doing, and the ranks it found lost."""

    count: int
    note: str
    host: str
    lost: dict[int, str]
    """The ranks it holds to be lost, each with what it knows of them."""
    left: bool = False
    """Whether it went of its own accord."""
    issued: dict[str, int] = field(default_factory=dict)
    """Transfers begun so far, for each wire."""


class Heartbeat:
    """Writes this rank's note every `interval` seconds from a thread of its own.

    `grace` is how long a peer may be silent, once somebody looks, before it counts as lost.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        host: str,
        interval: float,
        grace: float | None = None,
    ) -> None:
        global _generation
        _generation += 1
        self._prefix = f"thinwire/{_generation}/"
        # A client of its own: a rank blocked in another store call must not look dead.
        self._store = store.clone() if hasattr(store, "clone") else store
        self._store.set_timeout(timedelta(seconds=max(5.0, 2 * interval)))
        self._rank, self._size, self._host, self.interval = rank, size, host, interval
        self.grace = max(_BEATS * interval, grace or 0.0)
        self.note = "starting"
        self._count = 0
        self._lost: dict[int, str] = {}
        self._left = False
        self._issued: dict[str, int] = {}
        self._stop = threading.Event()
        self._wake = threading.Event()
        # What the thread has read, under `_changed`, which is notified after every round.
        self._changed = threading.Condition()
        self._watchers = 0
        self._begun = self._read_begun = 0  # rounds begun; the one whose reading is the newest
        self._beats: dict[int, Beat] = {}
        self._moved: dict[int, float] = {}  # local clock when a peer's counter was first seen
        self._answered = time.monotonic()
        self._published: frozenset[int] = frozenset()  # the lost ranks in the newest note
        self._failure = ""
        self._write()
        self._thread = threading.Thread(target=self._run, name="thinwire-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Says goodbye and ends the thread. Peers that still wait for this rank learn at once."""
        self._left = True
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout=min(2.0, self.grace))

    def begun(self, wire: str) -> int:
        """Counts a transfer of a wire that all its ranks begin; returns its number."""
        with self._changed:
            self._issued[wire] = number = self._issued.get(wire, 0) + 1
        return number

    def forget(self, wire: str) -> None:
        with self._changed:
            self._issued.pop(wire, None)

    def found_lost(self, ranks: Mapping[int, str]) -> None:
        """Publishes the ranks this one holds to be lost, and why; returns when others can know."""
        with self._changed:
            self._lost = dict(ranks) | self._lost
            mine = frozenset(self._lost)
            self._watchers += 1
            self._wake.set()
            self._changed.wait_for(lambda: self._heard_of(mine), timeout=self.grace)
            self._watchers -= 1

    def beats(self) -> dict[int, Beat]:
        """The latest notes read, of the ranks that have written one."""
        with self._changed:
            return dict(self._beats)

    def suspects(self, among: Iterable[int]) -> dict[int, str]:
        """Ranks of `among` that are lost, each with what is known of it; blocks a few beats.

        Empty when all of them still write. If the store itself is gone, the rank that hosts it is.
        """
        with self.watch(among) as watch:
            return watch.settle()

    def watch(self, among: Iterable[int]) -> "Watch":
        """Begins to look after some ranks; use it in a `with`."""
        return Watch(self, [peer for peer in among if peer != self._rank])

    @property
    def given_up(self) -> bool:
        """Whether another rank said that this one is lost."""
        with self._changed:
            return any(self._rank in beat.lost for beat in self._beats.values())

    def _heard_of(self, lost: frozenset[int]) -> bool:
        if self._failure:
            return True
        if self._rank != 0:
            return self._published >= lost
        others = (b for peer, b in self._beats.items() if peer != 0 and peer not in lost)
        return self._published >= lost and all(b.left or lost <= set(b.lost) for b in others)

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        last = False
        while not last:
            self._wake.wait(self.interval)
            self._wake.clear()
            last = self._stop.is_set()
            with self._changed:
                self._begun += 1
            failure = ""
            try:
                self._write()
                self._read()
            except Exception as error:
                # Found out by whoever waits for a transfer, with a better message.
                failure = str(error).split("\n")[0] or type(error).__name__
            with self._changed:
                self._failure = failure
                self._changed.notify_all()

    def _write(self) -> None:
        self._count += 1
        with self._changed:
            lost = frozenset(self._lost)
            beat = {
                "count": self._count,
                "note": self.note,
                "host": self._host,
                "lost": dict(self._lost),
                "left": self._left,
                "issued": dict(self._issued),
            }
        self._store.set(f"{self._prefix}{self._rank}", json.dumps(beat))
        if lost > self._published:
            self._store.add(f"{self._prefix}alarm", 1)
        self._published = lost

    def _read(self) -> None:
        """Everybody's notes, if somebody here looks at them or somebody elsewhere cries out."""
        alarm = self._store.add(f"{self._prefix}alarm", 0)
        if not alarm and not self._watchers:
            with self._changed:
                self._answered = time.monotonic()
            return
        seen = sorted(self._beats)
        texts = self._store.multi_get([f"{self._prefix}{peer}" for peer in seen]) if seen else []
        notes = dict(zip(seen, texts, strict=True))
        for peer in set(range(self._size)) - set(seen):
            # Unlike the gets, compare_set does not wait for a key that is not there yet.
            notes[peer] = self._store.compare_set(f"{self._prefix}{peer}", _ABSENT, _ABSENT)
        there = {peer: text for peer, text in notes.items() if text != _ABSENT.encode()}
        read = {peer: self._beat(peer, text) for peer, text in there.items()}
        with self._changed:
            self._take(read)

    def _beat(self, peer: int, text: bytes) -> Beat:
        """One that cannot be read is no sign of life."""
        try:
            return _parse(text, self._size)
        except (ArithmeticError, AttributeError, LookupError, RecursionError) as error:
            problem: Exception = error
        except (TypeError, ValueError) as error:
            problem = error
        before = self._beats.get(peer, Beat(0, "", "an unknown host", {}))
        return replace(before, note=f"a note that cannot be read: {_words(problem)}")

    def _take(self, read: dict[int, Beat]) -> None:
        now = time.monotonic()
        for peer, beat in read.items():
            before = self._beats.get(peer)
            if peer not in self._moved or before is None or before.count != beat.count:
                self._moved[peer] = now
            for rank, why in beat.lost.items():
                if rank != self._rank and rank not in self._lost:
                    self._lost[rank] = why
                    self._wake.set()  # pass it on
        self._beats = read
        self._read_begun = self._begun
        self._answered = now


class Watch:
    """Looks after some peers while it is open; the heartbeat then reads everybody's notes."""

    def __init__(self, heartbeat: Heartbeat, peers: list[int]) -> None:
        self._heart = heartbeat
        self._peers = peers
        self._base: dict[int, int] = {}

    def __enter__(self) -> "Watch":
        heart = self._heart
        with heart._changed:
            if heart._watchers == 0:
                heart._moved.clear()  # nobody has looked for a while: silence counts from now
            heart._watchers += 1
            self._opened = time.monotonic()
            self._after = heart._begun  # a round that has begun may have read before this
            heart._wake.set()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._heart._changed:
            self._heart._watchers -= 1

    def lost(self) -> dict[int, str]:
        """Who is known to be lost by now, each with what is known of it. Never blocks."""
        with self._heart._changed:
            return self._lost()

    def settle(self) -> dict[int, str]:
        """Blocks until every peer has either shown itself alive or counts as lost."""
        heart = self._heart
        end = time.monotonic() + 3 * heart.grace
        with heart._changed:
            while not (lost := self._lost()):
                remaining = end - time.monotonic()
                if self._all_alive() or remaining <= 0:
                    break
                heart._changed.wait(min(heart.interval, remaining))
        return lost

    def _lost(self) -> dict[int, str]:
        heart, now = self._heart, time.monotonic()
        beats = heart._beats
        if heart._lost:
            return dict(heart._lost)
        if heart._failure:
            return _store_lost(heart._rank, heart._failure)
        if now - max(heart._answered, self._opened) > heart.grace + heart.interval:
            return _store_lost(heart._rank, "it does not answer")
        named: dict[int, str] = {}
        if heart._read_begun <= self._after:
            return named
        for peer in self._peers:
            beat = beats.get(peer)
            if beat is None:
                continue
            since = max(heart._moved.get(peer, now), self._opened)
            if beat.left or now - since > heart.grace:
                named[peer] = _last_words(beat)
        return named

    def _all_alive(self) -> bool:
        """Two beats since the watch began: the first may have been on its way before."""
        heart = self._heart
        if heart._read_begun <= self._after:
            return False
        counts = {peer: beat.count for peer, beat in heart._beats.items() if peer in self._peers}
        for peer, count in counts.items():
            self._base.setdefault(peer, count)
        return all(counts.get(peer, 0) >= self._base.get(peer, 0) + 2 for peer in self._peers)


def _store_lost(rank: int, why: str) -> dict[int, str]:
    if rank == 0:  # its own: nobody else can be blamed by it
        return {}
    return {0: f"the store that rank 0's host keeps cannot be reached: {why}"}


def _last_words(beat: Beat) -> str:
    return f"on {beat.host}, {'left' if beat.left else 'silent'} after {beat.note!r}"


def _parse(text: bytes, size: int) -> Beat:
    """Whoever reaches the store can write there: only what has the form of a note is taken."""
    if len(text) > _LONGEST:
        raise ValueError(f"{len(text)} bytes")
    value = json.loads(text)
    lost = {int(rank): _words(why) for rank, why in value["lost"].items()}
    if not all(0 <= rank < size for rank in lost):
        raise ValueError(f"ranks {sorted(lost)} of {size}")
    return Beat(
        count=int(value["count"]),
        note=_words(value["note"]),
        host=_words(value["host"]),
        lost=lost,
        left=bool(value["left"]),
        issued={str(wire): int(number) for wire, number in value["issued"].items()},
    )


def _words(said: object) -> str:
    return printable(said)[:_WORDS]

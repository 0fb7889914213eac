"""Phase: a part of a transfer that is on its way, and what to do when it has arrived."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from thinwire.wire.collectives import Started


@dataclass(frozen=True)
class Phase:
    """One with a `turn` is followed by another phase, which `turn` starts; the last one is not."""

    started: Started
    land: Callable[[], None] = lambda: None
    """Puts the result in place."""
    turn: "Callable[[], Phase] | None" = None

    def followed_by(self, more: Callable[[], None]) -> "Phase":
        """`more` once the whole transfer's result is in place."""
        if self.turn is not None:
            turn = self.turn
            return replace(self, turn=lambda: turn().followed_by(more))

        def land() -> None:
            self.land()
            more()

        return replace(self, land=land)

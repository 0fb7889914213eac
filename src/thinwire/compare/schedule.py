"""Schedule: how far every cycle goes, and when a contestant is done.

By steps, the budget is cut into as many cycles as there are evaluations. By time, the first cycle
is short, the length of the others follows from it, and the budget is what all have read when its
share of the time is over; the rest of the time is for those that are behind.
"""

import math
from dataclasses import dataclass

from thinwire.compare import records
from thinwire.compare.config import BASELINE, YARDSTICK

_TRIAL = 4  # steps of the first cycle where the time decides
FOR_BUDGET = 0.8  # share of the time after which the budget is closed


@dataclass(frozen=True)
class RunProgress:
    """What decides about a contestant at the end of a cycle, the same on all ranks."""

    name: str
    tokens: int
    seconds: float
    val_loss: float
    known: bool = False
    """Whether the rest of its run follows from what was timed of it."""


class Schedule:
    """Counts in tokens, of which a step of all hosts together has `step`."""

    def __init__(
        self,
        *,
        step: int,
        evals: int,
        limit: float,
        overtime: float,
        timed: float = math.inf,
        budget: int = 0,
        seconds: float = 0.0,
        cycle: int = 0,
    ) -> None:
        self._step, self._evals, self._overtime = step, evals, overtime
        self._limit, self._timed = limit, timed
        self.budget = budget
        """Tokens; 0 while the time has not decided."""
        self._seconds = seconds
        self.cycle = cycle - 1
        """The number of the cycle that is under way."""
        self.target = 0
        """Tokens to which it goes."""
        self._began = 0, 0.0  # tokens read and seconds spent when it began

    def begin(self, least: int, most: int, spent: float) -> None:
        """The next cycle, of contestants that have read from `least` to `most` tokens, after so
        many seconds of the heat. A cycle that was interrupted is taken up."""
        if most - least >= self._step:
            self.cycle, self.target = max(self.cycle, 0), most
        elif self._seconds:
            self.cycle += 1
            self.target = most + self._next_length(most, spent)
            if most < self.budget < self.target:
                self.target = self.budget
        else:
            each = self.budget / min(self._evals, max(1, self.budget // self._step))
            self.cycle = int(most / each + 1e-9)
            self.target = self._whole((self.cycle + 1) * each)
        self._began = most, spent

    def close(self, tokens: int, spent: float) -> None:
        """At the end of a cycle: the budget may be what has been read."""
        if not self.budget and spent >= FOR_BUDGET * self._seconds:
            self.budget = tokens

    def ends(self, standing: RunProgress, target_loss: float | None, spent: float) -> str | None:
        """Why the contestant takes no more turns; None if it does."""
        if standing.seconds >= (self._timed if standing.known else self._limit):
            return records.LIMIT
        if not self.budget or standing.tokens < self.budget:
            over = self._seconds and spent >= self._seconds
            return records.LIMIT if over else None
        return None if self._goes_on(standing, target_loss, spent) else records.BUDGET

    def _goes_on(self, standing: RunProgress, target_loss: float | None, spent: float) -> bool:
        """Whether it is behind the baseline and may still come to its loss."""
        if target_loss is None or standing.name in (YARDSTICK, BASELINE):
            return False
        time_left = not self._seconds or spent < self._seconds
        tokens_left = standing.tokens < self._overtime * self.budget
        return time_left and tokens_left and not standing.val_loss <= target_loss

    def _next_length(self, now: int, spent: float) -> int:
        """As many steps as fill their part of the time, going by the cycle before."""
        before, began = self._began
        if not self.target or now <= before or spent <= began:
            return _TRIAL * self._step
        wanted = FOR_BUDGET * self._seconds / self._evals
        return max(self._step, self._whole((now - before) * wanted / (spent - began)))

    def _whole(self, tokens: float) -> int:
        return math.ceil(tokens / self._step - 1e-6) * self._step

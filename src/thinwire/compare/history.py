"""History: what a contestant's records say, and what follows for tokens it has not read.

A run that was cut short at a slow rate goes on as it did in the second half of its turns, if its
traffic does: that is known from the same run at a faster rate, where it came to the end.
"""

from dataclasses import dataclass
from pathlib import Path

from thinwire.compare import records
from thinwire.compare.records import Record

_STEADY = 0.2  # how much the traffic of the rest may differ from that of the part that was timed


@dataclass(frozen=True)
class History:
    turns: list[Record]
    evals: list[Record]
    timeline: Record | None
    why: str | None
    """Why it ended; None if it has not."""
    message: str

    @classmethod
    def read(cls, folder: Path, within: Path | None = None) -> "History":
        found = records.read(folder, within)
        end = records.last(found, "end") or {}
        return cls(
            turns=[record for record in found if record["kind"] == "turn"],
            evals=[record for record in found if record["kind"] == "eval"],
            timeline=records.last(found, "timeline"),
            why=end.get("why"),
            message=end.get("message", ""),
        )

    @property
    def tokens(self) -> int:
        return self.turns[-1]["tokens"] if self.turns else 0

    @property
    def evaluated(self) -> int:
        """Tokens at the last evaluation."""
        return self.evals[-1]["tokens"] if self.evals else 0

    def total(self, name: str, tokens: float) -> float:
        """A total such as `seconds`, when so many tokens had been read."""
        if tokens > self.tokens:
            beyond = tokens - self.tokens
            return float(self.turns[-1][name]) + beyond * self.slope(name)
        x = y = 0.0
        for turn in self.turns:
            if tokens <= turn["tokens"]:
                share = (tokens - x) / (float(turn["tokens"]) - x)
                return y + share * (float(turn[name]) - y)
            x, y = float(turn["tokens"]), float(turn[name])
        return y

    def slope(self, name: str) -> float:
        """A total's growth per token in the second half of the turns."""
        middle = self.tokens / 2
        grown = float(self.turns[-1][name]) - self.total(name, middle)
        return grown / (self.tokens - middle)

    def steady(self, whole: "History", tokens: float) -> bool:
        """Whether the rest up to `tokens`, as `whole` has it, sends as much per token as the part
        this one was timed for."""
        if tokens <= self.tokens:
            return True
        if whole.tokens < tokens:
            return False
        rest = whole.total("bytes", tokens) - whole.total("bytes", self.tokens)
        expected = self.slope("bytes") * (tokens - self.tokens)
        return abs(rest - expected) <= _STEADY * max(rest, expected)

    def loss_at(self, tokens: float) -> float | None:
        """The validation loss, between evaluations on a straight line; None if it was not there."""
        x: float = 0.0
        y: float | None = None
        for record in self.evals:
            loss = record["val_loss"]
            if loss is None:
                return None
            if tokens <= record["tokens"]:
                if y is None or tokens == record["tokens"]:
                    return float(loss) if tokens == record["tokens"] else None
                return y + (tokens - x) / (float(record["tokens"]) - x) * (float(loss) - y)
            x, y = float(record["tokens"]), float(loss)
        return None

    def tokens_to(self, target: float) -> float | None:
        """Tokens at which the validation loss first was as low; None if it never was."""
        x, y = 0.0, float("inf")
        for record in self.evals:
            loss = record["val_loss"]
            if loss is None:
                return None
            if loss <= target:
                if y == float("inf"):
                    return float(record["tokens"])
                return x + (y - target) / (y - float(loss)) * (float(record["tokens"]) - x)
            x, y = float(record["tokens"]), float(loss)
        return None

    def walls(self) -> dict[int, tuple[float, float]]:
        """(seconds, tokens) of every cycle; a cycle that was interrupted has several turns."""
        cycles: dict[int, tuple[float, float]] = {}
        before = 0
        for turn in self.turns:
            seconds, tokens = cycles.get(turn["cycle"], (0.0, 0.0))
            cycles[turn["cycle"]] = seconds + turn["wall"], tokens + turn["tokens"] - before
            before = turn["tokens"]
        return cycles

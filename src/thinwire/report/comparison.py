"""Comparison: the figures of a comparison, as the table, the files and the report show them."""

from dataclasses import asdict, dataclass, field
from typing import Any

# How far a method came.
FINISHED = "finished"
CUT = "cut"  # by its time limit
UNFINISHED = "unfinished"  # the comparison was interrupted
DIVERGED = "diverged"
FAILED = "failed"


@dataclass(frozen=True)
class Spread:
    """A figure and what to expect of a repetition: plus or minus so much."""

    value: float
    plus_minus: float | None = None
    """None where one run tells nothing about it."""


@dataclass(frozen=True)
class Point:
    """Where a run stood at an evaluation."""

    tokens: int
    seconds: float
    """Of training."""
    bytes: float
    """Sent by a worker, on average."""
    val_loss: float


@dataclass
class Cell:
    """One method at one rate. What is not known is None."""

    method: str
    rate: str
    bandwidth: float
    """Bytes per second of a host's link."""
    status: str = FINISHED
    message: str = ""
    """Why it did not finish, or what is to be known of its figures."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The method's own, and where it differs from the others."""
    tokens: int = 0
    """Read at this rate."""
    tokens_per_s: float | None = None
    efficiency: Spread | None = None
    """Tokens per second over those of the yardstick in the same cycles."""
    seconds: float | None = None
    """For the budget."""
    exposed: float | None = None
    """Seconds of them that a worker waited for the network."""
    hidden: float | None = None
    """Seconds of flight behind compute."""
    bytes_per_token: float | None = None
    """Sent by all workers, by the method's account."""
    wire_bytes_per_token: float | None = None
    """The same by the kernel's count on the interfaces, packet headers and all."""
    bytes_ratio: float | None = None
    """Over those of the baseline."""
    val_loss: Spread | None = None
    """At equal tokens."""
    time_to_loss: Spread | None = None
    """Seconds to the loss that the baseline has at the end of the budget."""
    sooner: float | None = None
    """The baseline's seconds for the budget over these."""
    computed: bool = False
    """Whether times go beyond what was run at this rate."""
    compute_limit: float | None = None
    """Tokens per second of the yardstick."""
    wire_limit: float | None = None
    """Tokens per second if the link of the busiest worker did nothing but send its bytes."""
    curve: list[Point] = field(default_factory=list)
    timeline: dict[str, Any] | None = None
    """Of some steps on one worker: see compare/method_run.py."""


@dataclass
class Comparison:
    hosts: int
    rates: list[str]
    methods: list[str]
    """In the order of the table."""
    budget: int
    """Tokens at which losses are compared."""
    asked: int
    """Tokens that were asked for: more than the budget where a comparison is unfinished."""
    steps: float
    """The budget in steps of all hosts together."""
    unit: str
    """What is called tokens here: tokens, or images."""
    seeds: list[int]
    yardstick: str
    baseline: str | None
    """None where it does not take part."""
    target: Spread | None
    """The baseline's loss at the end of the budget."""
    settings: dict[str, Any]
    machine: dict[str, str]
    links: dict[str, str]
    """What the lab measured, by rate."""
    cells: list[Cell]

    def at(self, rate: str) -> list[Cell]:
        """A rate's cells in the order of the methods."""
        here = {cell.method: cell for cell in self.cells if cell.rate == rate}
        return [here[name] for name in self.methods if name in here]

    def cell(self, rate: str, method: str) -> Cell | None:
        return next((cell for cell in self.at(rate) if cell.method == method), None)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

"""Link: how one emulated host is joined to the others.

Every host hangs on one access link. What a packet from host a to host b meets is

    rate    min(a.up, b.down)
    delay   (a.delay + b.delay) / 2        so a round trip takes a.delay + b.delay
    jitter  (a.jitter + b.jitter) / 2      uniform in +- jitter around the delay
    loss    1 - sqrt((1 - a.loss) (1 - b.loss))

so between two hosts with the same link, `delay` and `loss` are those of the whole one-way path.
"""

import math
from dataclasses import dataclass

from thinwire.errors import UsageError
from thinwire.lab.units import format_duration, format_rate, parse_duration, parse_rate

LONGEST = 60.0  # s of delay; a check of the link takes some round trips
SLOWEST = (
    64e3  # bit/s; below this a full packet takes a fifth of a second and nothing is measurable
)
PACKET_SECONDS = 5e-3  # how long a full packet should occupy the slowest direction of a link
MTU_RANGE = (1500, 65000)  # bytes


@dataclass(frozen=True)
class Link:
    up: float
    """Bits per second that leave the host."""
    down: float
    """Bits per second that reach the host."""
    delay: float = 0.0
    """Seconds from one host to another with the same link."""
    jitter: float = 0.0
    """Seconds by which the delay varies, both ways, without reordering."""
    loss: float = 0.0
    """Probability that a packet between two hosts with this link is lost."""

    def __post_init__(self) -> None:
        for name in ("up", "down"):
            rate = getattr(self, name)
            if not (math.isfinite(rate) and rate >= SLOWEST):
                raise UsageError(
                    f"{name}: got {rate:g} bit/s, takes {format_rate(SLOWEST)} or more"
                )
        for name in ("delay", "jitter"):
            seconds = getattr(self, name)
            if not 0 <= seconds <= LONGEST:
                raise UsageError(f"{name}: got {seconds:g} s, takes 0 to {LONGEST:g} s")
        if self.jitter > self.delay:
            raise UsageError(
                f"jitter: got {format_duration(self.jitter)}, takes at most the delay, "
                f"here {format_duration(self.delay)}"
            )
        if not 0 <= self.loss < 1:
            raise UsageError(f"loss: got {self.loss}, takes a probability from 0 to below 1")

    @classmethod
    def of(
        cls,
        rate: str = "100mbit",
        *,
        up: str | None = None,
        down: str | None = None,
        delay: str = "10ms",
        jitter: str = "0",
        loss: float = 0.0,
    ) -> "Link":
        """From text; `rate` is used for each direction that is not given on its own."""
        both = parse_rate(rate)
        return cls(
            up=both if up is None else parse_rate(up),
            down=both if down is None else parse_rate(down),
            delay=parse_duration(delay),
            jitter=parse_duration(jitter),
            loss=loss,
        )

    @property
    def mtu(self) -> int:
        """Bytes; large packets spare the relay, but must not hold up the others for long."""
        low, high = MTU_RANGE
        return int(min(max(min(self.up, self.down) * PACKET_SECONDS / 8, low), high))

    def __str__(self) -> str:
        rates = format_rate(self.up)
        if self.down != self.up:
            rates = f"{rates} up, {format_rate(self.down)} down"
        return f"{rates}, {format_duration(self.delay)} delay"


@dataclass(frozen=True)
class Path:
    """What a packet meets between two given hosts, apart from the queues."""

    delay: float
    jitter: float
    loss: float

    @classmethod
    def between(cls, a: Link, b: Link) -> "Path":
        return cls(
            delay=(a.delay + b.delay) / 2,
            jitter=(a.jitter + b.jitter) / 2,
            loss=1 - math.sqrt((1 - a.loss) * (1 - b.loss)),
        )

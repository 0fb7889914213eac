"""`thinwire lab`: run a command on every host of an emulated network."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.command_line import shown
from thinwire.errors import UsageError
from thinwire.lab.link import Link
from thinwire.lab.network import MOST_WORKERS, Lab
from thinwire.lab.units import parse_duration, parse_rate

_OVERRIDES = ("rate", "up", "down", "delay", "jitter", "loss")


@dataclass
class LinkConfig:
    """Emulated links."""

    rate: str = "100mbit"
    """Rate of every host's link, each way: 10mbit, 1gbit, 1.5Gbit/s."""
    up: str | None = None
    """What a host sends, when it differs from the rate."""
    down: str | None = None
    """What a host receives, when it differs from the rate."""
    delay: str = "0"
    """From one host to another, one way; a round trip takes twice as long: 500us, 20ms."""
    jitter: str = "0"
    """How much the delay varies to both sides, without reordering packets."""
    loss: float = 0.0
    """Probability that a packet is lost. Packets are large here: see docs/lab.md."""
    host: tuple[str, ...] = ()
    """A host that differs from the others, such as 2:up=10mbit,down=50mbit,delay=30ms."""

    def link(self) -> Link:
        """Refuses by the name of the flag what no link can be."""
        for name in ("rate", "up", "down", "delay", "jitter"):
            value = getattr(self, name)
            if value is not None:
                _check(name, value)
        try:
            return Link.of(
                self.rate,
                up=self.up,
                down=self.down,
                delay=self.delay,
                jitter=self.jitter,
                loss=self.loss,
            )
        except UsageError as error:
            raise UsageError(f"--{error}") from None

    def overrides(self, hosts: int) -> dict[int, Link]:
        return dict(self._override(text, hosts) for text in self.host)

    def _override(self, text: str, hosts: int) -> tuple[int, Link]:
        number, colon, rest = text.partition(":")
        settings = dict(_setting(text, part) for part in rest.split(","))
        if not colon or not (number.isascii() and number.isdigit()) or len(number) > 9:
            raise _bad(text)
        if int(number) >= hosts:
            raise UsageError(
                f"--host {shown(text)}: host {number} does not exist: there are {hosts}, counted "
                "from 0"
            )
        rate = settings.get("rate")
        return int(number), Link.of(
            rate or self.rate,
            # A host's own rate beats the others' up and down.
            up=settings.get("up", None if rate else self.up),
            down=settings.get("down", None if rate else self.down),
            delay=settings.get("delay", self.delay),
            jitter=settings.get("jitter", self.jitter),
            loss=_probability(text, settings.get("loss", str(self.loss))),
        )


@dataclass
class LabConfig(LinkConfig):
    """The emulated network."""

    hosts: int = 4
    """Emulated hosts, each with its own network interface and name (host0, host1, ...)."""
    per_host: int = 1
    """Workers on each host."""
    seed: int = 0
    """Of the loss and the jitter."""

    def lab(self) -> Lab:
        if not 1 <= self.per_host <= MOST_WORKERS:
            raise UsageError(f"--per-host takes 1 to {MOST_WORKERS}, got {self.per_host}")
        return Lab(self.hosts, self.link(), overrides=self.overrides(self.hosts), seed=self.seed)


def _check(name: str, value: str) -> None:
    try:
        (parse_duration if name in ("delay", "jitter") else parse_rate)(value)
    except UsageError as error:
        raise UsageError(f"--{name}: {str(error).partition(': ')[2]}") from None


def _setting(text: str, part: str) -> tuple[str, str]:
    name, equals, value = part.partition("=")
    if not equals or not value or name.strip() not in _OVERRIDES:
        raise _bad(text)
    return name.strip(), value


def _probability(text: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise _bad(text) from None


def _bad(text: str) -> UsageError:
    return UsageError(
        f"--host: got {shown(text)}, takes a host's number and its settings "
        f"({', '.join(_OVERRIDES)}), such as 2:up=10mbit,delay=30ms"
    )


def run_lab(config: LabConfig, argv: Sequence[str]) -> int:
    """Check the network, run the command on every host, and return its exit code."""
    if not argv or not argv[0]:
        raise UsageError("no command to run: write it after --")
    with config.lab() as lab:
        lab.check()
        outcome = lab.start(argv, per_host=config.per_host).wait()
    if outcome.code:
        sys.stdout.flush()
        print(outcome, file=sys.stderr, flush=True)
    return outcome.code

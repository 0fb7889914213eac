"""SparseRounds: when a few of the weights leave, and how their mean lands.

The equations are at the top of sparse_average.py.
"""

import math
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from thinwire.checks import pair_of_numbers
from thinwire.errors import ThinwireError
from thinwire.flat import Flat, local_part
from thinwire.methods.engine import Engine
from thinwire.methods.session import Session
from thinwire.methods.shared.consensus import mean_of_replicas
from thinwire.methods.shared.finite import (
    StepGuard,
    broken_ranks,
    finite_means,
    give_up,
    largest_of,
)
from thinwire.methods.shared.model_buffers import ModelBuffers
from thinwire.methods.shared.shards import Shards
from thinwire.methods.sparse.drift import START, DriftEstimate, ema_weight, scaled_end
from thinwire.methods.sparse.round import Round, take_up
from thinwire.methods.sparse.subsets import MOST_PARTS, Subsets, parts_of
from thinwire.optim.checks import (
    refusal,
    require_buffers,
    require_choice,
    require_codec,
    require_count,
    require_part,
    require_whole,
)
from thinwire.wire.agreement import require_same
from thinwire.wire.codecs import Codec, Dense
from thinwire.wire.flight import Flight, all_finite

Correction = Literal["ema", "delta", "overwrite"]
Landing = Literal["step", "arrival"]


@dataclass
class SparseOptions:
    """What `SparseAverage` is given. Checked here."""

    name: str
    fraction: float
    delay: int
    correction: Correction
    every: int
    landing: Landing
    steps: int | None
    ema: tuple[float, float] | None
    codec: Codec | None
    buffers: Iterable[Tensor]
    seed: int

    def __post_init__(self) -> None:
        name = self.name
        self.fraction = require_part(name, "fraction", self.fraction)
        self.delay = require_count(name, "delay", self.delay, least=0)
        self.every = require_count(name, "every", self.every)
        self.steps = None if self.steps is None else require_count(name, "steps", self.steps)
        self.seed = require_whole(name, "seed", self.seed)
        require_choice(name, "correction", self.correction, get_args(Correction))
        require_choice(name, "landing", self.landing, get_args(Landing))
        why = "each round sends other weights"
        require_codec(name, "codec", self.codec, memory=False, why=why)
        self.ema = None if self.ema is None else _checked_ema(name, self.ema)
        self.buffers = require_buffers(name, self.buffers)
        _check(name, self.fraction, self.delay, self.correction, self.every)


class SparseRounds(Engine):
    """The engine of `SparseAverage`."""

    def __init__(self, session: Session, options: SparseOptions) -> None:
        super().__init__(session)
        self.fraction, self.delay, self.every = options.fraction, options.delay, options.every
        self.correction, self.landing = options.correction, options.landing
        self.steps, self.ema = options.steps, options.ema
        parameters, codec = session.parameters, options.codec
        self._flat = Flat(parameters)
        double = self._flat.dtype == torch.float64 and codec in (None, Dense(torch.float64))
        self._dtype = torch.float64 if double else torch.float32  # of what travels
        self.codec = codec or Dense(self._dtype)
        self.subsets = Subsets(
            self._flat.sizes, parts_of(self.fraction), options.seed, device=self._flat.device
        )
        late = self.correction == "ema" and self.delay > 0
        self.drift = DriftEstimate(parameters) if late else None
        self._shards = Shards(parameters)
        self._guard = StepGuard(session.name, session.wire.world.rank, parameters, self._shards)
        self._buffers = ModelBuffers(options.buffers, session.wire)
        self._in_air: deque[Round] = deque()
        self._count = 0  # steps taken
        self.rounds = 0  # launched
        self._dropped = 0  # in a row
        self._resumed = False

    @property
    def _tensors(self) -> list[Tensor]:
        """Taken anew at each use: see `Unchanged`."""
        return [local_part(p) for p in self.session.parameters]

    @property
    def flights(self) -> list[Flight]:
        """What is in the air, oldest first."""
        return [entry.flight for entry in self._in_air]

    @property
    def average_bytes(self) -> int:
        """Memory held for the averaging on this rank, at this moment, in bytes."""
        buffers = [b for entry in self._in_air for b in (entry.own, entry.values) if b is not None]
        in_air = sum(b.nbytes for b in buffers)
        rate = 0 if self.drift is None else self.drift.rate.nbytes
        return in_air + rate + self.subsets.nbytes()

    @torch.no_grad()
    def step(self) -> None:
        self.session.unchanged.require()
        self.session.inner_step(self._guard)
        self._count += 1
        while self._in_air and self._due(self._in_air[0]):
            self._land(self._in_air.popleft())
        if self._count % self.every:
            return
        self._launch()
        if self.delay == 0:
            self._land(self._in_air.popleft()) if self._in_air else None
        self.rounds += 1
        if self.rounds % self._buffer_period == 0:
            self._buffers.turn(late=self.delay > 0)

    def _launch(self) -> None:
        """Sends this round's subset. Alone there is nothing to average, and nothing is late."""
        if self.wire.size == 1:
            return
        subset = self.subsets.subset(self.rounds)
        payload = torch.empty(subset.numel, dtype=self._dtype, device=self._flat.device)
        subset.read(self._tensors, payload)
        if self._guard.stuck:
            payload.fill_(torch.nan)  # all of them give up together
        needed = self.delay > 0 and self.correction != "overwrite"
        own = payload.clone() if needed else None
        flight = self.wire.mean(payload, self.codec)
        self._in_air.append(Round(self.rounds, self._count, own, payload, flight))

    def _due(self, entry: Round) -> bool:
        """See [Note: landing]."""
        late = self._count - entry.step >= self.delay
        return late or (self.landing == "arrival" and entry.flight.arrived)

    def _land(self, entry: Round) -> None:
        mean = entry.flight.wait()
        if not self._usable(entry.flight):
            return
        subset = self.subsets.subset(entry.number)
        lag, tensors = self._count - entry.step, self._tensors
        if entry.own is not None and lag > 0:
            drift = subset.read(tensors, torch.empty_like(mean)).sub_(entry.own)
            if all_finite(drift):  # weights that broke meanwhile take the mean as it is
                if self.drift is not None:
                    drift = self.drift.update(subset, drift, lag, self._ema_weight())
                mean = drift.add_(mean)
        subset.write(mean, tensors)
        self.subsets.forget(entry.number)

    def _usable(self, flight: Flight) -> bool:
        """Whether the mean is finite, which all replicas find alike: it has the same bits. The
        shards of one land together only by step counts, and decide together only then."""
        if self._shards.all(flight.finite) if self.landing == "step" else flight.finite:
            self._dropped = 0
            return True
        self.session.account.skipped += 1
        self._dropped += 1
        if self._dropped >= max(8, self.subsets.parts):
            name, step = self.name, self._count
            raise give_up(
                f"{name}: the last {self._dropped} rounds up to step {step}", self._whose()
            )
        return False

    def _whose(self) -> list[int] | None:
        """The ranks whose weights are not finite. Landing by arrival, ranks come here with other
        transfers behind them and cannot ask each other: each knows of itself alone."""
        whole = math.isfinite(largest_of(self.session.parameters)) and not self._guard.stuck
        if self.landing == "step":
            return broken_ranks(self.wire, self._shards, whole)
        return None if whole else [self.wire.world.rank]

    def _ema_weight(self) -> float:
        start, end = self.ema or (START, None)
        if self.steps is None:
            return start
        if end is None:
            end = scaled_end(self.steps / (self.subsets.parts * self.every))
        return ema_weight(self._count / self.steps, start, end)

    @property
    def _buffer_period(self) -> int:
        """Rounds between those of the buffers: whole cycles, and no less than the delay."""
        cycle = self.subsets.parts * self.every
        return self.subsets.parts * max(1, -(-self.delay // cycle))

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, the model holds the mean of the replicas' weights and buffers; of those that are
        finite."""
        self.session.unchanged.require()
        with mean_of_replicas(self.session.evaluation, self.session.parameters, self._shards):
            with torch.no_grad():
                own_buffers = self._buffers.swap_in_mean(self.session.evaluation)
            try:
                yield
            finally:
                with torch.no_grad():
                    self._buffers.restore(own_buffers)

    @torch.no_grad()
    def finish(self) -> None:
        """Makes the replicas equal: their mean, as `consensus()` has it.

        What is still in the air is older than what is averaged here and is not needed any more.
        """
        self.drain()
        self._in_air.clear()
        self.session.unchanged.require()
        own = self._flat.pack(self.session.parameters, self._flat.new())
        name = f"{self.name}.finish()"
        (mean,) = finite_means(self.wire, [own], self._shards, name)
        self._flat.unpack(mean, self.session.parameters)
        self._buffers.finish()

    def drain(self) -> None:
        """Waits for what is in the air, without applying it: that still happens in its time."""
        for flight in self.flights:
            flight.wait()

    def method_state(self) -> dict[str, Any]:
        """Waits for what is in the air, which changes no arithmetic with landing="step"."""
        self.drain()
        return {
            "parts": self.subsets.parts,
            "seed": self.subsets.seed,
            "count": self._count,
            "rounds": self.rounds,
            "rate": None if self.drift is None else self.drift.rate,
            "flights": [entry.state() for entry in self._in_air],
            "buffers": self._buffers.state(),
        }

    @torch.no_grad()
    def load_method_state(self, state: dict[str, Any]) -> None:
        """The state may be one of a run with another number of replicas: what is in the air lands
        in its time, as the mean of those there were."""
        self._require_fitting(state)
        with suppress(ThinwireError, RuntimeError):  # a broken wire says so when it is used next
            self.drain()
        self._dropped = 0
        self._count, self.rounds = state["count"], state["rounds"]
        if self.drift is not None:
            self.drift.rate.copy_(state["rate"])
        like = torch.empty(0, dtype=self._dtype, device=self._flat.device)
        self._in_air = deque(
            take_up(saved, like, self.session.account) for saved in state["flights"]
        )
        self._buffers.load_state(state["buffers"])
        self.session.checked, self._resumed = False, True

    def _require_fitting(self, state: dict[str, Any]) -> None:
        name = self.name
        for key, own in (("parts", self.subsets.parts), ("seed", self.subsets.seed)):
            if state[key] != own:
                raise ValueError(
                    f"{name}: the saved state has {key}={state[key]}, this optimizer {own}: other "
                    "coordinates are in the air; use the fraction and seed it was saved with"
                )
        rate = state["rate"]
        if self.drift is not None and (rate is None or rate.numel() != self._flat.numel):
            found = "none" if rate is None else f"one for {rate.numel()} values"
            raise ValueError(
                f"{name}: the saved state has {found} of the average drift of "
                f"{self._flat.numel} values: it was saved with other parameters or settings"
            )

    def settings(self) -> dict[str, Any]:
        own = {
            "fraction": self.fraction,
            "delay": self.delay,
            "correction": self.correction,
            "every": self.every,
            "landing": self.landing,
            "steps": self.steps,
            "ema": self.ema,
            "codec": repr(self.codec),
            "seed": self.subsets.seed,
            "subsets": self.subsets.fingerprint(),  # the random numbers of another machine
            "rounds": self.rounds,
        }
        return {**super().settings(), **own}

    def check_start(self) -> None:
        if self._resumed:  # the weights of a resumed run differ, rightly
            require_same(self.wire, self.settings())
        else:
            super().check_start()


def _checked_ema(name: str, ema: object) -> tuple[float, float]:
    pair = pair_of_numbers(ema)
    if pair is None or not all(0 < weight <= 1 for weight in pair):
        raise refusal(name, "ema", "two numbers in (0, 1], at the start and at the end", ema)
    return pair


def _check(name: str, fraction: float, delay: int, correction: str, every: int) -> None:
    """Refuses settings that do not go together, before anything is sent."""
    if parts_of(fraction) > MOST_PARTS:
        raise ValueError(
            f"{name}(fraction={fraction!r}): a cycle would take {parts_of(fraction)} rounds, and "
            f"{MOST_PARTS} is the most; raise the fraction, or `every`"
        )
    cycle = every * parts_of(fraction)
    if correction == "delta" and delay > cycle:
        warnings.warn(
            f'{name}(correction="delta", delay={delay}): every value has its turn after {cycle} '
            "steps, while its last mean is still in the air, and what replicas differ by is "
            'corrected twice: they drift apart. Use correction="ema", or a shorter delay',
            stacklevel=3,
        )

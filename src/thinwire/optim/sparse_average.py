"""SparseAverage: replicas that average a few of their weights at a time and never wait for it.

This is the data axis of AsyncMesh, usable alone. Each of R replicas steps by itself. Every `every`
steps a round begins: the subset S of the coordinates whose turn it is (partition.py), a share
1 / C of all, is sent as it is and averaged over the replicas,

    own_i = w_i(then)[S]        mean = 1/R sum_j own_j

while training goes on. The mean lands some steps later. By then replica i has moved on by

    drift_i = w_i(now)[S] - own_i

and the mean, which is old, is put in place of the newer weights with a correction:

    overwrite    w_i[S] <- mean                      the progress made meanwhile is lost
    delta        w_i[S] <- mean + drift_i            the mean of the replicas stays what it was
    ema          w_i[S] <- mean + average drift_i    of earlier landings too (drift.py): the method

Gradients and the state of the inner optimizer never travel. Each coordinate has its turn once in C
rounds; the disagreement of the replicas shrinks with every round, and `consensus()` or `finish()`
give their mean.

[Note: landing] Rounds leave by step counts, on every rank alike. With landing="step" they also land
by step counts, exactly `delay` steps later: a run can be repeated. With landing="arrival" a replica
applies a mean once it is there, and waits for it after `delay` steps. Landing sends nothing, so it
is each replica's own affair, and replicas may be up to `delay` steps apart.

[Note: not finite] Weights that became NaN would stay NaN - there is no anchor to go back to - so a
replica leaves out an inner step whose gradients are not finite (finite.py). A mean that is not
finite all the same is dropped by all; after enough of them in a row all give up.
"""

import math
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from thinwire.checks import pair_of_numbers
from thinwire.errors import ThinwireError
from thinwire.optim.base import WrappingOptimizer
from thinwire.optim.checks import (
    refusal,
    require_buffers,
    require_choice,
    require_codec,
    require_count,
    require_part,
    require_whole,
)
from thinwire.optim.consensus import mean_of_replicas
from thinwire.optim.drift import START, DriftEstimate, ema_weight, scaled_end
from thinwire.optim.finite import StepGuard, broken_ranks, finite_means, give_up, largest_of
from thinwire.optim.flat import Flat, local_part
from thinwire.optim.partition import MOST_PARTS, Partition, parts_of
from thinwire.optim.shards import Shards
from thinwire.optim.sparse_round import Round, take_up
from thinwire.optim.travelling_buffers import TravellingBuffers
from thinwire.wire.agreement import require_same
from thinwire.wire.codecs import Codec, Dense
from thinwire.wire.flight import Flight, all_finite
from thinwire.wire.wire import Group

Correction = Literal["ema", "delta", "overwrite"]
Landing = Literal["step", "arrival"]


class SparseAverage(WrappingOptimizer):
    """Asynchronous sparse averaging around any inner optimizer.

    Args:
        inner: any torch optimizer over the model's parameters.
        fraction: share of the weights in a round, in (0, 1]; rounded down to 1 / C. Raise it when
            the loss falls behind data parallelism, lower it while `account.exposed` grows.
        delay: steps a round may be in the air; 0 waits for it at once. Raise it while
            `account.exposed` grows, lower it when the loss falls behind that of delay 0.
        correction: what stands for the progress made while a mean was in the air.
        every: steps between rounds. Raise it when the link is too slow for every step.
        landing: "step" applies a mean exactly `delay` steps after it left, "arrival" as soon as it
            is there. Use "arrival" where speeds or links vary and runs need not be repeatable.
        steps: optimizer steps of the whole run, over which the weight of the newest drift falls
            (drift.py). Without it the weight stays where it starts. Give it for runs of more than
            some 30 cycles.
        ema: that weight at the start and at the end of the run; 0.5 and an end that suits the
            number of landings by default. Raise the end when the loss falls behind in a decay of
            the learning rate.
        codec: form in which weights travel, without error feedback.
        buffers: the model's buffers (`model.buffers()`), if it has any that are learnt from data,
            such as BatchNorm's running statistics: they are averaged once a cycle.
        seed: of the subsets; the same on all replicas.
        group: a ProcessGroup or one dimension of a DeviceMesh. With FSDP2 the replica dimension of
            a (replica, shard) mesh: each rank then averages its own shard only.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        *,
        fraction: float = 0.05,
        delay: int = 10,
        correction: Correction = "ema",
        every: int = 1,
        landing: Landing = "step",
        steps: int | None = None,
        ema: tuple[float, float] | None = None,
        codec: Codec | None = None,
        buffers: Iterable[Tensor] = (),
        seed: int = 0,
        group: Group = None,
    ) -> None:
        name = type(self).__name__
        fraction = require_part(name, "fraction", fraction)
        delay = require_count(name, "delay", delay, least=0)
        every = require_count(name, "every", every)
        steps = None if steps is None else require_count(name, "steps", steps)
        seed = require_whole(name, "seed", seed)
        require_choice(name, "correction", correction, get_args(Correction))
        require_choice(name, "landing", landing, get_args(Landing))
        why = "each round sends other weights"
        require_codec(name, "codec", codec, memory=False, why=why)
        ema = None if ema is None else _checked_ema(name, ema)
        buffers = require_buffers(name, buffers)
        _check(name, fraction, delay, correction, every)
        super().__init__(inner, group=group, name=name)
        self.fraction, self.delay, self.every = fraction, delay, every
        self.correction, self.landing = correction, landing
        self.steps, self.ema = steps, ema
        self._flat = Flat(self._parameters)
        double = self._flat.dtype == torch.float64 and codec in (None, Dense(torch.float64))
        self._dtype = torch.float64 if double else torch.float32  # of what travels
        self.codec = codec or Dense(self._dtype)
        self.partition = Partition(
            self._flat.sizes, parts_of(fraction), seed, device=self._flat.device
        )
        late = correction == "ema" and delay > 0
        self.drift = DriftEstimate(self._parameters) if late else None
        self._shards = Shards(self._parameters)
        self._guard = StepGuard(name, self.wire.world.rank, self._parameters, self._shards)
        self._buffers = TravellingBuffers(buffers, self.wire)
        self._in_air: deque[Round] = deque()
        self._count = 0  # steps taken
        self.rounds = 0  # launched
        self._dropped = 0  # in a row
        self._resumed = False

    @property
    def _tensors(self) -> list[Tensor]:
        """Taken anew at each use: see `Unchanged`."""
        return [local_part(p) for p in self._parameters]

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
        return in_air + rate + self.partition.nbytes()

    @torch.no_grad()
    def _step(self) -> None:
        self._unchanged.require()
        self._inner_step(self._guard)
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
        subset = self.partition.subset(self.rounds)
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
        subset = self.partition.subset(entry.number)
        lag, tensors = self._count - entry.step, self._tensors
        if entry.own is not None and lag > 0:
            drift = subset.read(tensors, torch.empty_like(mean)).sub_(entry.own)
            if all_finite(drift):  # weights that broke meanwhile take the mean as it is
                if self.drift is not None:
                    drift = self.drift.update(subset, drift, lag, self._ema_weight())
                mean = drift.add_(mean)
        subset.write(mean, tensors)
        self.partition.forget(entry.number)

    def _usable(self, flight: Flight) -> bool:
        """Whether the mean is finite, which all replicas find alike: it has the same bits. The
        shards of one land together only by step counts, and decide together only then."""
        if self._shards.all(flight.finite) if self.landing == "step" else flight.finite:
            self._dropped = 0
            return True
        self.account.skipped += 1
        self._dropped += 1
        if self._dropped >= max(8, self.partition.parts):
            name, step = type(self).__name__, self._count
            raise give_up(
                f"{name}: the last {self._dropped} rounds up to step {step}", self._whose()
            )
        return False

    def _whose(self) -> list[int] | None:
        """The ranks whose weights are not finite. Landing by arrival, ranks come here with other
        transfers behind them and cannot ask each other: each knows of itself alone."""
        whole = math.isfinite(largest_of(self._parameters)) and not self._guard.stuck
        if self.landing == "step":
            return broken_ranks(self.wire, self._shards, whole)
        return None if whole else [self.wire.world.rank]

    def _ema_weight(self) -> float:
        start, end = self.ema or (START, None)
        if self.steps is None:
            return start
        if end is None:
            end = scaled_end(self.steps / (self.partition.parts * self.every))
        return ema_weight(self._count / self.steps, start, end)

    @property
    def _buffer_period(self) -> int:
        """Rounds between those of the buffers: whole cycles, and no less than the delay."""
        cycle = self.partition.parts * self.every
        return self.partition.parts * max(1, -(-self.delay // cycle))

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, the model holds the mean of the replicas' weights and buffers; of those that are
        finite."""
        self._unchanged.require()
        with mean_of_replicas(self.meeting, self._parameters, self._shards):
            with torch.no_grad():
                own_buffers = self._buffers.swap_in_mean(self.meeting)
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
        self._unchanged.require()
        own = self._flat.pack(self._parameters, self._flat.new())
        name = f"{type(self).__name__}.finish()"
        (mean,) = finite_means(self.wire, [own], self._shards, name)
        self._flat.unpack(mean, self._parameters)
        self._buffers.finish()

    def drain(self) -> None:
        """Waits for what is in the air, without applying it: that still happens in its time."""
        for flight in self.flights:
            flight.wait()

    def method_state(self) -> dict[str, Any]:
        """Waits for what is in the air, which changes no arithmetic with landing="step"."""
        self.drain()
        return {
            "parts": self.partition.parts,
            "seed": self.partition.seed,
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
        self._in_air = deque(take_up(saved, like, self.account) for saved in state["flights"])
        self._buffers.load_state(state["buffers"])
        self._checked, self._resumed = False, True

    def _require_fitting(self, state: dict[str, Any]) -> None:
        name = type(self).__name__
        for key, own in (("parts", self.partition.parts), ("seed", self.partition.seed)):
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

    def _settings(self) -> dict[str, Any]:
        own = {
            "fraction": self.fraction,
            "delay": self.delay,
            "correction": self.correction,
            "every": self.every,
            "landing": self.landing,
            "steps": self.steps,
            "ema": self.ema,
            "codec": repr(self.codec),
            "seed": self.partition.seed,
            "subsets": self.partition.fingerprint(),  # the random numbers of another machine
            "rounds": self.rounds,
        }
        return {**super()._settings(), **own}

    def _check_start(self) -> None:
        if not self._resumed:
            super()._check_start()
            return
        before = self.account.snapshot()
        require_same(self.wire, self._settings())  # the weights of a resumed run differ, rightly
        self.account.restore(before)
        self._checked = True


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

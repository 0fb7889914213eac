"""What is not finite stays where it arose.

A replica that steps by itself leaves out a step whose gradients are not finite (`StepGuard`), so
that its moments and weights stay clean. The mean that ends a run or is evaluated is taken over the
replicas that are finite (`finite_means`). Whoever gives up names the ranks (`broken_ranks`).
"""

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from thinwire.errors import NonFinite
from thinwire.flat import local_part, shard_of
from thinwire.methods.shared.shards import Shards
from thinwire.wire.flight import all_finite
from thinwire.wire.wire import Wire

STUCK = 64
"""Steps in a row without a finite gradient after which a replica counts as broken. GradScaler finds
its first scale in fewer."""
IDLE = 64
"""Steps in a row without any gradient after which a replica is asked whether it trains at all."""


class StepGuard:
    """Whether a replica may take its own step, and for how long it has taken none."""

    def __init__(self, name: str, rank: int, parameters: Sequence[Tensor], shards: Shards) -> None:
        self._name, self._rank = name, rank
        self._parameters, self._shards = parameters, shards
        self._skipped = 0  # in a row, like the next
        self._idle = 0

    def allows(self, overflow: bool) -> bool:
        """Whether every gradient of the replica, on all its shards, is finite. `overflow` is what
        GradScaler found."""
        largest = largest_gradient(self._parameters)
        bad = overflow or not math.isfinite(largest)
        broken, largest = self._shards.largest([float(bad), 0.0 if bad else largest])
        usable = not broken
        self._skipped = 0 if usable else self._skipped + 1
        self._idle = self._idle + 1 if usable and largest == 0 else 0
        if self._skipped == STUCK:
            self._say(f"the gradients have not been finite for {STUCK} steps in a row; {_HELP}")
        if self._idle == IDLE:
            self._say(
                f"no parameter has had a gradient for {IDLE} steps in a row. If the model's "
                "parameters were replaced (load_state_dict(assign=True)), build the optimizer anew"
            )
        return usable

    @property
    def stuck(self) -> bool:
        """Whether nothing can be expected of this replica any more."""
        return self._skipped >= STUCK

    def _say(self, what: str) -> None:
        warnings.warn(f"{self._name}: rank {self._rank}: {what}", stacklevel=2)


_HELP = "lower the learning rate, look at that rank's data, or go back to an earlier checkpoint"


def largest_gradient(parameters: Sequence[Tensor]) -> float:
    """One pass over the gradients, and one wait for the device."""
    gradients = [shard_of(p.grad) for p in parameters if p.grad is not None]
    return largest_of([g.coalesce().values() if g.is_sparse else g for g in gradients])


def largest_of(tensors: Sequence[Tensor]) -> float:
    """The largest magnitude in any of them; NaN if there is one."""
    parts = [part for part in map(local_part, tensors) if part.numel()]  # a shard may be empty
    away = [part for part in parts if part.device.type != "cpu"]
    found = [float(nn.utils.get_total_norm(away, norm_type=math.inf))]
    # A norm over infinity is not vectorised on a CPU, and costs as much as a step of AdamW.
    for part in parts:
        if part.device.type == "cpu":
            found += [abs(float(extreme)) for extreme in torch.aminmax(part)]
    return math.nan if any(map(math.isnan, found)) else max(found)


def broken_ranks(wire: Wire, shards: Shards, whole: bool) -> list[int]:
    """Which ranks say that they are not whole, as the launcher counts them; a collective."""
    flags = [0.0] * wire.size
    flags[wire.rank] = float(not whole)
    flags = shards.largest(wire.agree(flags))
    return [rank for rank, flag in zip(wire.ranks, flags, strict=True) if flag]


def finite_means(wire: Wire, own: Sequence[Tensor], shards: Shards, what: str) -> list[Tensor]:
    """The means of several buffers over the replicas all of whose values are finite; a collective.

    Only where a plain mean is not finite - which all ranks find alike - anything else is sent.
    """
    means = [flight.wait() for flight in [wire.mean(values.clone()) for values in own]]
    if wire.size == 1 or shards.all(all(map(all_finite, means))):
        return means
    whole = shards.all(all(map(all_finite, own)))
    broken = broken_ranks(wire, shards, whole)
    left = wire.size - len(broken)
    if not broken or not left:
        raise NonFinite(f"{what}: {_reason(broken)}; {_HELP}")
    warnings.warn(
        f"{what}: {named(broken)} not finite and left out of the mean of the replicas", stacklevel=3
    )
    sent = [values.clone() if whole else torch.zeros_like(values) for values in own]
    flights = [wire.mean(values) for values in sent]
    return [flight.wait().mul_(wire.size / left) for flight in flights]


def named(ranks: Sequence[int]) -> str:
    """'rank 2 is', 'ranks 0, 2 are'."""
    many = len(ranks) > 1
    return f"rank{'s' * many} {', '.join(map(str, ranks))} {'are' if many else 'is'}"


def give_up(what: str, broken: Sequence[int] | None) -> NonFinite:
    """The error of rounds that were dropped in a row; None is another rank than this one."""
    reason = "another rank is not finite" if broken is None else _reason(broken)
    return NonFinite(f"{what} were dropped, for {reason}; {_HELP}")


def _reason(broken: Sequence[int]) -> str:
    if not broken:
        return "every replica is finite but their mean is not: values overflow"
    return f"{named(broken)} not finite"

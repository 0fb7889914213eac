"""Fragment: a group of tensors that is averaged together, and the state of its rounds.

Buffers, flat, one value per parameter each, in float32 - or float64, if the tensors are:

    anchor     x, where the round began
    buffer     what travels: own progress on the way out, the mean on the way back
    momentum   of the outer optimizer                                             (if it has one)
    previous   own progress of the round before                                     (if own_weight)

They may live in host memory: a round touches each of them once.

[Note: dropped rounds] A replica whose progress is not finite sends it all the same: the mean is
then not finite, with the same bits on every rank, and all of them drop the round and go on from
their anchors. That heals a replica whose weights broke once. DROPPED rounds in a row say that one
does not heal: then all ranks, which count alike, ask who it was and raise the same error.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import ThinwireError
from thinwire.flat import Flat, is_double, local_part
from thinwire.methods.local.outer import Outer, OuterState
from thinwire.methods.shared.finite import broken_ranks, give_up, largest_of
from thinwire.methods.shared.shards import Shards
from thinwire.wire.codecs import Codec, Dense, Feedback
from thinwire.wire.flight import Flight, all_finite
from thinwire.wire.wire import Wire

DROPPED = 3
"""Rounds in a row; see [Note: dropped rounds]."""


class Fragment:
    """`groups` are the parameter groups that the parameters belong to."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        groups: Sequence[int],
        wire: Wire,
        shards: Shards,
        codec: Codec | Feedback | None,
        outer: Outer,
        *,
        late: bool,
        own_weight: float,
        phase: int,
        device: torch.device | None,
    ) -> None:
        self._parameters = list(parameters)
        self._wire, self._shards, self._device = wire, shards, device
        self.own_weight, self.phase = own_weight, phase
        self._flat = Flat(self._parameters)
        self.codec = self._own_codec(codec)
        self.anchor = self._flat.pack(self._parameters, self._new())
        self.buffer = self._new()
        members = list(zip(self._flat.sizes, groups, strict=True))
        self.outer = OuterState(
            outer, self.anchor, shards, members, always=late and own_weight == 0
        )
        self.previous = torch.zeros_like(self.anchor) if own_weight > 0 else None
        self.flight: Flight | None = None
        self._whole = True  # whether what this rank has in the air is finite
        self._dropped = 0  # rounds in a row
        self._broke = False  # whether one of them was dropped for this replica's sake

    @property
    def numel(self) -> int:
        return self._flat.numel

    def nbytes(self) -> int:
        """Bytes of outer state held by this rank, error feedback not counted."""
        held = (self.anchor, self.buffer, self.outer.momentum, self.previous)
        return sum(t.nbytes for t in held if t is not None)

    def anchor_here(self) -> None:
        """Before the first step: weights may have been loaded since the constructor."""
        self._flat.pack(self._parameters, self.anchor)

    def launch(self, stuck: bool) -> None:
        """Sends own progress since the anchor; the tensors go on as they are. A replica that is
        stuck sends NaN, see [Note: dropped rounds]."""
        whole = self._measure(self.buffer) and not stuck
        self._send(whole)

    def _send(self, whole: bool) -> None:
        self._whole = whole
        if not whole:
            self.buffer.fill_(torch.nan)
        self.flight = self._wire.mean(self.buffer, self.codec)

    def land(self, *, final: bool = False) -> bool:
        """Waits for the mean. False, on every rank alike, if there is none that can be used. The
        `final` landing of a run does not give up."""
        flight, self.flight = self.flight, None
        if flight is None:
            return False
        flight.wait()
        if self._shards.all(flight.finite):
            self._dropped, self._broke = 0, False
            return True
        self._wire.account.skipped += 1
        self._dropped += 1
        self._broke |= not self._whole
        if self._dropped >= DROPPED and not final:
            broken = broken_ranks(self._wire, self._shards, not self._broke)
            raise give_up(f"{self._wire.name}: the last {self._dropped} rounds", broken)
        return False

    def step(self, inner_lrs: Sequence[float]) -> None:
        """Moves the anchor by the mean in the buffer."""
        self.outer.absorb(self.buffer, inner_lrs)
        self.outer.move(self.anchor, self.buffer)

    def turn(self, inner_lrs: Sequence[float], stuck: bool) -> None:
        """The end of a round whose mean arrives one round late: land, send, move, restart."""
        arrived = self.land()
        if self.previous is not None:
            self._turn_with_own(arrived, inner_lrs, stuck)
        else:
            self._turn_stale(arrived, inner_lrs, stuck)
        self.restart()

    def _turn_stale(self, arrived: bool, inner_lrs: Sequence[float], stuck: bool) -> None:
        """own_weight = 0: the anchor moves by the mean alone."""
        kept = self.buffer.clone() if arrived and self.outer.needs_mean else None
        if arrived:
            self.outer.absorb(self.buffer, inner_lrs)
        self.launch(stuck)
        if arrived:
            self.outer.move(self.anchor, kept)

    def _turn_with_own(self, arrived: bool, inner_lrs: Sequence[float], stuck: bool) -> None:
        """d = mean_{t-1} + own_weight * (own_t - own_{t-1}); own_t becomes `previous`."""
        assert self.previous is not None
        if not arrived:
            self.buffer.zero_()
        self.buffer.sub_(self.previous, alpha=self.own_weight)
        whole = self._measure(self.previous) and not stuck
        if not whole:
            self.previous.zero_()
        self.buffer.add_(self.previous, alpha=self.own_weight)
        self.step(inner_lrs)
        # A replica that broke down goes on from its anchor as if it had made no progress.
        self.buffer.copy_(self.previous)
        self._send(whole)

    def settle(self, inner_lrs: Sequence[float]) -> Tensor:
        """Lands what is in the air and returns where this replica stands, all progress counted.

        The mean over the replicas of these values is the model that the run has trained.
        """
        own = torch.empty_like(self.anchor)
        whole = self._measure(own)
        if not whole:
            own.zero_()
        arrived = self.land(final=True)
        if not arrived:
            self.buffer.zero_()
        if self.previous is not None:
            self.buffer.add_(own - self.previous, alpha=self.own_weight)
        if arrived or self.previous is not None:
            self.step(inner_lrs)
        return torch.sub(self.anchor, own, alpha=1 - self.own_weight)

    def begin(self, flat: Tensor) -> None:
        """Starts a new round, with no history, from these values."""
        self.anchor.copy_(flat)
        if self.previous is not None:
            self.previous.zero_()
        self.flight = None
        self.restart()

    def restart(self) -> None:
        """The tensors take the anchor's values."""
        self._flat.unpack(self.anchor, self._parameters)

    def merge(self, weight: float) -> None:
        """tensor = weight * tensor + (1 - weight) * anchor; the anchor alone where the replica's
        tensors are not finite, and would never be again."""
        if weight == 0 or not self._shards.all(math.isfinite(largest_of(self._parameters))):
            self.restart()
            return
        for view, parameter in zip(self._flat.views(self.anchor), self._parameters, strict=True):
            tensor = local_part(parameter)
            tensor.lerp_(view.to(tensor.device, tensor.dtype), 1 - weight)

    def values(self) -> Tensor:
        """The tensors as a new flat buffer."""
        return self._flat.pack(self._parameters, torch.empty_like(self.anchor))

    def set_values(self, flat: Tensor) -> None:
        self._flat.unpack(flat, self._parameters)

    def state(self) -> dict[str, Any]:
        """Lands the flight, which changes no arithmetic, and keeps its result as pending."""
        pending = self.flight is not None
        if self.flight is not None:
            self.flight.wait()
        return {
            "anchor": self.anchor,
            "momentum": self.outer.momentum,
            "previous": self.previous,
            "pending": self.buffer if pending else None,
            "scalars": self.outer.scalars(),
            "error": self.codec.state_dict() if isinstance(self.codec, Feedback) else None,
        }

    def require(self, state: dict[str, Any]) -> None:
        """Refuses a state that does not fit, before anything of it is taken over."""
        wanted = [("anchor", True), ("momentum", self.outer.momentum is not None)]
        wanted += [
            ("previous", self.previous is not None),
            ("pending", state["pending"] is not None),
        ]
        for what in (name for name, needed in wanted if needed):
            saved = state[what]
            found = "none" if saved is None else f"{saved.numel()} values"
            if saved is None or saved.numel() != self.numel:
                raise ValueError(
                    f"the saved state's {what} has {found}, this fragment needs {self.numel}: it "
                    "was saved with other parameters, fragments or settings"
                )

    def load_state(self, state: dict[str, Any], *, with_error: bool) -> None:
        self._abandon()
        self.anchor.copy_(state["anchor"])
        if self.outer.momentum is not None:
            self.outer.momentum.copy_(state["momentum"])
        if self.previous is not None:
            self.previous.copy_(state["previous"])
        self.outer.load_scalars(state["scalars"])
        if state["pending"] is not None:
            self.buffer.copy_(state["pending"])
            self.flight = Flight(self.buffer, self._wire.account)
        self.codec = self._own_codec(self.codec)
        if with_error and isinstance(self.codec, Feedback) and state["error"] is not None:
            self.codec.load_state_dict(state["error"])

    def _abandon(self) -> None:
        """What is in the air must not land in what is loaded now. All ranks load at the same
        point, so it can be waited for."""
        flight, self.flight = self.flight, None
        self._whole, self._dropped, self._broke = True, 0, False
        if flight is None:
            return
        try:
            flight.wait()
        except (ThinwireError, RuntimeError):
            # The wire is broken, and says so again when it is used next. Whatever the network may
            # still write goes into memory that nobody reads.
            self.buffer = self._new()

    def _own_codec(self, codec: Codec | Feedback | None) -> Codec | Feedback:
        """A memory follows one stream: every fragment gets its own, and a new one when it loads."""
        if isinstance(codec, Feedback):
            return codec.fresh(self._flat.sizes)
        return codec or Dense(self._flat.dtype)

    def _measure(self, into: Tensor) -> bool:
        """Own progress x - y into a flat buffer; whether all of it is finite.

        Progress is measured from the value a tensor really restarted at: for bfloat16 weights the
        anchor rounded, not the anchor, or rounding would be sent as if it had been learnt.
        """
        views = zip(
            self._flat.views(into), self._flat.views(self.anchor), self._parameters, strict=True
        )
        for out, anchor, parameter in views:
            tensor = local_part(parameter)
            rounded = tensor.dtype != anchor.dtype
            start = anchor.to(tensor.dtype).to(anchor.dtype) if rounded else anchor
            torch.sub(start, tensor.to(anchor.device, anchor.dtype), out=out)
        return self._shards.all(all_finite(into))

    def _new(self) -> Tensor:
        pinned = self._device is not None and self._flat.device.type == "cuda"
        return torch.empty(
            self.numel,
            dtype=self._flat.dtype,
            device=self._device or self._flat.device,
            pin_memory=pinned and self._device == torch.device("cpu"),
        )


def by_width(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Tensors of 64 bits a value apart from the others: one such scalar must not double what all
    of a model sends."""
    double = [t for t in tensors if is_double(t)]
    single = [t for t in tensors if not is_double(t)]
    return [part for part in (single, double) if part]


def partition(tensors: Sequence[Tensor], count: int) -> list[list[Tensor]]:
    """Cuts a model's tensors into `count` fragments of about equal size, strided by depth.

    Tensors come in the order of the model's layers. They are cut into 3 * count runs of about equal
    size, and run r goes to fragment r % count: every fragment has early, middle and late layers.
    """
    if count == 1:
        return [list(tensors)]
    total = sum(local_part(t).numel() for t in tensors)
    runs = min(3 * count, len(tensors))
    fragments: list[list[Tensor]] = [[] for _ in range(count)]
    seen = 0
    for tensor in tensors:
        run = min(runs - 1, seen * runs // max(total, 1))
        fragments[run % count].append(tensor)
        seen += local_part(tensor).numel()
    return fragments

"""Fragment: a group of tensors that is averaged together, and the state of its rounds.

Buffers, flat and float32, one value per parameter each:

    anchor     x, where the round began
    buffer     what travels: own progress on the way out, the mean on the way back
    momentum   of the outer optimizer                                             (if it has one)
    previous   own progress of the round before                                      (if fresh > 0)

They may live in host memory: a round touches each of them once.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.optim.flat import Flat, local_part
from thinwire.optim.outer import Outer, OuterState
from thinwire.optim.shards import Shards
from thinwire.wire.codecs import Codec, Feedback
from thinwire.wire.flight import Flight, all_finite
from thinwire.wire.wire import Wire


class Fragment:
    def __init__(
        self,
        tensors: Sequence[Tensor],
        wire: Wire,
        shards: Shards,
        codec: Codec | Feedback,
        outer: Outer,
        *,
        late: bool,
        fresh: float,
        phase: int,
        device: torch.device | None,
    ) -> None:
        self._tensors = [local_part(t) for t in tensors]
        self._wire, self._shards = wire, shards
        self.codec, self.fresh, self.phase = codec, fresh, phase
        self._flat = Flat(self._tensors)
        self.anchor = self._flat.pack(self._tensors, self._new(device))
        self.buffer = self._new(device)
        self.outer = OuterState(outer, self.anchor, shards, always=late and fresh == 0)
        self.previous = torch.zeros_like(self.anchor) if fresh > 0 else None
        self.flight: Flight | None = None

    @property
    def numel(self) -> int:
        return self._flat.numel

    def nbytes(self) -> int:
        """Bytes of outer state held by this rank, error feedback not counted."""
        held = (self.anchor, self.buffer, self.outer.momentum, self.previous)
        return sum(t.nbytes for t in held if t is not None)

    def launch(self) -> None:
        """Sends own progress since the anchor; the tensors go on as they are."""
        self._measure(self.buffer)
        self.flight = self._wire.mean(self.buffer, self.codec)

    def land(self) -> bool:
        """Waits for the mean. False, on every rank alike, if there is none that can be used."""
        flight, self.flight = self.flight, None
        if flight is None:
            return False
        flight.wait()
        usable = self._shards.all(flight.finite)
        if not usable:
            self._wire.account.skipped += 1
        return usable

    def step(self, inner_lr: float) -> None:
        """Moves the anchor by the mean in the buffer."""
        self.outer.absorb(self.buffer, inner_lr)
        self.outer.move(self.anchor, self.buffer)

    def turn(self, inner_lr: float) -> None:
        """The end of a round whose mean arrives one round late: land, send, move, restart."""
        arrived = self.land()
        if self.previous is not None:
            self._turn_fresh(arrived, inner_lr)
        else:
            self._turn_stale(arrived, inner_lr)
        self.restart()

    def _turn_stale(self, arrived: bool, inner_lr: float) -> None:
        """fresh = 0: the anchor moves by the mean alone."""
        kept = self.buffer.clone() if arrived and self.outer.needs_mean else None
        if arrived:
            self.outer.absorb(self.buffer, inner_lr)
        self.launch()
        if arrived:
            self.outer.move(self.anchor, kept)

    def _turn_fresh(self, arrived: bool, inner_lr: float) -> None:
        """d = mean_{t-1} + fresh * (own_t - own_{t-1}); own_t becomes `previous`."""
        assert self.previous is not None
        if not arrived:
            self.buffer.zero_()
        self.buffer.sub_(self.previous, alpha=self.fresh)
        whole = self._measure(self.previous)
        if not whole:
            self.previous.zero_()
        self.buffer.add_(self.previous, alpha=self.fresh)
        self.step(inner_lr)
        # A replica that broke down goes on from its anchor as if it had made no progress, and
        # sends NaN: all replicas then agree to drop the round when it lands.
        self.buffer.copy_(self.previous) if whole else self.buffer.fill_(torch.nan)
        self.flight = self._wire.mean(self.buffer, self.codec)

    def settle(self, inner_lr: float) -> Tensor:
        """Lands what is in the air and returns where this replica stands, all progress counted.

        The mean over the replicas of these values is the model that the run has trained.
        """
        own = torch.empty_like(self.anchor)
        whole = self._measure(own)
        if not whole:
            own.zero_()
        arrived = self.land()
        if not arrived:
            self.buffer.zero_()
        if self.previous is not None:
            self.buffer.add_(own - self.previous, alpha=self.fresh)
        if arrived or self.previous is not None:
            self.step(inner_lr)
        return torch.sub(self.anchor, own, alpha=1 - self.fresh)

    def begin(self, flat: Tensor) -> None:
        """Starts a new round, with no history, from these values."""
        self.anchor.copy_(flat)
        if self.previous is not None:
            self.previous.zero_()
        self.flight = None
        self.restart()

    def restart(self) -> None:
        """The tensors take the anchor's values."""
        self._flat.unpack(self.anchor, self._tensors)

    def merge(self, weight: float) -> None:
        """tensor = weight * tensor + (1 - weight) * anchor."""
        if weight == 0:
            self.restart()
            return
        for view, tensor in zip(self._flat.views(self.anchor), self._tensors, strict=True):
            tensor.lerp_(view.to(tensor.device, tensor.dtype), 1 - weight)

    def values(self) -> Tensor:
        """The tensors as a new flat buffer."""
        return self._flat.pack(self._tensors, torch.empty_like(self.anchor))

    def set_values(self, flat: Tensor) -> None:
        self._flat.unpack(flat, self._tensors)

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

    def load_state(self, state: dict[str, Any], *, with_error: bool) -> None:
        self._fill(self.anchor, state["anchor"], "anchor")
        if self.outer.momentum is not None:
            self._fill(self.outer.momentum, state["momentum"], "momentum")
        if self.previous is not None:
            self._fill(self.previous, state["previous"], "previous")
        self.outer.load_scalars(state["scalars"])
        self.flight = None
        if state["pending"] is not None:
            self._fill(self.buffer, state["pending"], "pending")
            self.flight = Flight(self.buffer, self._wire.account)
        if with_error and isinstance(self.codec, Feedback) and state["error"] is not None:
            self.codec.load_state_dict(state["error"])

    def _measure(self, into: Tensor) -> bool:
        """Own progress x - y into a flat buffer; whether all of it is finite.

        Progress is measured from the value a tensor really restarted at: for bfloat16 weights the
        anchor rounded, not the anchor, or rounding would be sent as if it had been learnt.
        """
        views = zip(
            self._flat.views(into), self._flat.views(self.anchor), self._tensors, strict=True
        )
        for out, anchor, tensor in views:
            start = anchor if tensor.dtype == torch.float32 else anchor.to(tensor.dtype).float()
            torch.sub(start, tensor.to(anchor.device, torch.float32), out=out)
        return self._shards.all(all_finite(into))

    def _new(self, device: torch.device | None) -> Tensor:
        pinned = device is not None and device.type == "cpu" and self._flat.device.type == "cuda"
        return torch.empty(self._flat.numel, device=device or self._flat.device, pin_memory=pinned)

    def _fill(self, buffer: Tensor, saved: Tensor | None, what: str) -> None:
        found = "none" if saved is None else f"{saved.numel()} values"
        if saved is None or saved.numel() != buffer.numel():
            raise ValueError(
                f"the saved state's {what} has {found}, this fragment needs {buffer.numel()}: it "
                "was saved with other parameters, fragments or settings"
            )
        buffer.copy_(saved)


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

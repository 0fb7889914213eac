"""Threshold: dynamic communication thresholding (DCT), 2010.08899.

Of every tensor the values above a threshold are sent, and the rest is kept for later:

    f = x + e ;   send f where |f| >= τ, at most k = density * N of them ;   e = f - what was sent

τ is the k-th largest |f|. Finding it is dear, so it is done at steps 1, 2, 4, 8, ... and then every
`refresh` steps, and at once when a count runs away: above 4 k or below k/2. In between a step costs
an addition and a comparison. Tensors of fewer than 256 values are sent whole.

[Note: capacity] A payload has room for k values of each tensor. If more are above the threshold the
k largest of them go, and the others wait in e. So the length of a payload is known beforehand - a
count that is agreed on first would cost a round trip for each - and the density is never above what
was asked for; by the refresh below k/2 it is never far below.

[Note: momentum correction] With `momentum` m what is accumulated is the momentum of the gradients
and not the gradients (Lin et al. 2018, deep gradient compression):

    u = m u + x ;   f = u + e ;   u = 0 where f was sent

so that a value which is sent late has moved as far as momentum would have moved it meanwhile; where
it has just been sent, its momentum is spent. Use it in place of the optimizer's own momentum.

[Note: which mean] Two ranks exchange their payloads and add them: each sends one. More than two use
the two-phase mean, with a threshold and errors on the owner's side too, since n - 1 payloads to
everybody are more than the 2 (n-1)/n it sends. A tensor is then cut at the parts' borders, and each
piece has a threshold of its own.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from thinwire.checks import require_count, require_items, require_part, require_share
from thinwire.wire.codecs.base import Split
from thinwire.wire.codecs.feedback import Feedback, Mean, State, cloned, restore
from thinwire.wire.codecs.selection import is_due, select
from thinwire.wire.codecs.sparse import SMALL, Segment, SparseRow, require_bits


class Threshold(Feedback):
    """The values above a threshold, with error feedback built in. One for each buffer that is sent.

    Args:
        density: share of the values that is sent at most, in (0, 1]. Lower it when time is exposed,
            raise it when the loss falls behind the dense method's.
        refresh: steps between two searches for the threshold. Lower it when the share that is
            really sent stays well below `density`.
        value_bits: of a value that is sent: 1, 2, 4, 8, 16 or 32. What rounding loses is kept too.
            Fewer bits and more values are the better use of the same bytes.
        momentum: see [Note: momentum correction]; 0 is plain DCT. For inner optimizers without
            momentum of their own.
        sizes: lengths of the tensors in the buffer; one tensor by default. `GradientAverage` knows.
    """

    def __init__(
        self,
        density: float = 0.01,
        refresh: int = 1000,
        *,
        value_bits: int = 4,
        momentum: float = 0.0,
        sizes: Sequence[int] | None = None,
    ) -> None:
        self.density = require_part("Threshold", "density", density)
        self.refresh = require_count("Threshold", "refresh", refresh)
        self.value_bits = require_bits("Threshold", value_bits)
        self.momentum = require_share("Threshold", "momentum", momentum)
        self._sizes = None if sizes is None else _checked_sizes(sizes)
        self._rows: dict[Split, list[SparseRow]] = {}
        self.worker, self.owner = _Side(), _Side()
        self.steps = 0
        """Payloads that were taken; skipped ones do not count."""

    def fresh(self, sizes: Sequence[int] | None = None) -> "Threshold":
        return Threshold(
            self.density,
            self.refresh,
            value_bits=self.value_bits,
            momentum=self.momentum,
            sizes=sizes,
        )

    @property
    def share(self) -> float:
        """Of the values that thresholds apply to, what the last payload held."""
        return self.worker.sent / max(1, self.worker.out_of)

    def gathers(self, size: int) -> bool:
        """See [Note: which mean]."""
        return size <= 2

    def split(self, numel: int, rows: int) -> Split:
        return Split(numel, rows, -(-numel // rows))

    def require(self, numel: int, size: int, rank: int) -> None:
        known = sum(self._sizes) if self._sizes is not None else self.worker.numel
        if known not in (None, numel):
            raise ValueError(
                f"this Threshold remembers a buffer of {known} values and was given {numel}; "
                "make one Threshold for each buffer that is sent"
            )
        own = 0 if self.gathers(size) else self.split(numel, size).own(rank)
        if self.owner.numel not in (None, own):
            raise ValueError(
                f"this Threshold remembers the errors of {self.owner.numel} values whose mean it "
                f"computed, of {own} here; load its portable state on another number of ranks"
            )

    def row_bytes(self, split: Split) -> int:
        return max(form.nbytes for form in self._forms(split))

    # -- sending ----------------------------------------------------------------------------------

    def encode_worker(self, x: Tensor, split: Split) -> Tensor:
        z = self.worker.take(x, self.momentum)
        return self._encode(self.worker, z, split, range(split.rows))

    def encode_owner(self, x: Tensor, split: Split, row: int) -> Tensor:
        return self._encode(self.owner, self.owner.take(x, 0.0), split, range(row, row + 1))

    def decode(self, payload: Tensor, split: Split, row: int, out: Tensor) -> Tensor:
        forms = self._forms(split)
        for at, form in enumerate(forms[row : row + payload.shape[0]]):
            form.unpack(payload[at], out[at * split.part : (at + 1) * split.part])
        return out

    def _encode(self, side: "_Side", z: Tensor, split: Split, rows: range) -> Tensor:
        forms = self._forms(split)
        width = self.row_bytes(split)
        due = is_due(self.steps + 1, self.refresh)
        payload = torch.zeros(len(rows), width, dtype=torch.uint8, device=z.device)
        for at, row in enumerate(rows):
            part = slice(at * split.part, (at + 1) * split.part)
            places, broken = side.select(z[part], forms[row], row, due)
            side.starts[row] = [row * split.part + s.start for s in forms[row].segments]
            forms[row].pack(z[part], places, payload[at], broken=broken, take_out=True)
            side.spend(places, part)
            side.sent += places.numel()
            side.out_of += forms[row].numel
        return payload

    def _forms(self, split: Split) -> list[SparseRow]:
        if split not in self._rows:
            sizes = [split.numel] if self._sizes is None else self._sizes
            ends = list(accumulate(sizes))
            spans = [(end - size, end) for end, size in zip(ends, sizes, strict=True)]
            self._rows[split] = [self._form(split, row, spans) for row in range(split.rows)]
        return self._rows[split]

    def _form(self, split: Split, row: int, spans: list[tuple[int, int]]) -> SparseRow:
        """The pieces of the tensors that are in part `row`, counted from its beginning."""
        begin = row * split.part
        segments, dense = [], []
        for start, stop in spans:
            first, last = max(start, begin), min(stop, begin + split.own(row))
            if first >= last:
                continue
            if stop - start < SMALL:
                dense.append((first - begin, last - begin))
            else:
                keep = max(1, round(self.density * (last - first)))
                segments.append(Segment(first - begin, last - begin, keep))
        return SparseRow(split.part, segments, dense, self.value_bits)

    # -- memory -----------------------------------------------------------------------------------

    def settle(self, taken: bool, unused: Sequence[slice] = ()) -> None:
        self.worker.settle(taken, unused)
        self.owner.settle(taken, unused, self._begins)
        self.steps += taken

    def state_dict(self) -> State:
        return {
            "steps": self.steps,
            "error": self.worker.error,
            "velocity": self.worker.velocity,
            "owner": self.owner.error,
            "thresholds": [self.worker.thresholds, self.owner.thresholds],
        }

    def load_state_dict(self, state: State) -> None:
        self.steps, self._in_the_air = state["steps"], False
        worker, owner = ({int(k): list(v) for k, v in t.items()} for t in state["thresholds"])
        self.worker = _Side(cloned(state["error"]), cloned(state["velocity"]), worker)
        self.owner = _Side(cloned(state["owner"]), None, owner)

    def portable_state(self, mean: Mean, size: int, rank: int) -> State:
        """An owner's error, given to every worker, reaches the mean as it would have."""
        state: State = {"steps": self.steps, "error": None, "velocity": None}
        if self.worker.error is not None:
            error = self.worker.error.clone()
            if self.owner.error is not None:
                split = self.split(error.numel(), size)
                own = error[rank * split.part :][: split.own(rank)]
                own.add_(self.owner.error, alpha=size)
            state["error"] = mean(error)
        if self.worker.velocity is not None:
            state["velocity"] = mean(self.worker.velocity.clone())
        return state

    def load_portable_state(self, state: State, size: int, rank: int) -> None:
        self.load_state_dict(state | {"owner": None, "thresholds": [{}, {}]})

    def __repr__(self) -> str:
        momentum = f", momentum={self.momentum}" if self.momentum else ""
        return f"Threshold({self.density}, {self.refresh}, value_bits={self.value_bits}{momentum})"


def _checked_sizes(sizes: object) -> list[int]:
    lengths = require_items("Threshold", "sizes", sizes, "the lengths of tensors, or None")
    return [require_count("Threshold", "sizes", length, least=0) for length in lengths]


class _Side:
    """What one side remembers, and what will replace it when the flight has landed."""

    def __init__(
        self,
        error: Tensor | None = None,
        velocity: Tensor | None = None,
        thresholds: dict[int, list[float]] | None = None,
    ) -> None:
        self.error, self.velocity = error, velocity
        self.thresholds = thresholds or {}  # of the segments, by row
        self.starts: dict[int, list[int]] = {}  # where in the buffer a row's segments begin
        self.sent = self.out_of = 0  # values in the last payload, and among how many
        self._next: Tensor | None = None
        self._next_velocity: Tensor | None = None
        self._next_thresholds: dict[int, list[float]] = {}

    @property
    def numel(self) -> int | None:
        return None if self.error is None else self.error.numel()

    def take(self, x: Tensor, momentum: float) -> Tensor:
        """f of the module's docstring, in memory of its own: it becomes the error."""
        self.sent = self.out_of = 0
        self._next_thresholds = {}
        if momentum:
            self._next_velocity = x = _sum(x, self.velocity, momentum, self._next_velocity)
        self._next = _sum(x, self.error, 1.0, self._next)
        return self._next

    def select(
        self, z: Tensor, form: SparseRow, row: int, due: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The places of row `row` that are sent, and which segments are not finite, if any."""
        before = self.thresholds.get(row)
        after, places, broken = [], [], []
        for at, segment in enumerate(form.segments):
            values = z[segment.start : segment.stop]
            threshold = None if before is None or due else before[at]
            found, threshold, finite = select(values, segment.keep, threshold)
            after.append(threshold)
            places.append(found + segment.start)
            broken.append(not finite)
        self._next_thresholds[row] = after
        found = torch.cat(places) if places else torch.zeros(0, dtype=torch.int64, device=z.device)
        return form.admit(found), torch.tensor(broken, device=z.device) if any(broken) else None

    def spend(self, places: Tensor, part: slice) -> None:
        """Momentum ends where it was sent."""
        if self._next_velocity is not None:
            self._next_velocity[part][places] = 0

    def settle(self, taken: bool, unused: Sequence[slice], begins: int = 0) -> None:
        """The memory of what was replaced serves the next payload."""
        if not taken or self._next is None:
            return
        restore(self._next, self.error, unused, begins)
        if self._next_velocity is not None:
            restore(self._next_velocity, self.velocity, unused, begins)
        self._keep_thresholds(unused)
        self.error, self._next = self._next, self.error
        self.velocity, self._next_velocity = self._next_velocity, self.velocity
        self.thresholds = self._next_thresholds

    def _keep_thresholds(self, unused: Sequence[slice]) -> None:
        for row, starts in self.starts.items() if unused else ():
            before = self.thresholds.get(row)
            for at, start in enumerate(starts):
                if before is not None and any(p.start <= start < p.stop for p in unused):
                    self._next_thresholds[row][at] = before[at]


def _sum(x: Tensor, kept: Tensor | None, factor: float, out: Tensor | None) -> Tensor:
    """x + factor * kept, into `out` if that fits."""
    if out is None or out.shape != x.shape or out.device != x.device or out.dtype != x.dtype:
        out = torch.empty_like(x)
    if kept is None:
        return out.copy_(x)
    return torch.add(x, kept.to(x.device), alpha=factor, out=out)

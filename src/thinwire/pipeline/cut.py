"""Cut: where a model that is spread over ranks is thin, and what passes there.

Rank i computes something for every other rank - rows of an embedding table that only it holds, say
- and gets from each of them its part. In the forward pass activations cross the cut, in the
backward pass their gradients, both thresholded as crossing.py says. What a rank has for itself
stays as it is, and so does everything in eval mode.
"""

from typing import Any

import torch
from torch import Tensor, nn

from thinwire.checks import require_bool, require_count, require_part
from thinwire.errors import BadPayload
from thinwire.pipeline.sparse_activations import ThresholdSelector
from thinwire.wire.account import Account
from thinwire.wire.checks import require_group
from thinwire.wire.codecs.sparse import SparseRow, require_bits, sparse_row
from thinwire.wire.ranks import Group
from thinwire.wire.wire import Wire


class Cut(nn.Module):
    """An all-to-all with thresholds, for hybrid data and model parallel models.

    All ranks of the group call it, in the same order and with the same shapes, forward and
    backward.

    Args:
        density: share of the activations that is sent, in (0, 1]. Raise it when the quality falls
            behind that of density=1.
        refresh: steps between two searches for a threshold.
        value_bits: of a value: 1, 2, 4, 8, 16 or 32. Nothing makes up for rounding here: 8 is
            safe, 4 worth a try.
        gradient_density: share of what was sent whose gradient comes back. Below 1 it saves half
            of the backward traffic at most; see whether the quality holds.
        average: divide the gradients that come back by the number of ranks. Right where each
            rank's loss is a mean over its own samples and the rest of the model is averaged.
        group: a ProcessGroup or one dimension of a DeviceMesh; all ranks by default.
    """

    def __init__(
        self,
        density: float = 0.1,
        refresh: int = 1000,
        *,
        value_bits: int = 8,
        gradient_density: float = 1.0,
        average: bool = True,
        group: Group = None,
    ) -> None:
        super().__init__()
        self.density = require_part("Cut", "density", density)
        self.refresh = require_count("Cut", "refresh", refresh)
        self.value_bits = require_bits("Cut", value_bits)
        self.gradient_density = require_part("Cut", "gradient_density", gradient_density)
        self.average = require_bool("Cut", "average", average)
        require_group("Cut", "group", group)
        self.wire = Wire(group, name="cut")
        # of activations and of gradients, towards each rank
        self._sieves = [
            [ThresholdSelector(self.refresh) for _ in range(self.wire.size)] for _ in range(2)
        ]

    @property
    def account(self) -> Account:
        """Bytes sent, seconds exposed and hidden, so far."""
        return self.wire.account

    def forward(self, x: Tensor) -> Tensor:
        """(ranks, ...): x[j] goes to rank j, and in the result [i] is what rank i had for us."""
        if x.dim() < 2 or x.shape[0] != self.wire.size or not x.is_floating_point():
            raise ValueError(
                f"Cut takes floats of shape ({self.wire.size} ranks, ...), "
                f"got {x.dtype} of shape {tuple(x.shape)}"
            )
        if self.wire.size == 1:
            return x
        out: Tensor = _Crossing.apply(x, self)
        return out

    def form(self, numel: int) -> SparseRow:
        """Of the activations for one rank; all of them in eval mode."""
        return sparse_row(numel, self.density if self.training else 1.0, self._bits())

    def return_form(self, form: SparseRow) -> SparseRow:
        """Of the gradients of what had that form."""
        share = self.gradient_density if self.training else 1.0
        return sparse_row(form.keep, share, self._bits())

    def _bits(self) -> int:
        return self.value_bits if self.training else 32

    def sieve(self, side: int, peer: int) -> ThresholdSelector:
        """Of what goes to `peer`, forward (0) or backward (1); in eval mode all passes."""
        return self._sieves[side][peer] if self.training else ThresholdSelector(1)

    def get_extra_state(self) -> list[list[tuple[int, float | None]]]:
        return [[(sieve.steps, sieve.threshold) for sieve in side] for side in self._sieves]

    def set_extra_state(self, state: list[list[tuple[int, float | None]]]) -> None:
        if [len(side) for side in state] != [self.wire.size] * 2:
            return  # of another number of ranks: thresholds are found anew
        self._sieves = [
            [ThresholdSelector(self.refresh, *saved) for saved in side] for side in state
        ]

    def extra_repr(self) -> str:
        return f"density={self.density}, value_bits={self.value_bits}"


class _Crossing(torch.autograd.Function):
    """Forward and backward of a cut."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: Cut) -> Tensor:
        rows = x.detach().float().reshape(x.shape[0], -1)
        form = cut.form(rows.shape[1])
        ctx.cut, ctx.shape, ctx.dtype = cut, x.shape, x.dtype
        ctx.form, ctx.back = form, cut.return_form(form)
        out, ctx.sent, ctx.received = _exchange(cut, rows, form, 0)
        return out.to(x.dtype).view(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        cut = ctx.cut
        rows = gradient.float().reshape(ctx.shape[0], -1)
        values = rows.new_zeros(rows.shape[0], ctx.form.keep)
        for peer, places in ctx.received.items():
            values[peer, : places.numel()] = rows[peer, places]
        counts = {peer: places.numel() for peer, places in ctx.received.items()}
        arrived, _, _ = _exchange(cut, values, ctx.back, 1, counts)
        out = torch.zeros_like(rows)
        for peer, places in ctx.sent.items():
            out[peer, places] = arrived[peer, : places.numel()]
        out[cut.wire.rank] = rows[cut.wire.rank]
        if cut.average:
            out.div_(cut.wire.size)
        return out.to(ctx.dtype).view(ctx.shape), None


def _exchange(
    cut: Cut, rows: Tensor, form: SparseRow, side: int, counts: dict[int, int] | None = None
) -> tuple[Tensor, dict[int, Tensor], dict[int, Tensor]]:
    """(what arrived, places sent, places received), by peer; of `counts` values in each row."""
    payload = torch.zeros(rows.shape[0], form.nbytes, dtype=torch.uint8, device=rows.device)
    peers = [peer for peer in range(rows.shape[0]) if peer != cut.wire.rank]
    sent, received = {}, {}
    for peer in peers:
        row = rows[peer] if counts is None else rows[peer, : counts[peer]]
        sent[peer], broken = cut.sieve(side, peer).choose(row, form)
        form.pack(row, sent[peer], payload[peer], broken=broken)
    arrived = cut.wire.all_to_all(payload).wait()
    out = rows.clone()
    for peer in peers:
        try:
            received[peer] = form.unpack(arrived[peer], out[peer])
        except BadPayload as error:
            rank = cut.wire.ranks[peer]
            raise BadPayload(f"cannot decode what rank {rank} sent to a Cut: {error}") from None
    return out, sent, received

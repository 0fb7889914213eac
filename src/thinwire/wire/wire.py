"""Wire: one process group, one ordered stream of transfers, and an account of them.

This is the public face: what can be sent, checked before anything is. `transfers.py` says what is
done with a payload, `comm_engine.py` how it gets there and what happens if it does not.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from thinwire.checks import require_kind, require_seconds, require_text
from thinwire.errors import PeerLost, UsageError
from thinwire.wire import transfers, world
from thinwire.wire.account import Account
from thinwire.wire.checks import require_group
from thinwire.wire.codecs import Codec, Dense, Feedback
from thinwire.wire.codecs.base import require_flat
from thinwire.wire.collectives import Part, all_reduce_bytes
from thinwire.wire.comm_engine import CommEngine
from thinwire.wire.compressed_mean import Owner, mean_bytes
from thinwire.wire.flight import Flight
from thinwire.wire.ranks import Group, ranks_of

AnyCodec = Codec | Feedback

MOST_GATHERED = 64 << 20
"""Bytes that `gather_bytes` takes of a rank."""

_REDUCTIONS = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "sum": dist.ReduceOp.SUM}


class Wire:
    """Transfers among the ranks of one group.

    Args:
        group: a ProcessGroup, one dimension of a DeviceMesh, or None for all ranks. The wire makes
            a group of its own with the same members: nobody else's collectives can come between.
        name: for thread names and error messages.
        account: where to count; a new one by default, shared if several wires serve one method.
        timeout: seconds without a sign of life after which a peer counts as lost; the world's by
            default. Large payloads get more, by the rate measured so far.
    """

    def __init__(
        self,
        group: Group = None,
        *,
        name: str = "wire",
        account: Account | None = None,
        timeout: float | None = None,
    ) -> None:
        if timeout is not None:
            timeout = require_seconds("Wire", "timeout", timeout)
        if account is not None:
            require_kind("Wire", "account", account, Account, "an Account or None")
        require_text("Wire", "name", name)
        require_group("Wire", "group", group)
        self.world = world.current()
        self.account = account or Account()
        self.name = name
        self.ranks = ranks_of(group, self.world.size)
        if self.world.rank not in self.ranks:
            raise ValueError(
                f"this is rank {self.world.rank}, no member of the group of ranks {self.ranks}; "
                "make a wire only where its group includes the rank"
            )
        self.size = len(self.ranks)
        self.rank = self.ranks.index(self.world.rank)
        self._closed = False
        self._carrier: CommEngine | None = None
        if self.size > 1:
            patience = timeout or self.world.timeout
            self._carrier = CommEngine(self.ranks, name, self.account, self.world, patience)

    @property
    def group(self) -> ProcessGroup | None:
        """The wire's own group; None in a world of one, and once it is closed."""
        return self._carrier.group if self._carrier is not None else None

    # -- transfers --------------------------------------------------------------------------------

    def mean(
        self,
        flat: Tensor,
        codec: AnyCodec | None = None,
        *,
        owner: Owner | None = None,
        prepare: Callable[[], None] | None = None,
    ) -> Flight:
        """The mean of `flat` over the ranks, into `flat`, the same bits everywhere.

        `prepare` is called first, in a thread of the wire: it may put into `flat` what depends on
        an earlier flight of this wire, whose `peek()` it may wait for.
        `owner` is called with the mean of this rank's own part, in a thread of the wire; what it
        returns goes to everybody in place of the mean. The parts are those of `codec`.
        """
        self._require_open()
        require_flat(flat)
        codec = _checked(codec, flat)
        carrier = self._carrier
        if carrier is None or flat.numel() == 0:
            if prepare is not None:
                prepare()
            if owner is not None and flat.numel():
                flat.copy_(owner(flat))
            return Flight(flat, self.account)
        group = carrier.group
        if isinstance(codec, Dense) and codec.summable and owner is None:
            return carrier.launch(
                flat,
                lambda b: transfers.dense_mean(b, codec.dtype, group),
                sent=all_reduce_bytes(flat.numel() * codec.dtype.itemsize, self.size),
                prepare=prepare,
            )
        if isinstance(codec, Feedback):
            # Refused here, where all ranks are at the same call, and not in a lane, where it would
            # depend on what has arrived.
            codec.take_off(flat.numel(), self.size, self.rank)
        flight = carrier.launch(
            flat,
            lambda b: transfers.coded_mean(b, codec, group, owner),
            sent=mean_bytes(flat.numel(), codec, self.size, owned=owner is not None),
            turns=True,
            prepare=prepare,
        )
        if isinstance(codec, Feedback):
            flight._when_settled(codec.touch_down)
        return flight

    def exchange(
        self,
        flat: Tensor,
        neighbours: Sequence[int],
        weights: Sequence[float],
        *,
        codec: Codec | None = None,
    ) -> Flight:
        """own * flat + sum_j weights[j] * (flat of neighbours[j]), into `flat`.

        `own` is 1 - sum(weights). Neighbours are ranks of the group; each of them must name this
        rank among its own. Terms are added in rank order, so a symmetric graph is reproducible.
        """
        self._require_open()
        require_flat(flat)
        use = _stateless(codec, flat)
        if len(neighbours) != len(weights):
            raise ValueError(f"exchange got {len(neighbours)} neighbours, {len(weights)} weights")
        bad = [peer for peer in neighbours if not 0 <= peer < self.size or peer == self.rank]
        if bad or len(set(neighbours)) != len(neighbours):
            raise ValueError(
                f"exchange takes distinct ranks of 0..{self.size - 1} other than {self.rank}, "
                f"got {list(neighbours)}"
            )
        carrier = self._carrier
        if carrier is None or not neighbours or flat.numel() == 0:
            return Flight(flat, self.account)
        pairs = sorted(zip(neighbours, weights, strict=True))
        return carrier.launch(
            flat,
            lambda b: transfers.exchange(b, pairs, use, carrier.group),
            sent=len(pairs) * _whole_bytes(use, flat),
        )

    def send(self, flat: Tensor, to: int, *, codec: Codec | None = None) -> Flight:
        """Sends to one rank of the group, which must call `recv`. Lands when the buffer is free."""
        self._require_open()
        require_flat(flat)
        self._require_peer(to)
        use = _stateless(codec, flat)
        carrier = self._carrier
        if carrier is None or flat.numel() == 0:
            return Flight(flat, self.account)
        return carrier.launch(
            flat,
            lambda b: transfers.send(b, to, use, carrier.group),
            sent=_whole_bytes(use, flat),
            peer=to,
            lane="to",
        )

    def recv(self, flat: Tensor, source: int, *, codec: Codec | None = None) -> Flight:
        """Receives what rank `source` sends, into `flat`; the same length and codec there."""
        self._require_open()
        require_flat(flat)
        self._require_peer(source)
        use = _stateless(codec, flat)
        carrier = self._carrier
        if carrier is None or flat.numel() == 0:
            return Flight(flat, self.account)
        return carrier.launch(
            flat,
            lambda b: transfers.recv(b, source, use, carrier.group),
            sent=0,
            peer=source,
            lane="from",
        )

    def agree(
        self, values: Sequence[float], how: Literal["max", "min", "sum"] = "max"
    ) -> list[float]:
        """Reduces a few numbers over the ranks and returns them at once; for flags and counts."""
        return self.poll(values, how).wait().tolist()

    def poll(self, values: Sequence[float], how: Literal["max", "min", "sum"] = "max") -> Flight:
        """`agree` without the wait: a flight of float64 numbers."""
        self._require_open()
        if how not in _REDUCTIONS:
            raise ValueError(f"agree takes one of {', '.join(_REDUCTIONS)}, got {how!r}")
        flat = torch.tensor(list(values), dtype=torch.float64)
        carrier = self._carrier
        if carrier is None or not values:
            return Flight(flat, self.account)
        return carrier.launch(
            flat,
            lambda b: transfers.reduce(b, _REDUCTIONS[how], carrier.group),
            sent=all_reduce_bytes(flat.nbytes, self.size),
        )

    def union(self, flags: Sequence[bool]) -> Flight:
        """Which of some flags are set on any rank: a flight of as many bytes, 0 or 1.

        One message to each of the others and no more: it arrives before a mean that was launched
        at the same time.
        """
        self._require_open()
        flat = torch.tensor(list(flags), dtype=torch.uint8)
        carrier = self._carrier
        if carrier is None or not len(flags):
            return Flight(flat, self.account)
        return carrier.launch(
            flat,
            lambda b: transfers.union(b, carrier.group),
            sent=(self.size - 1) * flat.nbytes,
        )

    def scatter_mean(self, flat: Tensor, part: int, codec: Codec | None = None) -> Flight:
        """The mean over the ranks of this rank's own part of `flat`, into that part.

        Rank i owns the i-th `part` values. The rest of `flat` is left as it was.
        """
        self._require_open()
        use = self._checked_parts("scatter_mean", flat, part, codec)
        carrier = self._carrier
        if carrier is None or flat.numel() == 0:
            return Flight(flat, self.account)
        return carrier.launch(
            flat,
            lambda b: transfers.scatter_mean(b, use, part, carrier.group),
            sent=(self.size - 1) * use.payload_bytes(part),
        )

    def gather(self, flat: Tensor, part: int, codec: Codec | None = None) -> Flight:
        """Every rank's own part of `flat`, into `flat`; the parts are those of `scatter_mean`."""
        self._require_open()
        use = self._checked_parts("gather", flat, part, codec)
        carrier = self._carrier
        if carrier is None or flat.numel() == 0:
            return Flight(flat, self.account)
        return carrier.launch(
            flat,
            lambda b: transfers.gather(b, use, part, carrier.group),
            sent=(self.size - 1) * use.payload_bytes(part),
        )

    def _checked_parts(self, name: str, flat: Tensor, part: int, codec: Codec | None) -> Codec:
        require_flat(flat)
        use = _stateless(codec, flat)
        if part * self.size < flat.numel() or part % use.alignment(flat.numel(), self.size):
            raise ValueError(
                f"{name} of {flat.numel()} values over {self.size} ranks takes parts of at least "
                f"{use.part(flat.numel(), self.size)}, got {part}"
            )
        return use

    def all_to_all(self, rows: Tensor) -> Flight:
        """Row j of (ranks, anything) `rows` to rank j; in their place row i of what rank i has.

        Of any dtype, and as it is: what codes it, codes it before."""
        self._require_open()
        if rows.dim() != 2 or rows.shape[0] != self.size or not rows.is_contiguous():
            raise ValueError(
                f"all_to_all takes a contiguous tensor of one row for each of {self.size} ranks, "
                f"got shape {tuple(rows.shape)}, contiguous={rows.is_contiguous()}"
            )
        carrier = self._carrier
        if carrier is None or rows.numel() == 0:
            return Flight(rows, self.account)
        return carrier.launch(
            rows,
            lambda b: transfers.all_to_all(b, carrier.group),
            sent=(self.size - 1) * rows[0].nbytes,
        )

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """Everyone's bytes, in rank order, at once; for digests and settings (no pickle)."""
        self._require_open()
        carrier = self._carrier
        if carrier is None:
            return [payload]
        lengths = self._lengths(carrier, len(payload))
        sent = [max(1, length) for length in lengths]  # no message is empty
        flat = torch.zeros(sum(sent), dtype=torch.uint8)
        parts = flat.split(sent)
        if payload:
            parts[self.rank].copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        carrier.launch(
            flat,
            lambda b: transfers.gather_lengths(b, sent, carrier.group),
            sent=(self.size - 1) * sent[self.rank],
        ).wait()
        texts = (part.numpy().tobytes() for part in parts)
        return [text[:length] for text, length in zip(texts, lengths, strict=True)]

    def _lengths(self, carrier: CommEngine, own: int) -> list[int]:
        """What every rank is about to send; refused before memory is taken for it."""
        rows, row = torch.zeros(self.size, 1, dtype=torch.int64), torch.tensor([own])
        carrier.launch(
            rows,
            lambda b: transfers.gather_rows(b, row, carrier.group),
            sent=(self.size - 1) * row.nbytes,
        ).wait()
        lengths: list[int] = rows.view(-1).tolist()
        for rank, length in zip(self.ranks, lengths, strict=True):
            if not 0 <= length <= MOST_GATHERED:
                raise UsageError(
                    f"rank {rank} would send {length} bytes to every rank of wire {self.name!r}, "
                    f"which takes 0 to {MOST_GATHERED} of each"
                )
        return lengths

    def watch(
        self, parts: list[Part], buffer: Tensor, then: Callable[[Tensor], Tensor]
    ) -> "torch.futures.Future[Tensor]":
        """Looks after a collective that somebody else (DDP) issued on this wire's group."""
        assert self._carrier is not None
        return self._carrier.watch(parts, buffer, then)

    @property
    def lost(self) -> PeerLost | None:
        """The error that ended this wire; None while it works."""
        return self._carrier.lost if self._carrier is not None else None

    def explain(self, error: BaseException) -> PeerLost | None:
        """The lost peer behind an error of somebody else's transfer (DDP's) on this wire's group.

        None if the error is not the network's, or nobody is lost.
        """
        return self._carrier.explain(error) if self._carrier is not None else None

    def barrier(self) -> None:
        """Returns when every rank has come here."""
        self.agree([0.0])

    def close(self) -> None:
        """Ends the lanes and leaves the group; all flights must have landed."""
        self._closed = True
        carrier, self._carrier = self._carrier, None
        if carrier is not None:
            carrier.close()

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"wire {self.name!r} is closed")

    def _require_peer(self, peer: int) -> None:
        if not 0 <= peer < self.size or peer == self.rank:
            raise ValueError(
                f"wire {self.name!r} has ranks 0..{self.size - 1} and this is {self.rank}: "
                f"cannot exchange with rank {peer}"
            )


def _checked(codec: AnyCodec | None, flat: Tensor) -> AnyCodec:
    if codec is None:
        return Dense(flat.dtype)
    if not isinstance(codec, Codec | Feedback):
        raise ValueError(f"codec takes a thinwire codec such as Int8(), got {codec!r}")
    return codec


def _stateless(codec: Codec | None, flat: Tensor) -> Codec:
    use = _checked(codec, flat)
    if isinstance(use, Feedback):
        plain = getattr(use, "codec", "a codec without memory")
        raise ValueError(
            f"only mean takes error feedback, whose memory follows one stream of payloads; "
            f"give this transfer {plain!r}"
        )
    return use


def _whole_bytes(codec: Codec, flat: Tensor) -> int:
    """Of all values as one payload."""
    return codec.payload_bytes(codec.part(flat.numel(), 1))

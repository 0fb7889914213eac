"""Feedback: a codec with memory. What it does not send now, it sends later.

The memory follows ONE stream of payloads - the same buffer, again and again - and changes when a
flight has landed whose result was finite, so that a skipped step leaves no trace in it.

[Note: tentative] A step may also be skipped for the sake of another buffer. Whoever sends several
makes their memories tentative: the wire then leaves them alone, and the owner calls `settle` on all
of them when it knows whether the step is taken.

[Note: errors on other numbers of ranks] Of the workers' errors only the mean enters later results.
`portable_state` keeps that, the same on all ranks, and loads on any number of them; `state_dict`
keeps this rank's own, which goes on bit for bit.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from thinwire.wire.codecs.base import Split

State = dict[str, Any]
Mean = Callable[[Tensor], Tensor]  # over the ranks; a collective


def cloned(saved: Tensor | None) -> Tensor | None:
    """Memory of one's own with what was saved: the dictionary that is loaded stays as it is."""
    return None if saved is None else saved.clone()


class Feedback(ABC):
    """Make one for each buffer that is sent: `fresh` makes more of the same."""

    tentative = False
    """See [Note: tentative]."""
    _in_the_air = False
    _begins = 0
    """Where in the buffer the part begins whose mean this rank computes."""

    @abstractmethod
    def fresh(self, sizes: Sequence[int] | None = None) -> "Feedback":
        """One with the same settings that remembers nothing.

        `sizes` are the lengths of the tensors in the buffer, for codecs that treat each by itself.
        """

    @abstractmethod
    def require(self, numel: int, size: int, rank: int) -> None:
        """Refuses a buffer of another length than the one remembered."""

    def take_off(self, numel: int, size: int, rank: int) -> None:
        """`numel` values are launched by rank `rank` of `size`."""
        if self._in_the_air:
            name = type(self).__name__
            raise RuntimeError(
                f"an {name} codec got a second payload while its first is still in the air; "
                f"wait for that flight, or make one {name} for each buffer that is sent"
            )
        self.require(numel, size, rank)
        self._begins = 0 if self.gathers(size) else rank * self.split(numel, size).part
        self._in_the_air = True

    def touch_down(self) -> None:
        """The flight has been waited for."""
        self._in_the_air = False

    def landed(self, finite: bool) -> None:
        """The flight's result is in place."""
        if not self.tentative:
            self.settle(finite)

    @abstractmethod
    def gathers(self, size: int) -> bool:
        """As `Codec.gathers`."""

    @abstractmethod
    def split(self, numel: int, rows: int) -> Split:
        """How a buffer is cut into parts, one for each owner."""

    @abstractmethod
    def row_bytes(self, split: Split) -> int:
        """Bytes of the payload of one part."""

    @abstractmethod
    def encode_worker(self, x: Tensor, split: Split) -> Tensor:
        """This rank's values -> (rows, bytes). x belongs to the flight, and may be overwritten."""

    @abstractmethod
    def encode_owner(self, x: Tensor, split: Split, row: int) -> Tensor:
        """The mean of part `row`, which this rank owns -> (1, bytes)."""

    @abstractmethod
    def decode(self, payload: Tensor, split: Split, row: int, out: Tensor) -> Tensor:
        """(rows, bytes) -> parts `row`, `row` + 1, ... into `out`."""

    @abstractmethod
    def settle(self, taken: bool, unused: Sequence[slice] = ()) -> None:
        """Takes over what the last payload left behind, or drops it with the skipped step.

        `unused` are the parts of the buffer of which nothing is used though the step is taken
        (tensors that no rank has a gradient for): they are remembered as they were before.
        """

    @abstractmethod
    def state_dict(self) -> State:
        """This rank's memory."""

    @abstractmethod
    def load_state_dict(self, state: State) -> None:
        """The tensors of `state` are copied: they are the caller's."""

    @abstractmethod
    def portable_state(self, mean: Mean, size: int, rank: int) -> State:
        """The memory of all ranks, the same on each; a collective."""

    @abstractmethod
    def load_portable_state(self, state: State, size: int, rank: int) -> None: ...


def restore(after: Tensor, before: Tensor | None, unused: Sequence[slice], begins: int = 0) -> None:
    """Puts back what was remembered of some parts of the buffer; `after` begins at `begins`."""
    for part in unused:
        start, stop = max(0, part.start - begins), max(0, part.stop - begins)
        after[start:stop] = 0 if before is None else before[start:stop]

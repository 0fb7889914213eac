"""UsedSince: which parameters this rank has used since the last exchange, and the others as they
were then. See [Note: unused] in zero_one_adam.py."""

from torch import Tensor

from thinwire.flat import local_part
from thinwire.methods.onebit.moments import MomentBucket
from thinwire.methods.overlap.reducer import GradientReducer
from thinwire.methods.session import Session


class UsedSince:
    def __init__(self, session: Session, reducer: GradientReducer[MomentBucket]) -> None:
        self._session, self._reducer = session, reducer
        self._seen: set[int] = set()  # parameters with a gradient here since the last exchange
        self._before: dict[int, tuple[Tensor, ...]] = {}  # the others as they were then

    def note(self) -> None:
        """Before a local step: keeps what was, until there is a gradient."""
        for bucket in self._reducer.buckets:
            for at, index in enumerate(bucket.indices):
                if bucket.parameters[at].grad is not None:
                    self._before.pop(index, None)
                    self._seen.add(index)
                elif index not in self._seen and index not in self._before:
                    kept = [local_part(bucket.parameters[at]), *_round_state(bucket, at)]
                    self._before[index] = tuple(value.clone() for value in kept)
        parameters = self._session.parameters
        unplaced = set(range(len(parameters))) - self._reducer.place.keys()
        self._seen |= {i for i in unplaced if parameters[i].grad is not None}

    def flags(self) -> list[bool]:
        return [i in self._seen for i in range(len(self._session.parameters))]

    def go_back(self, bucket: MomentBucket, at: int) -> None:
        """A tensor that nobody has used since the last exchange: as if there had been no steps."""
        weights, *values = self._before[bucket.indices[at]]
        local_part(bucket.parameters[at]).copy_(weights)
        for held, value in zip(_round_state(bucket, at), values, strict=True):
            held.copy_(value)

    def forget(self, *, all_used: bool = False) -> None:
        """A new round begins; or one whose begin is not known, in which all count as used."""
        count = len(self._session.parameters)
        self._seen, self._before = set(range(count)) if all_used else set(), {}


def _round_state(bucket: MomentBucket, at: int) -> list[Tensor]:
    """What a local step changes of a tensor, the weights excepted."""
    values = (bucket.m, bucket.moments["anchor"], bucket.moments["update"])
    return [bucket.views(value)[at] for value in values] + [bucket.scalars["weight"][at]]

"""A round of sparse averaging that is in the air."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from thinwire.wire.account import Account
from thinwire.wire.flight import Flight


@dataclass
class Round:
    number: int
    step: int  # at which it left
    own: Tensor | None  # what this replica sent; None where the correction does not need it
    values: Tensor  # what travels: the mean, once it has landed
    flight: Flight

    def state(self) -> dict[str, Any]:
        """Once its flight has been waited for."""
        return {"round": self.number, "step": self.step, "own": self.own, "mean": self.values}


def take_up(saved: dict[str, Any], like: Tensor, account: Account) -> Round:
    """A round that was saved, in memory of its own of the kind of `like`."""

    def loaded(values: Tensor) -> Tensor:
        return values.to(like.device, like.dtype, copy=True)

    own = None if saved["own"] is None else loaded(saved["own"])
    mean = loaded(saved["mean"])
    return Round(saved["round"], saved["step"], own, mean, Flight(mean, account))

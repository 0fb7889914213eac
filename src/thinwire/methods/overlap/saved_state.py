"""SavedState: how methods with buckets save: as torch's optimizers do, and their own beside it."""

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from thinwire.methods.overlap.bucket import Bucket
from thinwire.methods.overlap.reducer import GradientReducer
from thinwire.methods.session import Session

State = dict[str, Any]
B = TypeVar("B", bound=Bucket)


class SavedState(Generic[B]):
    """{"state": by parameter, "param_groups": ..., "method": the buckets and the method's own}"""

    def __init__(self, session: Session, reducer: GradientReducer[B]) -> None:
        self._session, self._reducer = session, reducer

    def describe(self, kept: Mapping[int, Mapping[str, Tensor]], more: State) -> State:
        """A copy of what is kept for each parameter, with what is the method's own."""
        index = {id(p): i for i, p in enumerate(self._session.parameters)}
        groups = [
            {k: v for k, v in group.items() if k != "params"}
            | {"params": [index[id(p)] for p in group["params"]]}
            for group in self._session.groups
        ]
        state = {
            i: {name: tensor.clone() for name, tensor in entries.items()}
            for i, entries in kept.items()
        }
        method = {"name": self._session.name} | self._reducer.arrangement() | more
        return {"state": state, "param_groups": groups, "method": method}

    def check(self, saved: State) -> None:
        """Refuses the state of another method, or of other parameters."""
        name = self._session.name
        kind = saved.get("method", {}).get("name", "another optimizer")
        if kind != name:
            raise ValueError(f"{name} cannot load the state of {kind}")
        sizes = [len(group["params"]) for group in saved["param_groups"]]
        here = [len(group["params"]) for group in self._session.groups]
        if sizes != here:
            raise ValueError(
                f"{name}: the state has groups of {sizes} parameters, this optimizer of {here}; "
                "load it into the model it was saved with"
            )

    def check_shape(self, index: int, shape: torch.Size, wanted: torch.Size) -> None:
        if shape != wanted:
            raise ValueError(
                f"{self._session.name}: parameter {index} has shape {tuple(wanted)}, in the state "
                f"{tuple(shape)}; load it into the model it was saved with"
            )

    def load(self, saved: State) -> None:
        """The settings of the groups, and the buckets; JSON has made lists of tuples."""
        for group, values in zip(self._session.groups, saved["param_groups"], strict=True):
            for key, value in values.items():
                if key != "params":
                    group[key] = tuple(value) if isinstance(value, list) else value
        method = saved["method"]
        self._reducer.arrange_as(method["order"], method["buckets"], method.get("added", 0))
        for bucket in self._reducer.buckets:
            bucket.rests(method.get("resting", ()))

"""Engine: what a method does, behind the optimizer that the user's loop sees.

An engine decides when gradients are sent, when means are used and when weights move. What a step
*is* - Adam's, LAMB's, a mixture of neighbours - belongs to the rules that it holds.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from thinwire.flat import local_part
from thinwire.methods.session import Session
from thinwire.wire.agreement import require_same, require_same_values

State = dict[str, Any]


class Engine:
    """A family implements `step` and, where its replicas may differ between steps, `consensus` and
    `finish`."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.name, self.wire = session.name, session.wire

    def step(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} must implement step")

    def accumulating(self) -> AbstractContextManager[None]:
        return nullcontext()

    def consensus(self) -> AbstractContextManager[None]:
        return nullcontext()

    def finish(self) -> None:
        """After the last step."""

    # -- the start --------------------------------------------------------------------------------

    def require_same_start(self) -> None:
        """Before anything else is sent: replicas that start apart never meet."""
        if self.session.checked:
            return
        before = self.session.account.snapshot()
        self.check_start()
        # What a method costs does not depend on where it was resumed.
        self.session.account.restore(before)
        self.session.checked = True

    def check_start(self) -> None:
        require_same(self.wire, self.settings())
        weights = map(local_part, self.session.parameters)
        require_same_values(self.wire, weights, "the weights at the first step")

    def settings(self) -> State:
        """What must be the same on all replicas for their transfers to match."""
        layout = {
            str(index): f"{p.dtype} {tuple(p.shape)}{'' if p.requires_grad else ', not trained'}"
            for index, p in enumerate(self.session.parameters)
        }
        return {"method": self.name, "parameter": layout}

    # -- state: here that of a method which wraps an inner optimizer ------------------------------

    def state_dict(self) -> State:
        """The inner optimizer's state and, under "method", this replica's own part of it."""
        return {"inner": self._inner().state_dict(), "method": self.method_state()}

    def portable_state_dict(self) -> State:
        return {"inner": self._inner().state_dict(), "method": self.portable_method_state()}

    def load_state_dict(self, state: State) -> None:
        # torch's optimizers go on in the tensors they are given: see [Note: loading] in base.py.
        self._inner().load_state_dict(copied(state["inner"]))
        self.session.adopt_inner()
        self.load_method_state(state["method"])

    def method_state(self) -> State:
        """What this replica keeps beside the inner optimizer's state."""
        return {}

    def portable_method_state(self) -> State:
        """The same on every rank, and for any number of ranks. A collective: all ranks call it."""
        return self.method_state()

    def load_method_state(self, state: State) -> None:
        """Takes a state of either kind."""

    def _inner(self) -> torch.optim.Optimizer:
        assert self.session.inner is not None, f"{self.name} has a state_dict of its own"
        return self.session.inner


def copied(tree: Any) -> Any:
    """A nest of dicts and lists with tensors of its own."""
    if isinstance(tree, Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        return {key: copied(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [copied(value) for value in tree]
    return tree

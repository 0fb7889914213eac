"""StageState: `state_dict` of the one-bit methods, and what a checkpoint splits it into."""

import weakref
from typing import Protocol

import torch

from thinwire.flat import local_part
from thinwire.methods.engine import State
from thinwire.methods.onebit.moments import MomentBucket
from thinwire.methods.onebit.store import MomentStore
from thinwire.methods.overlap.engine import Kept
from thinwire.methods.overlap.reducer import GradientReducer
from thinwire.methods.overlap.saved_state import SavedState
from thinwire.methods.session import Session


class Saved(Protocol):
    """What is asked of an engine: the moments of whole parameters, and its own beside them."""

    session: Session
    reducer: GradientReducer[MomentBucket]
    store: MomentStore

    def held(self) -> Kept: ...
    def held_in_common(self) -> Kept: ...
    def kept(self) -> State: ...
    def restore(self, kept: State) -> None: ...


class StageState:
    """
    own        this rank's, its own errors included: goes on bit for bit on as many ranks
    portable   the same on every rank, and for any number of ranks; a collective
    common     what is the same on all ranks; a collective
    """

    def __init__(self, engine: Saved) -> None:
        self._engine: Saved = weakref.proxy(engine)  # it holds this
        self._saved = SavedState(engine.session, engine.reducer)

    def own(self) -> State:
        engine = self._engine
        state = self._saved.describe(engine.held(), engine.kept())
        layout = engine.reducer.route.layout
        return state | {"errors": engine.store.own_errors(), "ranks": layout}

    def portable(self) -> State:
        return self.common() | {"errors": self._engine.store.portable_errors(), "ranks": 0}

    def common(self) -> State:
        return self._saved.describe(self._engine.held_in_common(), self._engine.kept())

    def load(self, state: State) -> None:
        self.load_common(state)
        self._engine.store.load_errors(state["errors"], ranks=state["ranks"])

    def load_common(self, saved: State) -> None:
        engine, parameters = self._engine, self._engine.session.parameters
        self._saved.check(saved)
        for index, entries in sorted(saved["state"].items(), key=lambda item: int(item[0])):
            wanted = local_part(parameters[int(index)]).shape
            self._saved.check_shape(int(index), entries["exp_avg"].shape, wanted)
        engine.reducer.abandon()
        engine.reducer.buckets = []  # nothing that they hold is to be taken over
        engine.restore(saved["method"])
        self._saved.load(saved)
        counts = _run_counts(saved["method"])
        for index, entries in saved["state"].items():
            engine.reducer.bucket_of(int(index)).adopt(int(index), counts | entries)
        engine.store.show()


def _run_counts(method: State) -> dict[str, torch.Tensor]:
    """For states from before there were counts for every tensor."""
    names = {"steps": "step", "refreshes": "refreshes"}
    return {
        count: torch.tensor(float(method[name])) for name, count in names.items() if name in method
    }

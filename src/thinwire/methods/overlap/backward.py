"""BackwardHooks: which gradients a backward pass has produced, and in which order."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor


class BackwardHooks:
    """Hooks on parameters; they do not keep whoever made them alive."""

    def __init__(self, parameters: Sequence[Tensor], ready: Callable[[int], None]) -> None:
        """`ready(index)` is called for every gradient of a pass that is not `accumulating`."""
        self.order: dict[int, None] = {}  # as an ordered set
        self._accumulating = False
        self._ready = weakref.WeakMethod(ready)
        self._unwatched = dict(enumerate(parameters))
        self.watch()

    def watch(self) -> None:
        """Looks after the parameters that have come to be trained since the last call."""
        for index, parameter in list(self._unwatched.items()):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._hook(index, self._ready))
                del self._unwatched[index]

    def _hook(self, index: int, method: "weakref.WeakMethod[Any]") -> Callable[[Tensor], None]:
        me = weakref.ref(self)

        def hook(_parameter: Tensor) -> None:
            watcher, ready = me(), method()
            if watcher is None or ready is None:  # the optimizer is gone
                return
            watcher.order.setdefault(index)
            if not watcher._accumulating:
                ready(index)

        return hook

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

"""WeightVersions: a stage's weights, one version for every update that a forward in flight saw.

A forward runs on a *copy* of the newest weights, through torch.func.functional_call, and its graph
stays until its backward. That backward gives the gradient at the very weights the forward used; it
is applied to the newest. A copy is used again only after the last backward on it. So no forward is
ever recomputed, and the optimizer is free to change the newest weights in place meanwhile.

Copies are made when a version is first needed and its number is still the newest's; there are as
many of them as `Schedule.copies` says. Weights that are not trained are not copied.

A copy may look ahead: by the time its gradient arrives the weights will have made h more updates,
and momentum says where to,

    version = w_t + h (w_t - w_{t-1})

The gradient is then that of the weights it will meet, but for what changes on the way. This takes
one more copy, w_{t-1}; see `lookahead.py` for what it does to stability.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Version:
    """A copy of the trained weights after `number` updates, and how many forwards still need it."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.number = -1  # none yet
        self.users = 0
        self.weights = {n: torch.empty_like(w).requires_grad_() for n, w in weights.items()}

    @torch.no_grad()
    def take(self, number: int, newest: Mapping[str, Tensor]) -> None:
        torch._foreach_copy_(list(self.weights.values()), list(newest.values()))
        self.number = number

    @torch.no_grad()
    def look_ahead(
        self, newest: Mapping[str, Tensor], before: Mapping[str, Tensor], horizon: float
    ) -> None:
        """w_t + h (w_t - w_{t-1}), without a buffer for the difference."""
        weights = list(self.weights.values())
        torch._foreach_copy_(weights, list(before.values()))
        torch._foreach_lerp_(weights, list(newest.values()), 1 + horizon)


class WeightVersions:
    """The versions of one module's weights, each looking `horizon` updates ahead."""

    def __init__(self, module: nn.Module, horizon: float = 0.0) -> None:
        self.horizon = horizon
        trained = ((n, p) for n, p in module.named_parameters() if p.requires_grad)
        self.newest: dict[str, Tensor] = dict(trained)
        if any(isinstance(p, DTensor) for p in self.newest.values()):
            raise ValueError(
                "a pipeline stage keeps versions of whole parameters, but these are sharded "
                "(DTensor); use more stages instead of shards, or stash=False"
            )
        self.number = 0
        """Updates made to the newest weights."""
        self._versions: list[Version] = []
        self._kept: Version | None = None
        self._before: dict[str, Tensor] | None = None  # the weights before the last update

    @property
    def copies(self) -> int:
        """Copies made so far: they stay for the next forwards."""
        return len(self._versions)

    @property
    def nbytes(self) -> int:
        copies = self.copies + (self._before is not None)
        return copies * sum(p.nbytes for p in self.newest.values())

    def restart(self) -> None:
        """Counts updates from 0 again, with nothing in flight."""
        if self._kept is not None:
            self.release(self._kept)
            self._kept = None
        assert not any(version.users for version in self._versions)
        self.number = 0
        self._before = None
        for version in self._versions:
            version.number = -1  # the weights may have changed since

    def acquire(self, number: int) -> Version:
        """The weights after `number` updates, until `release`."""
        version = self._find(number)
        if version is None:
            if number != self.number:
                raise RuntimeError(
                    f"version {number} of the weights is gone, the newest is {self.number}"
                )
            version = self._free()
            version.take(number, self.newest)
            if self._before is not None:
                version.look_ahead(self.newest, self._before, self.horizon)
        version.users += 1
        return version

    def release(self, version: Version) -> None:
        version.users -= 1

    def keep_newest(self) -> None:
        """Keeps the newest weights until the next call, for forwards that come after an update."""
        if self._kept is not None:
            self.release(self._kept)
        self._kept = self.acquire(self.number)

    @torch.no_grad()
    def before_update(self) -> None:
        """The newest weights are about to change."""
        if self.horizon:
            newest = list(self.newest.values())
            if self._before is None:
                self._before = {name: torch.empty_like(w) for name, w in self.newest.items()}
            torch._foreach_copy_(list(self._before.values()), newest)

    def updated(self) -> None:
        """The newest weights have changed."""
        self.number += 1

    def collect(self, version: Version) -> None:
        """Adds the gradients that a backward left on a version to those of the newest weights."""
        for name, weight in version.weights.items():
            gradient, weight.grad = weight.grad, None
            newest = self.newest[name]
            if gradient is None:
                continue
            if newest.grad is None:
                newest.grad = gradient
            else:
                newest.grad.add_(gradient)

    def _find(self, number: int) -> Version | None:
        """Also one that nobody uses at the moment: it is still right."""
        return next((v for v in self._versions if v.number == number), None)

    def _free(self) -> Version:
        for version in self._versions:
            if not version.users:
                return version
        self._versions.append(Version(self.newest))
        return self._versions[-1]

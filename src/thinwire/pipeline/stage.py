"""StageRunner: the compute of one stage - forward, backward, update - and nothing of the network.

How a forward and its backward meet:

    live        on the module's own weights: right where no update comes between the two (K_s = 0,
                or the `flush` schedule)
    stash       on a version of the weights that is kept for it, the graph kept too
    recompute   the version and the input are kept, the forward is run again before the backward:
                the memory of one graph instead of K_s + 1, for a third more compute
    newest      (stash=False) only the input is kept; the forward is run again on the newest
                weights, which are not those it was first run on

A forward that is run again draws the same random numbers and sees the same buffers as before; what
it would change in them is thrown away. Otherwise buffers (running means, say) are the module's own.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from thinwire.pipeline.schedule import Schedule
from thinwire.pipeline.weight_versions import Version, WeightVersions
from thinwire.wire.account import Account

Loss = Callable[[Tensor, Tensor], Tensor]
Step = Callable[[], Any]
How = Literal["live", "stash", "recompute", "newest"]


@dataclass
class Held:
    """A micro-batch between its forward and its backward."""

    x: Tensor
    out: Tensor | None = None
    """The output with its graph, or on the last stage the loss; None if it is run again."""
    version: Version | None = None
    buffers: Mapping[str, Tensor] | None = None
    random: "RandomState | None" = None


class RandomState:
    """The random state of the CPU and of one device, to draw the same numbers again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)


def aside(device: torch.device) -> AbstractContextManager[Any]:
    """Random numbers drawn inside leave the global state alone."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


class ClippedStep:
    """What an update does by default: clip by this stage's own norm and step the optimizer. One
    whose gradient is not finite is skipped, and counted."""

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, clip: float, account: Account
    ) -> None:
        if clip < 0:
            raise ValueError(f"clip takes a norm >= 0 (0: none), got {clip!r}")
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._optimizer, self._limit, self._account = optimizer, clip or math.inf, account

    def __call__(self) -> Tensor:
        norm = nn.utils.clip_grad_norm_(self._parameters, self._limit)
        if bool(torch.isfinite(norm)):
            self._optimizer.step()
        else:
            self._account.skipped += 1
        return norm


class StageRunner:
    """Runs the actions of one stage's schedule on its module.

    `loss` is given to the last stage only. `step` is what an update does to the newest weights and
    their gradients, and returns the gradient's norm.
    """

    def __init__(
        self,
        module: nn.Module,
        schedule: Schedule,
        step: Step,
        *,
        loss: Loss | None,
        stash: bool = True,
        recompute: bool = False,
        look_ahead: float = 0.0,
        autocast: torch.dtype | None = None,
    ) -> None:
        if look_ahead < 0 or (look_ahead and not stash):
            raise ValueError(
                f"look_ahead takes a share of the delay >= 0, and the stash, whose copies look "
                f"ahead; got look_ahead={look_ahead!r}, stash={stash!r}"
            )
        if schedule.name == "2bw" and not stash:
            raise ValueError("schedule '2bw' is its two versions; it takes no stash=False")
        self.module, self.schedule, self.step, self.loss = module, schedule, step, loss
        self.how: How = _how(schedule, stash, recompute)
        self.device = next((p.device for p in module.parameters()), torch.device("cpu"))
        self.autocast = autocast
        self.stash: WeightVersions | None = None
        if self.how in ("stash", "recompute"):
            self.stash = WeightVersions(module, look_ahead * schedule.lag)
        self.held: dict[int, Held] = {}
        self._losses: list[Tensor] = []

    def restart(self) -> None:
        """Before the first action of a schedule: nothing is in flight."""
        assert not self.held
        self._losses.clear()
        if self.stash is not None:
            self.stash.restart()

    # -- actions ----------------------------------------------------------------------------------

    def forward(self, micro: int, version: int, x: Tensor, y: Tensor | None = None) -> Tensor:
        """What the next stage gets, detached; on the last stage the loss."""
        held = self.held[micro] = Held(x)
        if self.schedule.stage > 0:
            x.requires_grad_()
        if self.stash is not None:
            held.version = self.stash.acquire(version)
        again = self.how in ("recompute", "newest")
        if again:
            held.random = RandomState(self.device)
            held.buffers = {n: b.clone() for n, b in self.module.named_buffers()}
        with torch.set_grad_enabled(not again):
            out: Tensor = self._call(x, held.version)
            if self.loss is not None:
                assert y is not None
                out = self._loss(out, y)
                self._losses.append(out.detach())
        held.out = None if again else out
        return out.detach()

    def backward(self, micro: int, gradient: Tensor | None) -> Tensor | None:
        """From the gradient of the output, none on the last stage, to that of the input."""
        held = self.held.pop(micro)
        out = self._again(held) if held.out is None else held.out
        if self.loss is not None:
            out = out / self.schedule.accumulate
        torch.autograd.backward(out, gradient)
        if held.version is not None:
            assert self.stash is not None
            self.stash.collect(held.version)
            self.stash.release(held.version)
        return held.x.grad if self.schedule.stage > 0 else None

    def update(self) -> tuple[Tensor | None, Any]:
        """Steps the newest weights: the mean loss of its micro-batches, and what `step` returns.

        The gradients are the caller's to clear."""
        if self.stash is not None and self.schedule.name == "2bw":
            self.stash.keep_newest()
        if self.stash is not None:
            self.stash.before_update()
        result = self.step()
        if self.stash is not None:
            self.stash.updated()
        loss = torch.stack(self._losses).mean() if self._losses else None
        self._losses.clear()
        return loss, result

    # -- without gradients ------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """The output of the newest weights, or with `y` on the last stage its loss."""
        out: Tensor = self._call(x, None)
        if self.loss is not None and y is not None:
            out = self._loss(out, y)
        return out

    @torch.no_grad()
    def rehearse(self, x: Tensor) -> Any:
        """What the module makes of such an input; neither it nor the random state is changed."""
        buffers = {n: b.clone() for n, b in self.module.named_buffers()}
        with aside(self.device):
            return self._call(x, None, buffers)

    # -- helpers ----------------------------------------------------------------------------------

    def _again(self, held: Held) -> Tensor:
        assert held.random is not None
        with aside(self.device), torch.enable_grad():
            held.random.restore()
            out: Tensor = self._call(held.x, held.version, held.buffers)
        return out

    def _call(
        self, x: Tensor, version: Version | None, buffers: Mapping[str, Tensor] | None = None
    ) -> Any:
        with self._cast():
            if version is None and not buffers:
                return self.module(x)
            weights = version.weights if version is not None else {}
            return functional_call(self.module, {**weights, **(buffers or {})}, (x,))

    def _loss(self, out: Tensor, y: Tensor) -> Tensor:
        assert self.loss is not None
        with self._cast():
            return self.loss(out, y)

    def _cast(self) -> AbstractContextManager[Any]:
        # Entered anew for every call: autocast keeps its casts of the weights until it is left.
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)


def _how(schedule: Schedule, stash: bool, recompute: bool) -> How:
    recompute = recompute and schedule.warmup > 0  # else the backward follows at once
    if schedule.name == "flush":
        return "newest" if recompute else "live"  # the same weights
    if schedule.name == "1f1b" and schedule.warmup == 0:
        return "live"
    if not stash:
        return "newest"
    return "recompute" if recompute else "stash"

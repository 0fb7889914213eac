"""SimulatedPipeline: all stages in one process, taking their turns as messages would let them.

The same stages, schedules and codecs as AsyncPipeline, and the same result bit for bit (but for
dropout: here all stages draw from one stream of random numbers). For studying what asynchrony does
to learning, at the speed of the unsplit model and without a network.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.checks import require_items
from thinwire.pipeline.async_pipeline import Batch, Record
from thinwire.pipeline.schedule import Action, Backward, Forward, Name, Update
from thinwire.pipeline.settings import Settings, require_stage
from thinwire.pipeline.sparse_activations import End
from thinwire.pipeline.stage import Loss, StageRunner
from thinwire.wire.account import Account
from thinwire.wire.codecs import Codec, Threshold

Before = Callable[[int, int], None]


class SimulatedPipeline:
    """Takes a list of stages and one of their optimizers; the settings are AsyncPipeline's."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        loss: Loss,
        schedule: Name = "1f1b",
        stash: bool = True,
        recompute: bool = False,
        look_ahead: float = 0.0,
        accumulate: int = 1,
        lead: int = 0,
        codec: Codec | Threshold | None = None,
        gradient_codec: Codec | Threshold | None = None,
        clip: float = 1.0,
        autocast: torch.dtype | None = None,
    ) -> None:
        own = Settings(
            "SimulatedPipeline",
            loss=loss,
            schedule=schedule,
            stash=stash,
            recompute=recompute,
            look_ahead=look_ahead,
            accumulate=accumulate,
            lead=lead,
            codec=codec,
            gradient_codec=gradient_codec,
            clip=clip,
            autocast=autocast,
        )
        self.modules, self.optimizers = _checked_stages(modules, optimizers)
        self.account = Account()
        self._ends = [own.ends() for _ in self.modules]
        self.updates = 0
        steps = [
            own.step(module, optimizer, self.account)
            for module, optimizer in zip(self.modules, self.optimizers, strict=True)
        ]
        self.runners = [
            own.runner(module, step, stage, len(steps))
            for stage, (module, step) in enumerate(zip(self.modules, steps, strict=True))
        ]

    def train(
        self,
        batches: Iterable[Batch],
        updates: int,
        *,
        before: Before = lambda stage, update: None,
    ) -> Iterator[Record]:
        """Makes `updates` updates and drains; gives the last stage's record of each, by when the
        stages before it have not all made that update. `before(stage, update)` is called before
        each of a stage's updates."""
        turns = [self._turns(runner, updates) for runner in self.runners]
        for here, there in itertools.pairwise(turns):
            here.next, there.previous = there, here
        source, first = iter(batches), turns[0]
        while any(turn.action is not None for turn in turns):
            if isinstance(first.action, Forward) and not first.inputs:
                x, y = next(source)
                first.inputs.append(x)
                turns[-1].labels.append(y)
            for stage, turn in enumerate(turns):
                if isinstance(turn.action, Update):
                    before(stage, self.updates + turn.action.update)
                if (done := turn.take()) is not None and turn is turns[-1]:
                    yield done
        self.updates += updates

    def _turns(self, runner: StageRunner, updates: int) -> "_Turns":
        runner.restart()
        optimizer = self.optimizers[runner.schedule.stage]
        actions = runner.schedule.actions(updates)
        ends = self._ends[runner.schedule.stage]
        return _Turns(runner, optimizer, actions, ends, self.updates)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> float:
        """The mean loss of the newest weights, micro-batches weighted by the size of y."""
        total, count = 0.0, 0
        training = [module.training for module in self.modules]
        for module in self.modules:
            module.eval()
        for x, y in batches:
            for runner in self.runners:
                x = runner.evaluate(x, y if runner.loss is not None else None)
            total, count = total + float(x) * y.numel(), count + y.numel()
        for module, was in zip(self.modules, training, strict=True):
            module.train(was)
        return total / count


def _checked_stages(
    modules: Any, optimizers: Any
) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    name = "SimulatedPipeline"
    parts = list(modules) if isinstance(modules, nn.ModuleList | nn.Sequential) else modules
    parts = require_items(name, "modules", parts, "a list of models, one for each stage")
    steppers = require_items(name, "optimizers", optimizers, "a list of optimizers, one a stage")
    if not parts or len(parts) != len(steppers):
        raise ValueError(
            f"{name}(modules=..., optimizers=...) takes one optimizer for each of its stages, got "
            f"{len(parts)} stages with {len(steppers)} optimizers"
        )
    for module, optimizer in zip(parts, steppers, strict=True):
        require_stage(name, module, optimizer, keys="s")
    return parts, steppers


class _Turns:
    """One stage's place in its schedule, and what has arrived for it."""

    def __init__(
        self,
        runner: StageRunner,
        optimizer: torch.optim.Optimizer,
        actions: Iterator[Action],
        ends: list[End],
        updates: int,
    ) -> None:
        self._runner, self._optimizer, self._actions = runner, optimizer, actions
        self._before, self._after = ends
        self._updates = updates
        self.action: Action | None = next(actions, None)
        self.inputs: deque[Tensor] = deque()
        self.labels: deque[Tensor] = deque()
        self.gradients: deque[Tensor] = deque()
        self.next: _Turns | None = None
        self.previous: _Turns | None = None

    def take(self) -> Record | None:
        """Does the next action, if what it needs is here; an update gives a record."""
        action, done = self.action, None
        if isinstance(action, Forward):
            if not self.inputs:
                return None
            self._forward(action)
        elif isinstance(action, Backward):
            if self.next is not None and not self.gradients:
                return None
            self._backward(action)
        elif isinstance(action, Update):
            loss, norm = self._runner.update()
            self._optimizer.zero_grad(set_to_none=True)
            done = Record(self._updates + action.update, loss, norm)
        self.action = next(self._actions, None)
        return done

    def _forward(self, action: Forward) -> None:
        labels = self.labels.popleft() if self.next is None else None
        out = self._runner.forward(action.micro, action.version, self.inputs.popleft(), labels)
        if self.next is not None:
            codecs = self._after.activations, self.next._before.activations
            self.next.inputs.append(travelled(out, *codecs))

    def _backward(self, action: Backward) -> None:
        gradient = self.gradients.popleft() if self.next is not None else None
        passed_on = self._runner.backward(action.micro, gradient)
        if self.previous is not None:
            assert passed_on is not None
            codecs = self._before.gradients, self.previous._after.gradients
            self.previous.gradients.append(travelled(passed_on, *codecs))


def travelled(tensor: Tensor, sender: Codec | None, receiver: Codec | None = None) -> Tensor:
    """What arrives of a tensor that is sent in a codec. One that remembers what has passed is two,
    one at each end."""
    if sender is None:
        return tensor.clone()
    flat: Any = tensor.detach().float().contiguous().view(-1)
    part = sender.part(flat.numel(), 1)
    out = torch.empty_like(flat)
    (receiver or sender).decode(sender.encode(flat, 1, part), part, out)
    return out.to(tensor.dtype).view(tensor.shape)

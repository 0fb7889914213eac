"""AsyncPipeline: a model cut into stages, one rank each, none of which ever waits for a flush.

    w_s <- step(w_s, grad f(version of w_s that the forward used))     after every k micro-batches

Every stage alternates forwards with its newest weights and backwards of the oldest micro-batch in
flight, and steps its own optimizer (see `schedule.py` for the order and `stash.py` for the
versions). Activations go to the next stage and gradients come back as transfers of the wire, in any
codec; both pass behind compute as long as the lead covers the links' delay.

Every stage iterates over the same micro-batches (x, y): the first stage computes on x and the last
one's loss reads y, so no data travel but activations and gradients.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.checks import require_callable, require_count, require_kind, require_seconds
from thinwire.pipeline.channel import Channel, ReceiveQueue, SendQueue, TensorSpec
from thinwire.pipeline.schedule import Backward, Forward, Name
from thinwire.pipeline.settings import Settings, require_stage
from thinwire.pipeline.shape_inference import ShapeInference
from thinwire.pipeline.stage import Loss
from thinwire.wire.account import Account
from thinwire.wire.agreement import require_same
from thinwire.wire.checks import require_group
from thinwire.wire.codecs import Codec, Threshold
from thinwire.wire.flight import Flight
from thinwire.wire.ranks import Group
from thinwire.wire.wire import Wire

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Record:
    """One update of this stage."""

    update: int
    """Counted from 0 since the pipeline was made."""
    loss: Tensor | None
    """Mean over the update's micro-batches, on the last stage; a tensor, so that nothing waits for
    a device until it is read."""
    norm: Any
    """The norm of the stage's gradient before clipping, or what `update=` returned."""

    def __post_init__(self) -> None:
        require_count("Record", "update", self.update, least=0)
        if self.loss is not None:
            require_kind("Record", "loss", self.loss, Tensor, "a tensor or None")


class AsyncPipeline:
    """One stage of a pipeline; every rank of the group makes one and calls the same methods.

    Args:
        module: this stage's part of the model; maps one tensor to one tensor.
        optimizer: over module.parameters(): a torch optimizer, or any of thinwire's methods whose
            group is the stage's replicas (with overlap=False where the method has that: gradients
            of older versions do not pass through the parameters' hooks).
        group: the stages in order, a ProcessGroup or one dimension of a DeviceMesh.
        loss: loss(output, y) -> mean over the micro-batch; used on the last stage.
        schedule: "1f1b" (the default), "2bw" for deep pipelines (delay 1, needs accumulate >= the
            number of stages), "flush" for the synchronous yardstick.
        stash: False keeps no versions: the backward runs at the newest weights. Saves memory, needs
            the settings of `stage_settings` to learn, and costs a second forward.
        recompute: run forwards again instead of keeping their graphs, when memory runs out.
        look_ahead: 1 runs each forward on the weights moved on by as many updates as its gradient
            will be late, at the speed of the last update (0: the newest weights). Use it with
            AsyncNAdam or another optimizer whose steps are smooth, momentum 0.95 and more.
        accumulate: micro-batches per update. More of them make the delay smaller and updates rarer.
        lead: further micro-batches in flight per hop. Raise it when `account.exposed` grows with
            the link's delay (see `lead_for`); each adds an update of delay per hop.
        codec: the form of activations; exact by default. Threshold(...) sends the largest, without
            error feedback, and gradients come back only where activations went (`crossing.py`).
        gradient_codec: the form of the gradients of activations; exact by default. Beside a
            Threshold for the activations it takes a second one, of what may come back.
        clip: largest norm of this stage's gradient; 0 does not clip.
        autocast: a dtype such as torch.bfloat16 to compute in where it is safe.
        update: replaces clipping and optimizer.step(); returns what `Record.norm` holds.
        timeout: as in Wire.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        group: Group = None,
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
        update: Callable[[], Any] | None = None,
        timeout: float | None = None,
    ) -> None:
        own = Settings(
            "AsyncPipeline", loss=loss, schedule=schedule, stash=stash, recompute=recompute,
            look_ahead=look_ahead, accumulate=accumulate, lead=lead, codec=codec,
            gradient_codec=gradient_codec, clip=clip, autocast=autocast,
        )  # fmt: skip
        require_stage("AsyncPipeline", module, optimizer, trains=update is None)
        if update is not None:
            require_callable("AsyncPipeline", "update", update, "update()")
        if timeout is not None:
            timeout = require_seconds("AsyncPipeline", "timeout", timeout)
        require_group("AsyncPipeline", "group", group)
        self.module, self.optimizer = module, optimizer
        self.account = Account()
        """Bytes sent, seconds exposed and hidden, of activations and gradients."""
        step = update or own.step(module, optimizer, self.account)
        self._activations = Wire(group, name="activations", account=self.account, timeout=timeout)
        self._gradients = Wire(group, name="gradients", account=self.account, timeout=timeout)
        self._meeting = Wire(group, name="pipeline", timeout=timeout)  # no part of what it costs
        self.stage, self.stages = self._meeting.rank, self._meeting.size
        self._ends = own.ends()  # before and after this one
        self.runner = own.runner(module, step, self.stage, self.stages)
        self.schedule = self.runner.schedule
        self.updates = 0
        """Updates made so far, the same on all stages between two calls."""
        self._rehearsal = ShapeInference(self._meeting, self.runner)
        self._first = self._wanted = 0  # of the train() that runs: updates before it, and asked for
        self._undrained = False
        require_same(self._meeting, own.common())

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.stages - 1

    # -- training ---------------------------------------------------------------------------------

    def train(
        self,
        batches: Iterable[Batch],
        updates: int,
        *,
        before: Callable[[int], None] = lambda update: None,
    ) -> Iterator[Record]:
        """Makes `updates` updates, giving each as it is made, and drains.

        Takes updates * accumulate micro-batches of one shape, the same on every stage. Once the
        iterator is at its end, all stages have made as many updates and nothing is in flight:
        evaluate, save or change the weights then. Leaving it earlier ends the pipeline. `before` is
        called with the number of each update that is about to be made: set learning rates there.
        """
        self._require_drained()
        updates = require_count("train", "updates", updates, least=0)
        return self._train(iter(batches), updates, before)

    def _train(
        self, batches: Iterator[Batch], updates: int, before: Callable[[int], None]
    ) -> Iterator[Record]:
        self._first, self._wanted = self.updates, updates
        if updates == 0:
            return
        head = _next(batches, 0, updates * self.schedule.accumulate)
        batches = itertools.chain([head], batches)
        lines = self._lines(head)
        self._undrained = True
        self.runner.restart()
        form = TensorSpec.of(head[0])
        for action in self.schedule.actions(lambda: self._wanted):
            total = self._wanted * self.schedule.accumulate
            if isinstance(action, Forward):
                x, y = _next(batches, action.micro, total)
                if TensorSpec.of(x) != form:
                    raise ValueError(
                        f"micro-batch {action.micro} is {TensorSpec.of(x)}, the first was {form}; "
                        "all micro-batches of one train() must have the same shape"
                    )
                self._forward(action, x, y, lines, total)
            elif isinstance(action, Backward):
                self._backward(action, lines)
            else:
                before(self.updates)
                yield self._update()
        lines.drain()
        self._undrained = False

    def end_early(self) -> int:
        """Lets train() end as soon as what is under way allows, and returns the number of updates
        (`updates`) it will then have come to. Call it after the same update on every stage."""
        made = self.updates - self._first
        self._wanted = min(self._wanted, self.schedule.least_end(made))
        return self._first + self._wanted

    def _forward(
        self, action: Forward, x: Tensor, y: Tensor, lines: "StageLinks", total: int
    ) -> None:
        if lines.activations_in is not None:
            ahead = action.micro + 2 + self.schedule.lead  # this one and those it is early for
            while lines.activations_in.posted < min(total, ahead):
                lines.activations_in.post()
            x = lines.activations_in.take()
        else:
            x = x.to(self.runner.device)
        if self.last:
            y = y.to(self.runner.device)
        out = self.runner.forward(action.micro, action.version, x, y)
        if lines.activations_out is not None and lines.gradients_in is not None:
            if TensorSpec.of(out) != lines.form:
                raise ValueError(
                    f"stage {self.stage} made {TensorSpec.of(out)} of micro-batch {action.micro} "
                    f"and {lines.form} of the first; a stage's output must keep its shape"
                )
            lines.activations_out.send(out)
            lines.gradients_in.post()

    def _backward(self, action: Backward, lines: "StageLinks") -> None:
        gradient = lines.gradients_in.take() if lines.gradients_in is not None else None
        passed_on = self.runner.backward(action.micro, gradient)
        if lines.gradients_out is not None:
            if passed_on is None:
                raise ValueError(
                    f"the output of stage {self.stage} does not depend on its input: the stages "
                    "before it cannot learn"
                )
            lines.gradients_out.send(passed_on)

    def _update(self) -> Record:
        loss, norm = self.runner.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.account.tick()
        self.updates += 1
        return Record(self.updates - 1, loss, norm)

    # -- evaluation -------------------------------------------------------------------------------

    def evaluate(
        self,
        batches: Iterable[Batch],
        *,
        weight: Callable[[Tensor], float] = lambda y: float(y.numel()),
    ) -> float:
        """The mean loss of the newest weights over micro-batches of any shape, on all stages.

        `weight` says how much a micro-batch counts, by its y: the number of its targets.
        """
        total = count = 0.0
        was_training = self.module.training
        self.module.eval()
        try:
            for y, out in self._pass(batches, with_loss=True):
                if out is not None:
                    share = weight(y)
                    total, count = total + float(out) * share, count + share
        finally:
            self.module.train(was_training)
        total, count = self._meeting.agree([total, count], "sum")
        return total / count if count else math.nan

    def forward(self, x: Tensor) -> Tensor | None:
        """The model's output for x, on the last stage; None on the others. No gradients.

        The module is run as it is: call `module.eval()` before."""
        ((_, out),) = self._pass([(x, x)], with_loss=False)
        return out

    def outputs(self, batches: Iterable[Batch]) -> Iterator[tuple[Tensor, Tensor | None]]:
        """(y, the model's output for x) for each micro-batch, as `forward` gives it, for measures
        other than the loss. Every stage must iterate to the end."""
        return self._pass(batches, with_loss=False)

    def _pass(
        self, batches: Iterable[Batch], with_loss: bool
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Forwards alone, uncompressed: what is measured is the model, not the codec."""
        self._require_drained()
        wire, device = self._meeting, self.runner.device
        sent: Flight | None = None
        for x, y in batches:
            into, out_of = self._rehearsal.forms(x, y if with_loss else None)
            if into is not None:
                channel = Channel(wire, self.stage - 1, into, device)
                x = channel.land(channel.receive())
            y = y.to(device) if self.last else y
            out = self.runner.evaluate(x.to(device), y if with_loss else None)
            if sent is not None:
                sent.wait()  # the one before: it flew behind this compute
            if out_of is not None:
                sent = Channel(wire, self.stage + 1, out_of, device).send(out)
            yield y, out if self.last else None
        if sent is not None:
            sent.wait()

    # -- helpers ----------------------------------------------------------------------------------

    def _lines(self, head: Batch) -> "StageLinks":
        """Channels to both neighbours for a run of train()."""
        into, out_of = self._rehearsal.forms(*head)
        device, limit = self.runner.device, self.schedule.warmup + 2
        before, after = self.stage - 1, self.stage + 1
        lines = StageLinks(out_of)
        if into is not None:
            end = self._ends[0]
            come = Channel(self._activations, before, into, device, codec=end.activations)
            back = Channel(self._gradients, before, into, device, codec=end.gradients)
            lines.activations_in, lines.gradients_out = ReceiveQueue(come), SendQueue(back, limit)
        if out_of is not None:
            end = self._ends[1]
            go = Channel(self._activations, after, out_of, device, codec=end.activations)
            back = Channel(self._gradients, after, out_of, device, codec=end.gradients)
            lines.activations_out, lines.gradients_in = SendQueue(go, limit), ReceiveQueue(back)
        return lines

    def _require_drained(self) -> None:
        if self._undrained:
            raise RuntimeError(
                "train() was left before its last update, with micro-batches in flight: the stages "
                "no longer match; let it run to its end, or make the pipeline again"
            )

    def close(self) -> None:
        """Leaves the groups; nothing may be in flight."""
        for wire in (self._activations, self._gradients, self._meeting):
            wire.close()


@dataclass
class StageLinks:
    """The channels of one stage; None where there is no neighbour."""

    form: TensorSpec | None
    """Of the stage's output."""
    activations_in: ReceiveQueue | None = None
    activations_out: SendQueue | None = None
    gradients_in: ReceiveQueue | None = None
    gradients_out: SendQueue | None = None

    def drain(self) -> None:
        for outlet in (self.activations_out, self.gradients_out):
            if outlet is not None:
                outlet.drain()


def _next(batches: Iterator[Batch], micro: int, total: int) -> Batch:
    try:
        return next(batches)
    except StopIteration:
        raise ValueError(
            f"batches ended after {micro} micro-batches, and train() was asked for updates that "
            f"take {total}"
        ) from None

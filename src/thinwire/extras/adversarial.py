"""ConcurrentAdversarial: training on perturbed images too, whose making costs the step no wait.

    x*_t     = clip(x_t + eps sign(grad_x L(w_{t-1}; x_t, y_t)))       second BatchNorm set
    loss_t   = L(w_t; x_t, y_t)  +  lam L(w_t; x*_t, y_t)              first set, second set

Large batches end in sharp minima; the perturbed copies smooth them out. An ordinary adversary needs
w_t for x*_t, so that a step takes one pass after the other. Here x*_t comes from the weights before
(ConAdv, arXiv 2106.00221): all the while that step t-1 is under way its weights are known, and so
is the batch after it, so the pass that makes x*_t has nothing to wait for and nothing waits for it.

[Note: when it is made] On CUDA on a stream of its own, from the end of the forward pass. On a CPU
in a thread, from the moment all gradients of the step exist: until then the pass would take the
cores that the step needs, and delay the moment at which the last gradients leave. From then until
the weights change, it is the network's turn: that is the time it hides in.

[Note: what bounds it] The pass reads the weights, so it must end before they change: the optimizer
waits for it at the start of its step, and `GradientAverage`, whose step begins with a wait for the
network, after that. Nothing else depends on when it ran: a batch and weights give one x*.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from thinwire.checks import pair_of_numbers, refusal
from thinwire.extras.dual_batch_norm import plain_batch_norms, second_parameters, second_set
from thinwire.methods.dense.gradient_average import GradientAverage
from thinwire.optim.checks import (
    require_at_least,
    require_bool,
    require_callable,
    require_inner,
    require_model,
    require_positive,
)

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
Bounds = tuple[float, float]


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


class ConcurrentAdversarial:
    """Adds the loss on perturbed inputs; their making overlaps with the steps of `optimizer`.

        model = tw.dual_batch_norm(Net())
        optimizer = tw.GradientAverage(tw.Lars(model.parameters(), lr=2.0))
        adversary = tw.ConcurrentAdversarial(model, optimizer, epsilon=0.1, bounds=(0, 1))
        for x, y in adversary.ahead(loader):
            adversary.loss(x, y).backward()
            optimizer.step(); optimizer.zero_grad()

    The first batch of a loop has no step before it: its perturbation is made on the spot. Between
    `backward()` and the end of `step()` leave the weights and the mode of the model alone, or call
    `wait()` first.

    Args:
        model: its BatchNorms must have two sets (`dual_batch_norm`); a model without any is fine.
            It may be wrapped in DistributedDataParallel.
        optimizer: any torch optimizer over the model's parameters, thinwire's methods included.
        epsilon: how far every value of the input is moved, in its own units. Lower it when the loss
            on clean data stays behind that of a run without.
        weight: lam.
        bounds: (least, largest) value of an input, to which perturbed ones are clipped.
        loss: (model, x, y) -> mean loss; by default the cross-entropy of model(x).
        overlap: False makes every perturbation at the start of the optimizer's step with nothing
            beside it, for the same results. Use it where passes draw random numbers (dropout): two
            at a time draw them in no fixed order.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        epsilon: float,
        weight: float = 1.0,
        bounds: Bounds | None = None,
        loss: Loss = cross_entropy,
        overlap: bool = True,
    ) -> None:
        name = type(self).__name__
        self.epsilon = require_positive(name, "epsilon", epsilon)
        self.weight = require_at_least(name, "weight", weight, 0)
        self.bounds = None if bounds is None else _checked_bounds(name, bounds)
        require_callable(name, "loss", loss, "loss(model, x, y)")
        overlap = require_bool(name, "overlap", overlap)
        _check_model(name, model, optimizer)
        self.model = model
        self.clean = self.perturbed = torch.tensor(float("nan"))
        """The two parts of the latest loss, without a graph."""
        self.exposed = self.hidden = 0.0
        """Seconds that were spent waiting for perturbations, and that their making took beside
        everything else. Not known on CUDA."""
        self._loss = loss
        self._bare = model.module if isinstance(model, DistributedDataParallel) else model
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        device = self._parameters[0].device
        self._beside = _beside(device) if overlap else _Nothing()
        self._announced: deque[_Batch] = deque(maxlen=2)  # this one, if not the first; the next one
        self._due: _Batch | None = None  # to be perturbed before the weights change
        self._absent: set[Tensor] = set()  # parameters whose gradient this pass has not brought yet
        self._restored: Tensor | None = None
        self._autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._gradient_exists)
        _before_weights_change(optimizer, self.wait)

    def ahead(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches, on the model's device, each announced while the one before is trained on."""
        self._announced.clear()
        device = self._parameters[0].device
        moved = ((x.to(device), y.to(device)) for x, y in batches)
        batch = next(moved, None)
        while batch is not None:
            following = next(moved, None)
            if following is not None:
                self.announce(*following)
            yield batch
            batch = following

    def announce(self, x: Tensor, y: Tensor) -> None:
        """Says, before `loss` is called for a batch, what comes after it; `ahead` does it."""
        if not x.is_floating_point():
            raise ValueError(
                f"{type(self).__name__} moves the values of its inputs, which must be floating "
                f"point; got {x.dtype}"
            )
        self._announced.append(_Batch(x, y))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss of a batch as `ahead` gave it, clean and perturbed: for `backward()`."""
        self.wait()
        self._note_autocast(x.device.type)
        loss = self.both(x, self._take(x, y), y)
        if self._announced and self._announced[0].perturbed is None:
            self._due = self._announced[0]
            self._absent = set(self._parameters)
            self._beside.forward_ended(self._make)
        return loss

    def both(self, x: Tensor, perturbed: Tensor, y: Tensor) -> Tensor:
        """The loss on inputs and on a perturbed copy of them, each through its BatchNorm set."""
        clean = self._loss(self.model, x, y)
        with second_set():
            moved = self._loss(self.model, perturbed, y)
        self.clean, self.perturbed = clean.detach(), moved.detach()
        return clean + self.weight * moved

    def perturb(self, x: Tensor, y: Tensor) -> Tensor:
        """A copy of x one bounded step up the loss, with the weights as they are now."""
        x = x.detach().requires_grad_()
        with torch.enable_grad(), second_set(), self._autocast():
            (slope,) = torch.autograd.grad(self._loss(self._bare, x, y), x)
        # A slope that is not finite moves nothing: it must not spoil a batch that may be good.
        moved = x.detach() + self.epsilon * slope.nan_to_num(nan=0.0).sign()
        return moved if self.bounds is None else moved.clamp(*self.bounds)

    def wait(self) -> None:
        """Returns when the perturbation that is due exists; made here and now if nobody has begun.

        The optimizer calls it before it changes the weights.
        """
        if self._due is None:
            return
        start = time.perf_counter()
        taken = self._beside.join(self._make)
        waited = time.perf_counter() - start
        self.exposed += waited
        self.hidden += max(0.0, taken - waited)
        self._due, self._absent = None, set()

    def state_dict(self) -> dict[str, Any]:
        """The perturbation of the batch that comes next, which later weights cannot make again."""
        self.wait()
        made = [batch.perturbed for batch in self._announced if batch.perturbed is not None]
        return {"perturbed": made[0] if made else self._restored}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on with the batch after the one that was trained on last."""
        self.wait()
        self._announced.clear()
        kept = state["perturbed"]
        self._restored = None if kept is None else kept.to(self._parameters[0].device)

    def _take(self, x: Tensor, y: Tensor) -> Tensor:
        """The perturbed copy of a batch: made beside the step before, or now if that was none."""
        restored, self._restored = self._restored, None
        places = [at for at, batch in enumerate(self._announced) if batch.x is x]
        if not places and len(self._announced) == self._announced.maxlen:
            raise ValueError(
                f"{type(self).__name__}.loss was given another batch than was announced for it; "
                "pass on the tensors that ahead() yields"
            )
        made = None
        for _ in range(places[0] + 1 if places else 0):
            made = self._announced.popleft().perturbed
        if made is None and restored is not None and restored.shape == x.shape:
            made = restored
        return self.perturb(x, y) if made is None else made

    def _gradient_exists(self, parameter: Tensor) -> None:
        if parameter in self._absent:
            self._absent.discard(parameter)
            if not self._absent:
                self._beside.backward_ended(self._make)

    def _make(self) -> float:
        """Perturbs the batch that is due; returns the seconds it took."""
        start, batch = time.perf_counter(), self._due
        assert batch is not None
        batch.perturbed = self.perturb(batch.x, batch.y)
        return time.perf_counter() - start

    def _note_autocast(self, device: str) -> None:
        """Which precision the caller has asked for; another thread would not know. Casts of weights
        are not cached, for they belong to the caller's graph."""
        self._autocast = nullcontext
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            self._autocast = lambda: torch.autocast(device, dtype, cache_enabled=False)


class _Batch:
    """A batch that was announced, and its perturbed copy once it is there."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y
        self.perturbed: Tensor | None = None


# What runs beside the step; see [Note: when it is made].


class _Nothing:
    """All is done when it is asked for."""

    def forward_ended(self, make: Callable[[], float]) -> None: ...

    def backward_ended(self, make: Callable[[], float]) -> None: ...

    def join(self, make: Callable[[], float]) -> float:
        make()
        return 0.0


class _Thread(_Nothing):
    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "perturbation")
        self._future: Future[float] | None = None

    def backward_ended(self, make: Callable[[], float]) -> None:
        self._future = self._pool.submit(make)

    def join(self, make: Callable[[], float]) -> float:
        future, self._future = self._future, None
        return super().join(make) if future is None else future.result()


class _Stream(_Nothing):
    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._begun = False

    def forward_ended(self, make: Callable[[], float]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            make()
        self._begun = True

    def join(self, make: Callable[[], float]) -> float:
        """The device waits, not this thread. The allocator need not know of the two streams: what
        one of them allocates the other is done with before `join` returns control to the first."""
        if not self._begun:
            return super().join(make)
        self._begun = False
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return 0.0


def _beside(device: torch.device) -> _Nothing:
    if device.type == "cuda":
        return _Stream(device)
    return _Thread() if device.type == "cpu" else _Nothing()


def _before_weights_change(optimizer: torch.optim.Optimizer, action: Callable[[], None]) -> None:
    """See [Note: what bounds it]."""
    if isinstance(optimizer, GradientAverage):
        optimizer.inner.register_step_pre_hook(lambda *_: action())
        optimizer.register_step_post_hook(lambda *_: action())  # a step that was skipped
    else:
        optimizer.register_step_pre_hook(lambda *_: action())


def _checked_bounds(name: str, bounds: object) -> Bounds:
    pair = pair_of_numbers(bounds)
    if pair is None or not pair[0] < pair[1]:
        raise refusal(name, "bounds", "(least, largest), two numbers, or None", bounds)
    return pair


def _check_model(name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    require_model(name, "model", model)
    require_inner(name, optimizer, "optimizer")
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(f"{name}(model=...): no parameter of the model is trained")
    single = plain_batch_norms(model)
    if single:
        raise ValueError(
            f"{name}: {single[0]} has one set of BatchNorm for clean and perturbed inputs; call "
            "dual_batch_norm(model) before the optimizer is built"
        )
    trained = {p for group in optimizer.param_groups for p in group["params"]}
    if not any(parameter in trained for parameter in model.parameters()):
        raise ValueError(
            f"{name}(optimizer=...) trains no parameter of the model; build it over "
            "model.parameters()"
        )
    second = set(second_parameters(model))
    for key, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"{name}: {key} is sharded, and a pass beside the step would gather it out of turn;"
                " keep the model whole on each rank"
            )
        if key in second and parameter not in trained:
            raise ValueError(
                f"{name}: the optimizer does not train {key}; call dual_batch_norm(model) before "
                "the optimizer is built"
            )

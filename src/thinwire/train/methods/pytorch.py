"""PyTorch's own ways to send less, as methods of the trainer: what ours are compared with.

Each is PyTorch's code as it stands; what is added here counts its bytes and waits, lets a lost peer
be named, and keeps its state in checkpoints.
"""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from thinwire.errors import UsageError
from thinwire.train.methods.dense import DdpSettings, check_ddp, naming_lost_peers
from thinwire.train.methods.method import Method
from thinwire.train.methods.replica import Replica, SeparateReplica, State
from thinwire.wire.account import Account
from thinwire.wire.collectives import all_reduce_bytes
from thinwire.wire.ddp import Hook, HookMeter
from thinwire.wire.ranks import Group
from thinwire.wire.wire import Wire

_ONE_BUCKET = 1 << 20  # MB: more than any model has


@dataclass
class Fp16Settings(DdpSettings):
    """DistributedDataParallel with PyTorch's fp16 hook."""


@dataclass
class PowerSgdSettings:
    """DistributedDataParallel with PyTorch's PowerSGD hook."""

    rank: int = 4
    """Rank of the matrices that stand for a gradient. Raise it when the loss falls behind ddp's."""
    dense_steps: int = 10
    """Steps with dense gradients before that, 2 or more. PyTorch suggests a tenth of the run."""
    min_compression: float = 2.0
    """Tensors that would shrink by less are sent whole."""


@dataclass
class PostLocalSettings:
    """PyTorch's PostLocalSGDOptimizer."""

    every: int = 8
    """Steps between two averages of the weights, each of which is waited for."""
    dense_steps: int = 0
    """Steps with data parallelism before the first one."""


class HookedReplica(Replica):
    """DDP with one of PyTorch's communication hooks."""

    replicated = True

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(module, optimizer)
        self._wire = Wire(name="ddp", account=self.account)

    def hook(
        self, hook: Hook, state: Any, sent: Callable[[dist.GradBucket], int], bucket_mb: float
    ) -> None:
        ddp = DistributedDataParallel(
            self.model, process_group=self._wire.group, bucket_cap_mb=bucket_mb
        )
        HookMeter(ddp, self._wire, hook, state, sent)
        self.module = ddp

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self._wire.group

    def accumulating(self, last: bool) -> Any:
        return naming_lost_peers(self.module, self._wire, last)


class PowerSgdReplica(HookedReplica):
    """[Note: one bucket] The hook starts the collectives of its second and third phase from the
    callback of the one before. With several buckets their order differs between ranks, and gloo
    aborts the process. With one bucket there is only one order."""

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, settings: PowerSgdSettings
    ) -> None:
        super().__init__(module, optimizer)
        self._state: powerSGD_hook.PowerSGDState | None = None
        self._counted = 0  # values sent, by the hook's own statistics
        if self.group is not None:
            self._state = powerSGD_hook.PowerSGDState(
                self.group,
                matrix_approximation_rank=settings.rank,
                # The trainer primes DDP with one backward pass, which the hook counts.
                start_powerSGD_iter=settings.dense_steps + 1,
                min_compression_rate=settings.min_compression,
                orthogonalization_epsilon=1e-8,
            )
            self.hook(powerSGD_hook.powerSGD_hook, self._state, self._sent, _ONE_BUCKET)

    def _sent(self, bucket: dist.GradBucket) -> int:
        assert self._state is not None
        values = self._state.total_numel_after_compression - self._counted
        self._counted += values
        buffer = bucket.buffer()
        return int(values * buffer.element_size() if values else buffer.nbytes)

    def state(self) -> tuple[State, State]:
        shared, private = super().state()
        if self._state is not None:
            kept = {name: dict(getattr(self._state, name)) for name in _POWER_SGD_TENSORS}
            private = {"power_sgd": kept, "power_sgd_steps": self._state.iter}
        return shared, private

    def load_state(self, shared: State, private: State, *, same_replicas: bool) -> None:
        super().load_state(shared, private, same_replicas=same_replicas)
        if self._state is None or "power_sgd" not in private:
            return
        self._state.iter = private["power_sgd_steps"]
        for name, tensors in private["power_sgd"].items():
            # The error is this rank's own; what was learnt of the gradients' shape is everybody's.
            if same_replicas or name != "error_dict":
                setattr(self._state, name, {int(k): t.clone() for k, t in tensors.items()})


_POWER_SGD_TENSORS = ("error_dict", "p_memory_dict", "q_memory_dict")


class MeteredAverager(PeriodicModelAverager):
    """Counts the averages, which block, in an account."""

    def __init__(self, period: int, warmup_steps: int, wire: Wire, account: Account) -> None:
        super().__init__(period, warmup_steps, process_group=wire.group)
        self._wire, self._account = wire, account

    def average_parameters(self, params: Iterable[Any]) -> None:
        groups = list(params)
        due = self.step >= self.warmup_steps
        due = due and (self.step - self.warmup_steps) % self.period == 0
        began = time.perf_counter()
        try:
            super().average_parameters(groups)
        except RuntimeError as error:
            lost = self._wire.explain(error)
            if lost is None:
                raise
            raise lost from error
        if due:
            taken = time.perf_counter() - began
            nbytes = sum(p.nbytes for g in groups for p in g["params"] if p.grad is not None)
            self._account.launched()
            self._account.sent(all_reduce_bytes(nbytes, self._wire.size))
            self._account.landed(flown=taken, waited=taken, lag=0, launched=began)


class PostLocalReplica(SeparateReplica):
    def __init__(
        self,
        module: nn.Module,
        inner: torch.optim.Optimizer,
        settings: PostLocalSettings,
        group: Group,
    ) -> None:
        super().__init__(module, inner, group)
        self._wire = Wire(group, name="post-local-sgd", account=self.account)
        self._hook_state: PostLocalSGDState | None = None
        if self._wire.group is None:
            return
        averager = MeteredAverager(settings.every, settings.dense_steps, self._wire, self.account)
        # Here, for the import compiles sixty functions that nobody else needs.
        from torch.distributed.optim import PostLocalSGDOptimizer

        self.optimizer = PostLocalSGDOptimizer(inner, averager)
        if settings.dense_steps:
            self._average_gradients_first(settings.dense_steps)

    def _average_gradients_first(self, steps: int) -> None:
        ddp = DistributedDataParallel(self.model, process_group=self._wire.group)
        state = PostLocalSGDState(
            self._wire.group, None, steps + 1, post_local_gradient_allreduce=False
        )
        dense = [True]

        def hook(state: PostLocalSGDState, bucket: dist.GradBucket) -> Any:
            dense[0] = state.iter < state.start_localSGD_iter
            return post_localSGD_hook(state, bucket)

        def sent(bucket: dist.GradBucket) -> int:
            return int(bucket.buffer().nbytes) if dense[0] else 0

        HookMeter(ddp, self._wire, hook, state, sent)
        self.module, self._hook_state = ddp, state

    def accumulating(self, last: bool) -> Any:
        return naming_lost_peers(self.module, self._wire, last)

    def step(self, clip: float) -> float:
        norm = self._clip(clip)
        if not math.isfinite(norm):
            # The others count on this replica at the next average: it takes part with no gradient.
            self.account.skipped += 1
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()
        self.optimizer.step()
        self.account.tick()
        return norm

    def state(self) -> tuple[State, State]:
        shared, private = super().state()
        if self._hook_state is not None:
            private["hook_steps"] = self._hook_state.iter
        return shared, private

    def load_state(self, shared: State, private: State, *, same_replicas: bool) -> None:
        super().load_state(shared, private, same_replicas=same_replicas)
        if self._hook_state is not None:
            self._hook_state.iter = private["hook_steps"]


def _fp16(
    module: nn.Module, inner: torch.optim.Optimizer, settings: Fp16Settings, group: Group
) -> Replica:
    replica = HookedReplica(module, inner)
    if replica.group is not None:
        replica.hook(
            default_hooks.fp16_compress_hook,
            replica.group,
            lambda bucket: 2 * bucket.buffer().numel(),
            settings.bucket_mb,
        )
    return replica


def _power_sgd(
    module: nn.Module, inner: torch.optim.Optimizer, settings: PowerSgdSettings, group: Group
) -> Replica:
    return PowerSgdReplica(module, inner, settings)


def _post_local(
    module: nn.Module, inner: torch.optim.Optimizer, settings: PostLocalSettings, group: Group
) -> Replica:
    return PostLocalReplica(module, inner, settings, group)


def _check_power_sgd(settings: PowerSgdSettings) -> None:
    if settings.rank < 1:
        raise UsageError(f"--rank takes a number >= 1, got {settings.rank}")
    if settings.dense_steps < 2:
        raise UsageError(
            f"--dense-steps takes a number >= 2 with powersgd, got {settings.dense_steps}: DDP "
            "builds its bucket anew after the first step"
        )
    if settings.min_compression <= 0:
        raise UsageError(f"--min-compression takes a number > 0, got {settings.min_compression}")


def _check_post_local(settings: PostLocalSettings) -> None:
    if settings.every < 2:
        raise UsageError(f"--every takes a number of steps >= 2, got {settings.every}")
    if settings.dense_steps < 0:
        raise UsageError(f"--dense-steps takes a number >= 0, got {settings.dense_steps}")


PEER_METHODS = (
    Method(
        "ddp-fp16",
        "PyTorch's data parallelism with its fp16 hook",
        Fp16Settings,
        _fp16,
        check_ddp,
        shardable=False,
        stageable=False,
    ),
    Method(
        "powersgd",
        "PyTorch's data parallelism with its PowerSGD hook",
        PowerSgdSettings,
        _power_sgd,
        _check_power_sgd,
        shardable=False,
        stageable=False,
    ),
    Method(
        "post-local-sgd",
        "PyTorch's PostLocalSGDOptimizer",
        PostLocalSettings,
        _post_local,
        _check_post_local,
        shardable=False,
        stageable=False,
    ),
)

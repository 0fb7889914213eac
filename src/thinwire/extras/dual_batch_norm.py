"""Two sets of BatchNorm: one for the data, one for perturbed copies of it.

Perturbed images have other means and variances than clean ones; one set of gains, biases and
running statistics for both would fit neither. `dual_batch_norm(model)` gives every BatchNorm a
second set, which is in use inside `with second_set():` and nowhere else. The first set keeps its
names, so that a state dict of the model still fits, and evaluation uses it without being told.

The second set normalises by the batch at hand and keeps no running statistics: nothing is ever
evaluated with them, and a pass that only looks for a gradient leaves no trace.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from thinwire.optim.checks import require_model

SECOND = "second"  # the name under which a BatchNorm holds its second set

AnyModule = TypeVar("AnyModule", bound=nn.Module)
_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_here = threading.local()  # a thread that builds a perturbation must not switch the trainer's


@contextmanager
def second_set() -> Iterator[None]:
    """Inside, this thread's passes go through the second set."""
    before = _in_use()
    _here.second = True
    try:
        yield
    finally:
        _here.second = before


def _in_use() -> bool:
    return getattr(_here, "second", False)


class DualBatchNorm(_BatchNorm):
    """A BatchNorm with a second set; made by `dual_batch_norm`."""

    def __init__(self, first: _BatchNorm) -> None:
        settings = first.num_features, first.eps, first.momentum
        super().__init__(*settings, False, first.track_running_stats)
        self.affine, self.weight, self.bias = first.affine, first.weight, first.bias
        for name, buffer in first.named_buffers(recurse=False):
            setattr(self, name, buffer)
        kind = next(kind for kind in _KINDS if isinstance(first, kind))
        self.second = kind(*settings, first.affine, track_running_stats=False)
        if first.affine:
            self.second.to(first.weight.device, first.weight.dtype)
            self.second.load_state_dict(dict(first.named_parameters(recurse=False)))
        self.train(first.training)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(x) if _in_use() else super().forward(x)
        return result

    def _check_input_dim(self, x: Tensor) -> None:
        self.second._check_input_dim(x)


def dual_batch_norm(model: AnyModule) -> AnyModule:
    """Gives every BatchNorm in `model` a second set, in place, and returns the model.

    Call it before the optimizer is built: the second gains and biases are trained like all others.
    They start as a copy of the first.
    """
    require_model("dual_batch_norm", "model", model)
    if isinstance(model, _BatchNorm):
        raise ValueError(
            "dual_batch_norm(model=...) changes the BatchNorms inside a model, and was given one "
            "by itself; put it into an nn.Sequential"
        )
    made: dict[_BatchNorm, DualBatchNorm] = {}  # one that is used in two places stays one
    for parent in list(model.modules()):
        if isinstance(parent, DualBatchNorm):
            continue
        for name, child in parent.named_children():
            if isinstance(child, _BatchNorm) and not isinstance(child, DualBatchNorm):
                _refuse(child, name)
                if child not in made:
                    made[child] = DualBatchNorm(child)
                setattr(parent, name, made[child])
    return model


def plain_batch_norms(model: nn.Module) -> list[str]:
    """Names of the BatchNorms that have one set only."""
    duals = {m.second for m in model.modules() if isinstance(m, DualBatchNorm)}
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        and not isinstance(module, DualBatchNorm)
        and module not in duals
    ]


def second_parameters(model: nn.Module) -> list[str]:
    """Names of everything that belongs to second sets: what evaluation has no use for."""
    return [
        f"{name}.{SECOND}.{inner}" if name else f"{SECOND}.{inner}"
        for name, module in model.named_modules()
        if isinstance(module, DualBatchNorm)
        for inner in module.second.state_dict()
    ]


def _refuse(module: nn.Module, name: str) -> None:
    if isinstance(module, nn.SyncBatchNorm):
        raise ValueError(
            f"dual_batch_norm(model=...): {name} is a SyncBatchNorm, which waits for its peers in "
            "every pass; a pass beside the step would meet the wrong one: use BatchNorm"
        )
    if isinstance(module, _LazyNormBase):
        raise ValueError(
            f"dual_batch_norm(model=...): {name} does not know its size yet; run the model once "
            "before"
        )
    if not isinstance(module, _KINDS):
        raise ValueError(
            f"dual_batch_norm(model=...): {name} is a {type(module).__name__}; it takes "
            "BatchNorm1d, BatchNorm2d and BatchNorm3d"
        )

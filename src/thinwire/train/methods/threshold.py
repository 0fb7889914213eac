"""Dynamic thresholds for the trainer: its flags, and the optimizer these describe."""

from dataclasses import dataclass

import torch
from torch import nn

from thinwire.errors import UsageError
from thinwire.methods.dense.gradient_average import GradientAverage
from thinwire.train.flags import by_flag
from thinwire.train.methods.method import Method
from thinwire.train.methods.replica import Replica, WireReplica
from thinwire.wire.codecs import Threshold
from thinwire.wire.ranks import Group


@dataclass
class DctSettings:
    """Gradients above a threshold, the rest later."""

    density: float = 0.01
    """Share of the gradients that is sent at most. Raise it when the loss falls behind that of
    --method average."""
    refresh: int = 1000
    """Steps between two searches for the thresholds, after the first ones at 1, 2, 4, ..."""
    value_bits: int = 4
    """Bits of a value: 1, 2, 4, 8, 16 or 32."""
    correction: float = 0.9
    """Momentum of the gradients that wait (deep gradient compression), in place of the
    optimizer's own; 0 is none."""
    bucket_mb: float = 0.0
    """Size of the buckets in MB of float32; 0 makes about four. Raise it on links with a long
    delay."""


def _codec(settings: DctSettings) -> Threshold:
    try:
        return Threshold(
            settings.density,
            settings.refresh,
            value_bits=settings.value_bits,
            momentum=settings.correction,
        )
    except ValueError as error:
        raise by_flag(error, momentum="correction") from None


def check_dct(settings: DctSettings) -> None:
    _codec(settings)
    if settings.bucket_mb < 0:
        raise UsageError(f"--bucket-mb takes a number >= 0, got {settings.bucket_mb}")


def build_dct(
    module: nn.Module, inner: torch.optim.Optimizer, settings: DctSettings, group: Group
) -> Replica:
    _require_fit(inner, settings)
    optimizer = GradientAverage(
        inner, codec=_codec(settings), bucket_mb=settings.bucket_mb or None, group=group
    )
    return WireReplica(module, optimizer)


def _require_fit(inner: torch.optim.Optimizer, settings: DctSettings) -> None:
    """Adam divides by the size of what arrives, and what has waited arrives large."""
    if isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
        raise UsageError(
            f"--optimizer {type(inner).__name__}: dct learns badly under Adam, whose steps shrink "
            "when gradients arrive rarely and large; use --optimizer SGD --lr 0.3, or --method "
            "sparseloco, or --method average --codec threshold to have it all the same"
        )
    if settings.correction and any(group.get("momentum") for group in inner.param_groups):
        raise UsageError(
            f"--correction {settings.correction} is the momentum of dct: leave the optimizer's own "
            "out, or take --correction 0"
        )


THRESHOLD_METHODS = (
    Method(
        "dct",
        "gradients above a threshold, with error feedback (SGD)",
        DctSettings,
        build_dct,
        check_dct,
    ),
)

"""Names of codecs, as flags and configuration files spell them: `int8`, `int4+ef`."""

from collections.abc import Callable

import torch

from thinwire.checks import require_text
from thinwire.errors import UsageError
from thinwire.wire.codecs.base import Codec
from thinwire.wire.codecs.dense import Dense
from thinwire.wire.codecs.error_feedback import ErrorFeedback
from thinwire.wire.codecs.feedback import Feedback
from thinwire.wire.codecs.one_bit import OneBit
from thinwire.wire.codecs.quantize import Int4, Int8
from thinwire.wire.codecs.threshold import Threshold
from thinwire.wire.codecs.top_k import TopK

NAMES: dict[str, Callable[[], Codec | Feedback]] = {
    "fp32": Dense,
    "bf16": lambda: Dense(torch.bfloat16),
    "fp16": lambda: Dense(torch.float16),
    "int8": Int8,
    "int4": Int4,
    "onebit": OneBit,
    "topk": TopK,
    "threshold": Threshold,
}


def parse(name: str) -> Codec | Feedback:
    """`NAME`, `NAME+ef` with error feedback, or `threshold:DENSITY`; a fresh one at every call."""
    base, plus, suffix = require_text("codecs.parse", "name", name).partition("+")
    kind, colon, density = base.partition(":")
    if kind == "threshold" and not plus:
        return _threshold(density) if colon else Threshold()
    if base not in NAMES or (plus and suffix != "ef") or kind == "threshold":
        raise UsageError(
            f"unknown codec {name!r}: the name takes one of {', '.join(NAMES)}, "
            "each also with error feedback as in int4+ef; threshold has it built in, and takes "
            "the share of the values to send as in threshold:0.01"
        )
    codec = NAMES[base]()
    return ErrorFeedback(codec) if plus and isinstance(codec, Codec) else codec


def _threshold(density: str) -> Threshold:
    try:
        return Threshold(float(density))
    except ValueError:
        raise UsageError(
            f"codec threshold:{density} takes a share in (0, 1], as in threshold:0.01"
        ) from None

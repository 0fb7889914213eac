"""Names of codecs, as flags and configuration files spell them: `int8`, `int4+ef`."""

from collections.abc import Callable

import torch

from thinwire.errors import UsageError
from thinwire.wire.codecs.base import Codec
from thinwire.wire.codecs.dense import Dense
from thinwire.wire.codecs.error_feedback import ErrorFeedback
from thinwire.wire.codecs.one_bit import OneBit
from thinwire.wire.codecs.quantize import Int4, Int8

NAMES: dict[str, Callable[[], Codec]] = {
    "fp32": Dense,
    "bf16": lambda: Dense(torch.bfloat16),
    "fp16": lambda: Dense(torch.float16),
    "int8": Int8,
    "int4": Int4,
    "onebit": OneBit,
}


def parse(name: str) -> Codec | ErrorFeedback:
    """`NAME` or `NAME+ef`, the latter with error feedback; a fresh one at every call."""
    base, plus, suffix = name.partition("+")
    if base not in NAMES or (plus and suffix != "ef"):
        raise UsageError(
            f"unknown codec {name!r}: takes one of {', '.join(NAMES)}, "
            "each also with error feedback as in int4+ef"
        )
    codec = NAMES[base]()
    return ErrorFeedback(codec) if plus else codec

"""Codecs: in which form values travel. `parse` makes one from a name on the command line."""

from thinwire.wire.codecs.base import Codec
from thinwire.wire.codecs.dense import Dense
from thinwire.wire.codecs.error_feedback import ErrorFeedback
from thinwire.wire.codecs.feedback import Feedback
from thinwire.wire.codecs.names import NAMES, parse
from thinwire.wire.codecs.one_bit import OneBit
from thinwire.wire.codecs.quantize import Int4, Int8
from thinwire.wire.codecs.threshold import Threshold
from thinwire.wire.codecs.top_k import TopK

__all__ = [
    "NAMES",
    "Codec",
    "Dense",
    "ErrorFeedback",
    "Feedback",
    "Int4",
    "Int8",
    "OneBit",
    "Threshold",
    "TopK",
    "parse",
]

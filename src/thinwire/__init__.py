"""thinwire: train PyTorch models across machines joined by slow networks.

The names below are the library. They are imported on first use, so that `thinwire --help` and the
lab, which need no torch, start at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.optim import GradientAverage, WireOptimizer
    from thinwire.wire import Account, Flight, Wire, World, codecs, init, shutdown

__version__ = "0.1.0"

_HOME = {
    "Account": "thinwire.wire",
    "Flight": "thinwire.wire",
    "GradientAverage": "thinwire.optim",
    "Wire": "thinwire.wire",
    "WireOptimizer": "thinwire.optim",
    "World": "thinwire.wire",
    "codecs": "thinwire.wire",
    "init": "thinwire.wire",
    "shutdown": "thinwire.wire",
}

__all__ = [
    "Account",
    "Flight",
    "GradientAverage",
    "Wire",
    "WireOptimizer",
    "World",
    "codecs",
    "init",
    "shutdown",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'thinwire' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

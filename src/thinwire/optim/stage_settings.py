"""StageSettings: the keyword arguments that the one-bit methods have in common, written once.

A method takes them as `**stages: Unpack[StageSettings]`, which type checkers and editors spell out;
`@spelled_out` does the same for help() and inspect.signature().
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, TypedDict, TypeVar

if TYPE_CHECKING:
    from thinwire.wire.codecs import Codec
    from thinwire.wire.wire import Group

Init = TypeVar("Init", bound=Callable[..., None])


class CommonStageSettings(TypedDict, total=False):
    """See `OneBitAdam`, which explains them; `OneBitOptimizer` has the defaults."""

    freeze_at: int | None
    floor: float
    clip: float | None
    dense: Codec | None
    bucket_mb: float | None
    overlap: bool
    group: Group


class StageSettings(CommonStageSettings, total=False):
    """Those of the methods in which replicas take the same steps throughout."""

    inside: Group
    shard_state: bool
    late: bool


def spelled_out(base: type, settings: type) -> Callable[[Init], Init]:
    """For an `__init__` that hands its **stages, of this TypedDict, on to the base's."""
    known = inspect.signature(base).parameters

    def decorate(init: Init) -> Init:
        own = inspect.signature(init)
        given = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        more = [known[name] for name in settings.__annotations__]
        init.__signature__ = own.replace(parameters=[*given, *more])  # type: ignore[attr-defined]
        return init

    return decorate

"""A method's flags are its constructor's arguments: the same names, the same defaults.

`OTHER` lists the flags that are not, each with the reason; a new difference fails here.
"""

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

import thinwire as tw
from thinwire.train.methods import gossip, local, onebit, sparse

METHODS: dict[str, tuple[Any, Any]] = {
    **{name: (settings, kind) for name, (_, settings, kind) in local.PRESETS.items()},
    **{name: (settings, kind) for name, (_, settings, kind) in gossip.KINDS.items()},
    "one-bit-adam": (onebit.OneBitAdamSettings, tw.OneBitAdam),
    "one-bit-lamb": (onebit.OneBitLambSettings, tw.OneBitLamb),
    "zero-one-adam": (onebit.ZeroOneAdamSettings, tw.ZeroOneAdam),
    "sparse-average": (sparse.SparseSettings, tw.SparseAverage),
}
NONE = {  # how a flag says None
    "codec": ("fp32",),
    "bucket_mb": (0.0,),
    "freeze_at": (0,),
    "dense": ("auto",),  # which the trainer resolves to int8 or bf16
}
OTHER = {
    ("co2", "outer_clip"): "clip= ; --clip is the gradient's",
    ("streaming-diloco", "fragment_delay"): "delay= ; --delay is the links'",
    ("sparse-average", "averaging_delay"): "delay= ; --delay is the links'",
    ("sparseloco", "decay"): "of ErrorFeedback, which codec= takes",
    ("one-bit-lamb", "min_coefficient"): "coefficient=(min, max)",
    ("one-bit-lamb", "max_coefficient"): "coefficient=(min, max)",
    ("streaming-diloco", "codec"): "None is Int4() there",
    ("sparseloco", "codec"): "None is TopK with error feedback there",
}


def differences(name: str) -> Iterator[str]:
    settings, kind = METHODS[name]
    arguments = inspect.signature(kind).parameters
    for field in dataclasses.fields(settings):
        if (name, field.name) in OTHER:
            continue
        if field.name not in arguments:
            yield f"--{field.name} is no argument"
            continue
        default = arguments[field.name].default
        same = str(field.default) == str(default)  # --every takes a number or auto: it is text
        if not same and not (default is None and field.default in NONE.get(field.name, ())):
            yield f"--{field.name} is {field.default!r} by default, the argument {default!r}"


@pytest.mark.parametrize("name", METHODS)
def test_flags_are_arguments(name: str) -> None:
    assert list(differences(name)) == []


def test_what_differs_is_still_there() -> None:
    for name, flag in OTHER:
        assert flag in {field.name for field in dataclasses.fields(METHODS[name][0])}


@pytest.mark.parametrize("name", METHODS)
def test_every_argument_is_documented(name: str) -> None:
    """In the class's own words, or by the class that its text points to."""
    kind = METHODS[name][1]
    text = (kind.__doc__ or "") + (tw.LocalUpdates.__doc__ or "") + (tw.OneBitAdam.__doc__ or "")
    text += (tw.DecentLaM.__doc__ or "") + (tw.Lamb.__doc__ or "")
    missing = [key for key in inspect.signature(kind).parameters if key not in text]
    assert missing == []

"""Agreement: checks that all ranks were given the same thing, before anything depends on it."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import UsageError
from thinwire.text import printable
from thinwire.wire.wire import Wire

_ABSENT = "not set"  # no JSON text
_SHOWN = 2000  # characters of a setting


def require_same(wire: Wire, settings: Mapping[str, Any]) -> None:
    """Refuses settings that differ between ranks, naming the first that does."""
    text = json.dumps(_flat(settings), sort_keys=True)
    digests = wire.gather_bytes(hashlib.sha256(text.encode()).digest())
    if len(set(digests)) == 1:
        return
    texts = wire.gather_bytes(text.encode())
    everyone = [_settings_of(wire.ranks[i], given) for i, given in enumerate(texts)]
    for name in sorted(set().union(*everyone)):
        values = [given.get(name, _ABSENT) for given in everyone]
        if len(set(values)) > 1:
            groups = "; ".join(f"{_shown(v)} on {_ranks(wire, r)}" for v, r in _by_value(values))
            raise UsageError(f"setting {name!r} differs between ranks: {groups}")
    raise UsageError("the settings differ between ranks, but not in what was sent of them")


def _settings_of(rank: int, text: bytes) -> dict[str, str]:
    """What a peer says its settings are."""
    try:
        given = json.loads(text)
        return {str(name): str(value) for name, value in given.items()}
    except (AttributeError, RecursionError, ValueError) as error:
        raise UsageError(f"the settings that rank {rank} sent cannot be read: {error}") from None


def require_same_values(wire: Wire, tensors: Iterable[Tensor], what: str) -> None:
    """Refuses tensors that differ between ranks (weights at the start, say), naming the ranks."""
    digests = wire.gather_bytes(digest(tensors))
    values = [d.hex()[:12] for d in digests]
    if len(set(values)) > 1:
        groups = "; ".join(f"{v} on {_ranks(wire, r)}" for v, r in _by_value(values))
        raise UsageError(
            f"{what} differ between ranks (digest {groups}); build them from the same seed, or "
            "load the same checkpoint, on every rank"
        )


def digest(tensors: Iterable[Tensor]) -> bytes:
    """A hash of the tensors' bits, computed where they are and finished on the host."""
    state = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().contiguous().view(-1)
        if flat.numel():
            state.update(flat.view(torch.uint8).cpu().numpy().tobytes())
    return state.digest()


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Every setting as JSON text under its dotted name; equal texts are equal settings."""
    flat: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = json.dumps(value, sort_keys=True, default=_plain)
    return flat


def _plain(value: Any) -> Any:
    """What JSON does not know: sets in one order, whatever else as its own text."""
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)


def _shown(value: str) -> str:
    text = printable(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"


def _by_value(values: list[str]) -> list[tuple[str, list[int]]]:
    groups: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    return list(groups.items())


def _ranks(wire: Wire, members: list[int]) -> str:
    ranks = [wire.ranks[member] for member in members]  # as the launcher counts them
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))

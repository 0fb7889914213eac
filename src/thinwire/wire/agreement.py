"""Agreement: checks that all ranks were given the same thing, before anything depends on it."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import UsageError
from thinwire.wire.wire import Wire

_ABSENT = "(not set)"


def require_same(wire: Wire, settings: Mapping[str, Any]) -> None:
    """Refuses settings that differ between ranks, naming the first that does."""
    text = json.dumps(_flat(settings), sort_keys=True, default=str)
    digests = wire.gather_bytes(hashlib.sha256(text.encode()).digest())
    if len(set(digests)) == 1:
        return
    everyone = [json.loads(t) for t in wire.gather_bytes(text.encode())]
    names = sorted(set().union(*everyone))
    for name in names:
        values = [given.get(name, _ABSENT) for given in everyone]
        if any(value != values[0] for value in values):
            groups = "; ".join(f"{json.dumps(v)} on {_ranks(r)}" for v, r in _by_value(values))
            raise UsageError(f"setting {name!r} differs between ranks: {groups}")


def require_same_values(wire: Wire, tensors: Iterable[Tensor], what: str) -> None:
    """Refuses tensors that differ between ranks (weights at the start, say), naming the ranks."""
    digests = wire.gather_bytes(digest(tensors))
    values = [d.hex()[:12] for d in digests]
    if len(set(values)) > 1:
        groups = "; ".join(f"{v} on {_ranks(r)}" for v, r in _by_value(values))
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


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _by_value(values: list[Any]) -> list[tuple[Any, list[int]]]:
    groups: dict[str, tuple[Any, list[int]]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(json.dumps(value), (value, []))[1].append(rank)
    return list(groups.values())


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))

"""Nested training state as a flat table of tensors.

One of them, the document, is JSON as bytes: it keeps the nesting and every leaf that is no tensor.
Its containers are objects of one key, so a leaf is never mistaken for one:

    {"dict": [[key, node], ...]}   {"list": [node, ...]}   {"tuple": [node, ...]}
    {"tensor": name}               {"empty": [dtype, shape]}     null, true, 1, 0.5, "text"

Keys of dicts are strings or integers (an optimizer's state_dict counts its parameters). Two places
that hold the same memory share one entry, and share it again when restored: a tied head stays tied.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.files import load_json

Entries = dict[str, Tensor]
DOCUMENT = "document"


def flatten(state: Mapping[str, Any]) -> Entries:
    """The tensors of `state` by name (itself, not copies), and the document.

    OrderedDicts come back as plain dicts, and float NaNs as the default one.
    """
    entries: Entries = {}
    text = json.dumps(_encode(state, (), entries, {}), separators=(",", ":"))
    entries[DOCUMENT] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return entries


def unflatten(entries: Mapping[str, Tensor], keys: Collection[str] | None = None) -> dict[str, Any]:
    """The state that `flatten` took apart, or these top-level keys of it (None: all).

    KeyError, ValueError or TypeError where the document and the entries do not fit.
    """
    state: dict[str, Any] = _decoded(_document(entries, keys), entries.__getitem__)
    return state


def entries_below(entries: Mapping[str, Tensor], keys: Collection[str] | None = None) -> list[str]:
    """Names of the entries that `unflatten` needs for these keys, the document aside."""
    found: dict[str, None] = {}
    _decoded(_document(entries, keys), found.setdefault)
    return list(found)


def _document(entries: Mapping[str, Tensor], keys: Collection[str] | None) -> Any:
    if entries[DOCUMENT].dtype != torch.uint8:
        raise ValueError("its document is no text")
    root = load_json(entries[DOCUMENT].numpy().tobytes())
    pairs = [[key, node] for key, node in root["dict"] if keys is None or key in keys]
    return {"dict": pairs}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no such dtype: {name!r}")
    return dtype


def _encode(node: Any, path: tuple[str, ...], entries: Entries, seen: dict[Any, str]) -> Any:
    if isinstance(node, Tensor):
        return _encode_tensor(node.detach(), path, entries, seen)
    if node is None or isinstance(node, (bool, int, float, str)):
        return node
    if isinstance(node, Mapping):
        for key in node:
            if isinstance(key, bool) or not isinstance(key, (int, str)):
                raise TypeError(f"state keys are str or int, got {key!r} in {'/'.join(path)!r}")
        pairs = [[k, _encode(v, (*path, str(k)), entries, seen)] for k, v in node.items()]
        return {"dict": pairs}
    if type(node) in (list, tuple):
        items = [_encode(v, (*path, str(i)), entries, seen) for i, v in enumerate(node)]
        return {type(node).__name__: items}
    raise TypeError(f"cannot keep a {type(node).__name__} in a checkpoint: {'/'.join(path)!r}")


def _encode_tensor(
    tensor: Tensor, path: tuple[str, ...], entries: Entries, seen: dict[Any, str]
) -> Any:
    if tensor.layout != torch.strided:
        raise TypeError(f"cannot keep a {tensor.layout} tensor in a checkpoint: {'/'.join(path)!r}")
    if not tensor.numel():  # no memory of its own to tell it apart, and nothing to store
        return {"empty": [dtype_name(tensor.dtype), list(tensor.shape)]}
    memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
    if memory not in seen:
        name = "/".join(path)
        while name in entries or name == DOCUMENT:  # {1: a, "1": b}, {"a/b": x, "a": {"b": y}}
            name += "~"
        seen[memory] = name
        entries[name] = tensor
    return {"tensor": seen[memory]}


def _decoded(node: Any, lookup: Callable[[str], Any]) -> Any:
    try:
        return _decode(node, lookup)
    except RecursionError:
        raise ValueError("its document is nested too deeply") from None


def _decode(node: Any, lookup: Callable[[str], Any]) -> Any:
    if not isinstance(node, dict):
        return node
    ((kind, value),) = node.items()
    if kind == "tensor":
        return lookup(value)
    if kind == "empty":
        if 0 not in value[1]:
            raise ValueError(f"shape {value[1]!r:.40} is not empty")  # and memory would be taken
        return torch.empty(value[1], dtype=dtype_of(value[0]))
    if kind == "dict":
        return {key: _decode(item, lookup) for key, item in value}
    if kind in ("list", "tuple"):
        items = [_decode(item, lookup) for item in value]
        return items if kind == "list" else tuple(items)
    raise ValueError(f"no such kind of node: {kind!r}")

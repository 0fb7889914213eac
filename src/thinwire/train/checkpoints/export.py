"""The weights of a run as one safetensors file, and the model back from it.

Where replicas hold weights of their own, their mean is exported: that is the model which the run
evaluates; what only training has a use for is left out. A tied head is stored once; the header
lists what shares what.
"""

from __future__ import annotations

import errno
import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

import thinwire
from thinwire.errors import UsageError
from thinwire.files import storage_error
from thinwire.train.checkpoints import checkpoint
from thinwire.train.checkpoints.rebuild import model_from_settings
from thinwire.train.tasks.models import Stack

Weights = dict[str, Tensor]


def export(source: str | Path, out: str | Path, *, force: bool = False) -> Path:
    """Write the model of a run (its latest checkpoint) or of one checkpoint to the file `out`."""
    out = Path(out)
    if len(out.name) > 200:
        raise UsageError(f"--out {out.name[:60]}...: a file's name has at most 200 characters")
    if out.is_dir() or (out.exists() and not force):
        raise UsageError(f"{out} exists already; choose another name or pass --force")
    if not out.parent.is_dir():
        raise UsageError(f"cannot write {out}: there is no directory {out.parent}")
    manifest = checkpoint.read_manifest(source)
    if "model" not in manifest.meta:
        raise UsageError(f"the checkpoint {manifest.path} does not say which model it is of")
    weights, tied = _exported(manifest)
    header = {
        "format": "pt",  # what other readers of safetensors look for
        "thinwire": thinwire.__version__,
        "step": str(manifest.step),
        "model": json.dumps(manifest.meta["model"]),
        "tied": json.dumps(tied),
    }
    _write(out, weights, header)
    return out


def _exported(manifest: checkpoint.Manifest) -> tuple[Weights, dict[str, str]]:
    try:
        unused = manifest.meta.get("training_only", [])
        kept = {name: t for name, t in _mean_weights(manifest).items() if name not in unused}
        return _untie(kept)
    except UsageError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError) as e:
        cause = " ".join(f"{type(e).__name__}: {e}".split())[:200]
        raise UsageError(
            f"the checkpoint {manifest.path} holds no model as it says it does ({cause}); use "
            f"another one of {manifest.path.parent}"
        ) from None


def _write(out: Path, weights: Weights, header: dict[str, str]) -> None:
    """Beside it first: a file of this name is whole."""
    draft = out.with_name(f"{out.name}.tmp")
    try:
        draft.unlink(missing_ok=True)
        save_file(weights, draft, metadata=header)
        os.replace(draft, out)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise storage_error(out, _as_os_error(error)) from error


def _as_os_error(error: Exception) -> OSError:
    """safetensors gives the operating system's number in its text: "(os error 28)"."""
    if isinstance(error, OSError):
        return error
    found = re.search(r"os error (\d+)", str(error))
    number = int(found[1]) if found else errno.EIO
    return OSError(number, os.strerror(number))


def load_exported(path: str | Path) -> Stack:
    """The model that `export` wrote, on the CPU."""
    try:
        with safe_open(path, framework="pt") as file:
            header: dict[str, str] = file.metadata() or {}
            weights: Weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UsageError(f"cannot read the model {path}: {error}") from None
    if "thinwire" not in header or "model" not in header:
        raise UsageError(f"{path} was not exported by thinwire: its header names no model")
    model = model_from_settings(json.loads(header["model"]))
    for name, owner in json.loads(header.get("tied", "{}")).items():
        weights[name] = weights[owner]
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise UsageError(f"{path} does not fit its model: {' '.join(str(error).split())}") from None
    return model


def _mean_weights(manifest: checkpoint.Manifest) -> Weights:
    shared = checkpoint.load(manifest.path, replica=0, keys={"model"}).shared
    if "model" in shared:
        return _weights(shared["model"])
    members = int(manifest.meta.get("shards", 1)) * int(manifest.meta.get("stages", 1))
    count = manifest.replicas // members
    own = _replica(manifest, 0, members)
    totals = {name: _summable(tensor) for name, tensor in own.items()}
    for replica in range(1, count):  # one at a time, to hold two models at most
        other = _replica(manifest, replica, members)
        for name, total in totals.items():
            if total.is_floating_point():
                total += other[name].float()
    means = {
        name: (t / count if t.is_floating_point() else t).to(own[name].dtype)
        for name, t in totals.items()
    }
    return _retie(own, means)


def _replica(manifest: checkpoint.Manifest, replica: int, members: int) -> Weights:
    """One replica's weights, put together from its ranks': stages hold different ones, shards a
    part of the first dimension of each."""
    parts = []
    for rank in range(replica * members, (replica + 1) * members):
        private = checkpoint.load(manifest.path, replica=rank, keys={"model"}).private
        if "model" not in private:
            raise UsageError(f"the checkpoint {manifest.path} holds no model")
        parts.append(_weights(private["model"]))
    if "stages" in manifest.meta:
        return {name: tensor for part in parts for name, tensor in part.items()}
    if members == 1:
        return parts[0]
    whole: dict[int, Tensor] = {}  # by the first part's tensor, so that tied names stay tied
    for name, tensor in parts[0].items():
        if id(tensor) not in whole:
            whole[id(tensor)] = torch.cat([part[name] for part in parts])
    return {name: whole[id(tensor)] for name, tensor in parts[0].items()}


def _weights(state: Any) -> Weights:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _summable(tensor: Tensor) -> Tensor:
    """A copy to sum in fp32; integers, such as counters, are those of replica 0."""
    return tensor.to(torch.float32, copy=True) if tensor.is_floating_point() else tensor


def _retie(own: Weights, means: Weights) -> Weights:
    """Names that shared one tensor share their mean, too."""
    first: dict[int, str] = {}
    return {name: means[first.setdefault(id(tensor), name)] for name, tensor in own.items()}


def _untie(weights: Weights) -> tuple[Weights, dict[str, str]]:
    """Every tensor once, under its first name, and the other names -> that name."""
    first: dict[int, str] = {}
    owners = {name: first.setdefault(id(tensor), name) for name, tensor in weights.items()}
    kept = {name: weights[name].contiguous() for name, owner in owners.items() if name == owner}
    return kept, {name: owner for name, owner in owners.items() if name != owner}

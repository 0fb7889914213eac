"""Checkpoints of a run that survive a kill at any moment.

    run/checkpoints/
      latest                    the name of the newest whole checkpoint: "step-00000120"
      step-00000120/
        thinwire.json           the manifest: step, number of replicas, the caller's meta, checksums
        shared/                 state that is the same on all replicas, written by the leader
        replica-0/ ...          what each replica has of its own

[Note: order of a save] Each line is on the disk before the next begins:
 1. the leader removes what a killed save left behind;                     barrier
 2. every rank writes its part into step-N.tmp/;                           barrier
 3. the leader writes the manifest, renames step-N.tmp to step-N, replaces `latest`;
 4. the leader removes checkpoints beyond the newest `keep`;               barrier
`latest` names a whole checkpoint at every moment. Only a second save of the step that `latest`
names needs more: the old one waits as step-N.old while the new one takes its name, and a reader who
finds no step-N takes step-N.old.

The directory must be one that all ranks see. A rank that cannot write tells the others where they
would have met (`tell`): all of them refuse with its words, `latest` names what it named before, and
the leader takes the half checkpoint away.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import thinwire
from thinwire.errors import StorageError, ThinwireError, UsageError
from thinwire.files import load_json, read_bytes, storage_error
from thinwire.train.checkpoints.manifest import STEP_NAME, Manifest, manifest_of, part_of
from thinwire.train.checkpoints.model_identity import check_model, describe_model
from thinwire.train.checkpoints.storage import (
    METADATA,
    MOST_METADATA,
    DamagedError,
    read_entries,
    read_metadata,
    sync_directory,
    write_durably,
    write_entries,
)
from thinwire.train.checkpoints.tree import DOCUMENT, entries_below, flatten, unflatten

__all__ = [
    "Loaded",
    "Manifest",
    "check_model",
    "describe_model",
    "flatten",
    "latest",
    "load",
    "read_manifest",
    "save",
    "unflatten",
]

FORMAT = 1
MANIFEST = "thinwire.json"


@dataclass(frozen=True)
class Loaded:
    """A checkpoint as one replica sees it."""

    step: int
    shared: dict[str, Any]
    private: dict[str, Any]
    meta: dict[str, Any]
    replicas: int
    """Number of replicas that saved it."""
    source: int
    """The replica whose private state this is; another one's where there are more replicas now."""


def save(
    directory: str | Path,
    step: int,
    *,
    shared: Mapping[str, Any],
    private: Mapping[str, Any],
    replica: int,
    replicas: int,
    meta: Mapping[str, Any],
    barrier: Callable[[], None],
    leader: bool,
    keep: int = 2,
    tell: Callable[[str], list[str]] | None = None,
    new: bool = True,
) -> Path:
    """Write a checkpoint below the run's directory; all ranks call it, one of them as the leader.

    `shared` and `private` are nested dicts, lists and tuples of tensors and JSON values; `meta` is
    JSON. See [Note: order of a save]. When it returns, the checkpoint is whole and `latest` names
    it, on every rank. `tell` is a barrier to which every rank brings a line (empty if all is well)
    and from which it takes those of all; without it a rank that fails raises on its own. `new` lets
    the directory be made.
    """
    root, final, draft = _places(Path(directory), step, keep)

    def begin() -> None:
        if leader:
            _make_root(root, new)
            _tidy(root)
        _reached("tidied")

    def write() -> None:
        if leader:
            write_entries(draft / "shared", flatten(shared))
            _reached("shared written")
        write_entries(draft / part_of(replica), flatten(private))
        _reached("private written")

    def commit() -> None:
        if leader:
            _write_manifest(draft, step, replicas, meta)
            _reached("manifest written")
            _commit(root, draft, final)
            _prune(root, step, keep)
            _reached("pruned")

    with _draft_removed_on_failure(draft, leader):
        for phase in (begin, write, commit):
            _together(phase, draft, barrier, tell)
    return final


def _places(directory: Path, step: int, keep: int) -> tuple[Path, Path, Path]:
    """Of all checkpoints, of this one, and of this one while it is written."""
    if keep < 1:
        raise UsageError(f"at least one checkpoint must be kept, got keep={keep}")
    root = directory / "checkpoints"
    final = root / f"step-{step:08d}"
    return root, final, root / f"{final.name}.tmp"


@contextmanager
def _draft_removed_on_failure(draft: Path, leader: bool) -> Iterator[None]:
    """It may be what fills the disk."""
    try:
        yield
    except StorageError:
        if leader and draft.parent.is_dir():
            with suppress(OSError):
                _remove(draft)
        raise


def _together(
    phase: Callable[[], None],
    draft: Path,
    barrier: Callable[[], None],
    tell: Callable[[str], list[str]] | None,
) -> None:
    """A phase of a save, and a meeting after it; what the disk refuses to one ends all."""
    problem: ThinwireError | None = None
    try:
        phase()
    except OSError as error:
        problem = storage_error(draft, error)
    except UsageError as error:  # a part that the leader does not see
        problem = error
    if tell is None:
        if problem is not None:
            raise problem
        barrier()
        return
    for rank, text in enumerate(tell("" if problem is None else str(problem))):
        if text:
            raise problem or StorageError(f"worker {rank}: {text}")


def _make_root(root: Path, new: bool) -> None:
    if not new and not root.parent.is_dir():  # made anew, it would hold half a run
        raise FileNotFoundError(errno.ENOENT, f"{root.parent} is gone")
    root.mkdir(parents=True, exist_ok=True)
    sync_directory(root.parent)


def load(path: str | Path, *, replica: int, keys: Collection[str] | None = None) -> Loaded:
    """The checkpoint at `path`: of a run (its latest), of its checkpoints/, or one step's.

    Every tensor is allocated on the CPU as the checkpoint describes it, so nothing depends on what
    a live optimizer has created so far. Replica r of more replicas than were saved takes the
    private state of replica r % saved. `keys` limits both states to these top-level keys.
    """
    manifest = read_manifest(path)
    source = replica % manifest.replicas
    return Loaded(
        step=manifest.step,
        shared=_read_part(manifest, "shared", keys),
        private=_read_part(manifest, part_of(source), keys),
        meta=manifest.meta,
        replicas=manifest.replicas,
        source=source,
    )


def latest(directory: str | Path) -> Path | None:
    """The newest whole checkpoint of a run, None where there is none yet."""
    root = Path(directory) / "checkpoints"
    return _named_by_latest(root) if os.path.lexists(root / "latest") else None


def read_manifest(path: str | Path) -> Manifest:
    """The manifest of the checkpoint at `path` (as for `load`), read without its tensors."""
    checkpoint = _find(Path(path))
    file = checkpoint / MANIFEST
    try:
        content = load_json(read_bytes(file, MOST_METADATA))
        written, body = content["crc32"], content["body"]
        if written != _checksum(body):
            raise ValueError("its checksum differs")
        if body["format"] > FORMAT:
            raise UsageError(
                f"{checkpoint} has format {body['format']}, made by thinwire {body['thinwire']}; "
                f"this is thinwire {thinwire.__version__}, which reads up to {FORMAT}: upgrade it"
            )
        return manifest_of(checkpoint, body)
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(
            f"cannot read the checkpoint {file}: {error.strerror}; use another one of "
            f"{checkpoint.parent}"
        ) from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _corrupt(checkpoint, f"{file.name} is garbled ({error})") from None


# Writing


def _reached(moment: str) -> None:
    """Does nothing; tests replace it to end the process at a named moment of a save."""


def _checksum(body: Any) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _write_manifest(draft: Path, step: int, replicas: int, meta: Mapping[str, Any]) -> None:
    parts = {}
    for part in ("shared", *map(part_of, range(replicas))):
        try:
            parts[part] = zlib.crc32((draft / part / METADATA).read_bytes())
        except OSError:
            raise UsageError(
                f"{draft / part} was not found by the leader: is {draft.parent} on a file "
                "system that all ranks share?"
            ) from None
    body = json.loads(
        json.dumps(
            {
                "format": FORMAT,
                "thinwire": thinwire.__version__,
                "step": step,
                "replicas": replicas,
                "meta": dict(meta),
                "parts": parts,
            }
        )
    )
    content = json.dumps({"crc32": _checksum(body), "body": body}, indent=1)
    write_durably(draft / MANIFEST, content.encode())
    sync_directory(draft)


def _commit(root: Path, draft: Path, final: Path) -> None:
    """Step 3 of [Note: order of a save]."""
    aside = root / f"{final.name}.old"
    if final.exists():
        final.rename(aside)
        _reached("old one aside")
    draft.rename(final)
    sync_directory(root)
    _reached("renamed")
    write_durably(root / "latest.tmp", f"{final.name}\n".encode())
    _reached("latest written")
    os.replace(root / "latest.tmp", root / "latest")
    sync_directory(root)
    _reached("latest moved")
    _remove(aside)


def _tidy(root: Path) -> None:
    """Finish or undo what a killed save left behind."""
    for aside in root.glob("step-*.old"):
        if aside.with_suffix("").exists():
            _remove(aside)
        else:
            aside.rename(aside.with_suffix(""))
    for draft in [*root.glob("step-*.tmp"), *root.glob("step-*.gone")]:
        _remove(draft)


def _prune(root: Path, step: int, keep: int) -> None:
    """Remove all but the newest `keep` up to this step.

    Later steps belong to a run that was taken up again further back: they are left until this run
    has passed them.
    """
    found = [path for path in root.iterdir() if STEP_NAME.fullmatch(path.name)]
    steps = sorted(found, key=lambda path: int(path.name[len("step-") :]))
    past = [path for path in steps if int(path.name[len("step-") :]) <= step]
    for path in past[:-keep]:
        _remove(path)


def _remove(path: Path) -> None:
    """Remove a directory such that no half of it ever carries the name of a checkpoint."""
    gone = path.with_suffix(".gone")
    shutil.rmtree(gone, ignore_errors=True)  # left by an earlier kill
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        path.rename(gone)
        shutil.rmtree(gone)


# Reading


def _find(path: Path) -> Path:
    if (path / MANIFEST).is_file():
        return path
    for root in (path / "checkpoints", path):
        if (root / "latest").is_file():
            return _named_by_latest(root)
    if not path.exists():
        raise UsageError(f"no checkpoint at {path}: there is no such file or directory")
    if (path / ".metadata").exists():
        raise UsageError(f"{path} is a torch.distributed checkpoint that thinwire did not make")
    raise UsageError(f"{path} is no thinwire checkpoint, and no run that has one: no {MANIFEST}")


def _named_by_latest(root: Path) -> Path:
    try:
        name = read_bytes(root / "latest", 100).decode("utf-8", "replace").strip()
    except OSError as error:
        raise UsageError(
            f"cannot read {root / 'latest'}: {error.strerror}; pass one of {root}/step-*"
        ) from None
    if not STEP_NAME.fullmatch(name):
        raise UsageError(
            f"{root / 'latest'} is garbled: it should name a step; pass one of {root}/step-*"
        )
    for path in (root / name, root / f"{name}.old"):  # the latter: killed between two renames
        if (path / MANIFEST).is_file():
            return path
    raise UsageError(f"{root / 'latest'} names {name}, which is not there or not whole")


def _read_part(manifest: Manifest, part: str, keys: Collection[str] | None) -> dict[str, Any]:
    path = manifest.path / part
    try:
        if zlib.crc32(read_bytes(path / METADATA, MOST_METADATA)) != manifest.parts[part]:
            raise DamagedError(f"{part}/{METADATA} has changed since it was written")
        metadata = read_metadata(path)
        entries = read_entries(path, metadata, [DOCUMENT])
        entries |= read_entries(path, metadata, entries_below(entries, keys))
        return unflatten(entries, keys)
    except OSError as error:
        raise _corrupt(manifest.path, f"{part}/{METADATA}: {error.strerror}") from None
    except DamagedError as error:
        raise _corrupt(manifest.path, str(error)) from None
    except (ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        raise _corrupt(manifest.path, f"{part} does not fit its document ({error})") from None


def _corrupt(checkpoint: Path, reason: str) -> UsageError:
    return UsageError(
        f"the checkpoint {checkpoint} is corrupt: {' '.join(reason.split())}; "
        f"use another one of {checkpoint.parent}"
    )

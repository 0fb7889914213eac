"""A table of tensors in a directory: torch.distributed.checkpoint with its metadata as JSON.

DCP plans, writes and reads the tensors: one data file, each tensor in it a zip that torch.load
reads with weights_only. DCP would pickle its metadata; here that is JSON, with the size and CRC-32
of the data file, so that reading a directory runs no code from it and damage is found before a
value is used.

[Note: a directory of somebody else's] A checksum tells damage, not intent. So a name is one in the
same directory, a file is a plain one whose size is checked before it is read, and no tensor is
larger than the bytes it is said to be stored in: nothing is read for ever, and no memory is taken
that the files do not fill.

[Note: DCP without collectives] dcp.save sends pickled plans between ranks. Here each rank drives
the planner and the storage itself, for a directory of its own, and the caller's barrier is the only
communication. Sharded tensors fit in: chunks carry their offsets, and the metadata of several
directories can be merged into one table.
"""

from __future__ import annotations

import errno
import json
import math
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from thinwire.files import create, load_json, open_plain, read_bytes
from thinwire.train.checkpoints.tree import Entries, dtype_name, dtype_of

METADATA = "metadata.json"
MOST_METADATA = 1 << 28  # bytes
_READ_BLOCK = 1 << 22  # bytes


class DamagedError(Exception):
    """A stored directory is not what was written; the message says which file and how."""


def write_entries(path: Path, entries: Entries) -> None:
    """Write a non-empty table to the new directory `path`, and wait until it is on the disk."""
    path.mkdir(parents=True)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    # DCP's own sync comes before Python has flushed its buffer: _sync_and_sum does it for good.
    writer = FileSystemWriter(path, sync_files=False)
    planner.set_up_planner(dict(entries), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    (plan,) = writer.prepare_global_plan(plans)
    try:
        results: list[WriteResult] = writer.write_data(planner.finish_plan(plan), planner).wait()
    except RuntimeError as error:
        raise _behind(error) from error
    content = _metadata_to_json(metadata, {r.index: r.storage_data for r in results})
    names = {chunk["file"] for t in content["tensors"].values() for chunk in t["chunks"]}
    content["files"] = {name: _sync_and_sum(path / name) for name in sorted(names)}
    write_durably(path / METADATA, json.dumps(content).encode())
    sync_directory(path)


def _behind(error: RuntimeError) -> Exception:
    """torch's zip writer hides what the disk said behind a complaint about its own place in the
    file ("unexpected pos")."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return cause
        cause = cause.__cause__ or cause.__context__
    if "inline_container" in str(error) or "PytorchStreamWriter" in str(error):
        return OSError(errno.EIO, f"{os.strerror(errno.EIO)} (is the disk full?)")
    return error


def read_metadata(path: Path) -> Metadata:
    """DCP's metadata of the table in `path`, after checking its data files."""
    try:
        content = load_json(read_bytes(path / METADATA, MOST_METADATA))
        files = {
            _plain_name(name): (_count(file["bytes"]), _count(file["crc32"]))
            for name, file in content["files"].items()
        }
        metadata = _metadata_from_json(content, {name: size for name, (size, _) in files.items()})
    except OSError as error:
        raise DamagedError(f"{path / METADATA}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise DamagedError(f"{path / METADATA} is garbled ({error})") from None
    for name, expected in files.items():
        _check_file(path / name, *expected)
    return metadata


def read_entries(path: Path, metadata: Metadata, names: Iterable[str]) -> Entries:
    """The named tensors, on the CPU, in memory allocated as the metadata says."""
    entries: Entries = {}
    try:
        for name in names:
            stored = metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            entries[name] = torch.empty(stored.size, dtype=stored.properties.dtype)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        reader = FileSystemReader(path)
        planner.set_up_planner(entries, metadata, is_coordinator=True)
        reader.set_up_storage_reader(metadata, True)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        (plan,) = reader.prepare_global_plan(planner.create_global_plan([plan]))
        reader.read_data(planner.finish_plan(plan), planner).wait()
    except Exception as error:
        raise DamagedError(f"{path} cannot be read ({type(error).__name__}: {error})") from None
    return entries


def write_durably(path: Path, content: bytes) -> None:
    with create(path) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Make the names in a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _metadata_to_json(
    metadata: Metadata, stored: dict[MetadataIndex, _StorageInfo]
) -> dict[str, Any]:
    tensors = {}
    for name, tensor in metadata.state_dict_metadata.items():
        if not isinstance(tensor, TensorStorageMetadata):
            raise TypeError(f"{name} is no tensor; DCP would pickle it")
        tensors[name] = {
            "dtype": dtype_name(tensor.properties.dtype),
            "shape": list(tensor.size),
            "chunks": [
                _chunk_to_json(chunk, stored[MetadataIndex(name, chunk.offsets)])
                for chunk in tensor.chunks
            ],
        }
    return {"tensors": tensors}


def _chunk_to_json(chunk: ChunkStorageMetadata, info: _StorageInfo) -> dict[str, Any]:
    return {
        "offset": list(chunk.offsets),
        "shape": list(chunk.sizes),
        "file": info.relative_path,
        "start": info.offset,
        "bytes": info.length,
    }


def _metadata_from_json(content: dict[str, Any], files: dict[str, int]) -> Metadata:
    """`files` are the data files by name, with their sizes."""
    tensors: dict[str, Any] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    for name, tensor in content["tensors"].items():
        dtype, shape = dtype_of(tensor["dtype"]), _sizes(tensor["shape"])
        (chunk,) = tensor["chunks"]
        offset, place = _sizes(chunk["offset"]), _place_of(chunk, files)
        if any(offset) or len(offset) != len(shape) or _sizes(chunk["shape"]) != shape:
            # DCP would leave the rest of the tensor as it found the memory.
            raise ValueError(f"{name:.100} of shape {list(shape[:8])} is not stored whole")
        if math.prod(shape) * dtype.itemsize > place.length:
            raise ValueError(f"{name:.100} does not fit its {place.length} bytes")
        stored[MetadataIndex(name, offset)] = place
        chunks = [ChunkStorageMetadata(offset, shape)]
        tensors[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), shape, chunks)
    return Metadata(state_dict_metadata=tensors, storage_data=stored)


def _place_of(chunk: dict[str, Any], files: dict[str, int]) -> _StorageInfo:
    file, start, size = chunk["file"], _count(chunk["start"]), _count(chunk["bytes"])
    if file not in files:
        raise ValueError(f"unknown file {file!r}")
    if start + size > files[file]:
        raise ValueError(f"{file} has {files[file]} bytes, and a tensor ends at {start + size}")
    return _StorageInfo(file, start, size)


def _plain_name(name: str) -> str:
    """See [Note: a directory of somebody else's]."""
    plain = name == os.path.basename(name) and name not in ("", ".", "..")
    if not plain or not name.isprintable() or len(name) > 255:
        raise ValueError(f"{name!r:.100} is no name of a file in the same directory")
    return name


def _sizes(numbers: list[int]) -> torch.Size:
    return torch.Size([_count(number) for number in numbers])


def _count(number: Any) -> int:
    if type(number) is not int or not 0 <= number < 2**63:
        raise ValueError(f"{number!r:.40} is no size")
    return number


def _sync_and_sum(path: Path) -> dict[str, int]:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        size = os.fstat(file.fileno()).st_size
        return {"bytes": size, "crc32": _crc32(file, size)}


def _check_file(path: Path, size: int, crc32: int) -> None:
    try:
        with open_plain(path) as file:
            found = os.fstat(file.fileno()).st_size
            if found != size:
                raise DamagedError(f"{path} has {found} bytes, {size} were written")
            if _crc32(file, size) != crc32:
                raise DamagedError(f"{path} has changed since it was written (its CRC-32 differs)")
    except OSError as error:
        raise DamagedError(f"{path}: {error.strerror}") from None


def _crc32(file: BinaryIO, size: int) -> int:
    total = 0
    while size > 0 and (block := file.read(min(size, _READ_BLOCK))):
        total = zlib.crc32(block, total)
        size -= len(block)
    return total

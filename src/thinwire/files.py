"""Files that others may have made, and files that must be whole.

A run's directory may come from somebody else: what is read from it is a plain file of a bearable
size - no pipe, no device, no link to elsewhere - and what is written to it replaces a name and
never goes through a link. An error of the disk becomes one line that names the file and the disk.
"""

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter
from pathlib import Path
from typing import Any, BinaryIO

from thinwire.errors import StorageError

MOST_SETTINGS = 1 << 24  # bytes of a document of settings
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def open_plain(path: Path, *, follow: bool = False) -> BinaryIO:
    """The file, for reading; OSError for whatever is no plain file. `follow` is for paths that the
    user has named and nobody else."""
    look = os.stat if follow else os.lstat
    _require_plain(look(path), path)
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    try:
        _require_plain(os.fstat(descriptor), path)  # it may have changed since
    except OSError:
        os.close(descriptor)
        raise
    return open(descriptor, "rb")


def read_bytes(path: Path, most: int, *, follow: bool = False) -> bytes:
    """The content of a plain file of at most so many bytes; OSError for any other."""
    with open_plain(path, follow=follow) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(
                errno.EFBIG, f"it has {size} bytes, and at most {most} are read", str(path)
            )
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
    return content


def load_json(content: bytes | str) -> Any:
    """ValueError for whatever is no JSON, and for what is nested beyond use."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _require_plain(found: os.stat_result, path: Path) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, "it is a symbolic link, which is not followed here", str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no plain file", str(path))


def write_whole(path: Path, content: bytes, *, durably: bool = False) -> None:
    """At once: a reader finds the old content or the new, and a link is replaced, not followed."""
    aside = path.with_name(f"{path.name}.tmp")
    with writing(path):
        try:
            with create(aside) as file:
                file.write(content)
                file.flush()
                if durably:
                    os.fsync(file.fileno())
            os.replace(aside, path)
        except OSError:
            with suppress(OSError):
                aside.unlink()
            raise


def create(path: Path) -> BufferedWriter:
    """A new file of this name, whatever had it before."""
    with suppress(FileNotFoundError):
        path.unlink()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    return open(os.open(path, flags, 0o666), "wb")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around what writes `path`: an error of the operating system becomes a StorageError."""
    try:
        yield
    except OSError as error:
        raise storage_error(path, error) from error


def storage_error(path: Path, error: OSError) -> StorageError:
    """What has happened to a file that could not be written, where, and what to do."""
    why = error.strerror or str(error)
    disk = _disk_of(path)
    if error.errno in FULL:
        return StorageError(
            f"cannot write {path}: {why}; {disk}: make room there, or use a directory on another "
            "disk; what was written before is whole"
        )
    if error.errno in _GONE:
        return StorageError(
            f"cannot write {path}: its directory was removed or moved while it was in use "
            f"({why}); {disk}"
        )
    return StorageError(f"cannot write {path}: {why}; {disk}")


def _disk_of(path: Path) -> str:
    """The disk that a path is on, and the room that is left there."""
    place = path.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    mount = place
    while not os.path.ismount(mount) and mount != mount.parent:
        mount = mount.parent
    try:
        found = os.statvfs(place)
    except OSError:
        return f"the disk is that of {mount}"
    free = found.f_bavail * found.f_frsize
    return f"the disk is that of {mount}, with {free / 1e6:.1f} MB free"

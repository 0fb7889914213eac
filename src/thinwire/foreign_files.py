"""Files in a directory that somebody else may have filled: a run copied from elsewhere, say.

What is read is a regular file of a sane size, reached without a symbolic link below the directory
the user named. What is written is written aside and renamed (files.py): a link that waits under the
name is replaced and its target left alone, and a reader finds the old content or the new.
"""

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from thinwire.errors import ThinwireError, UsageError
from thinwire.files import load_json, storage_error, write_whole

MOST = 256 << 20  # bytes of a file that is read as a whole
_SAFELY = os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NONBLOCK | _SAFELY  # without O_NONBLOCK a FIFO would be waited for


def component(name: object, what: str) -> str:
    """`name`, if it names one file or folder and leads nowhere else; `what` says what it names."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        raise UsageError(f"{what} takes a name that is no path, got {name!r}")
    return name


def open_regular(path: Path, within: Path | None = None) -> IO[bytes]:
    """For reading. No link is followed below `within`, which is the file's folder by default.

    FileNotFoundError where there is nothing, UsageError where there is anything but a file.
    """
    root = within or path.parent
    parts = [component(part, str(path)) for part in path.relative_to(root).parts]
    try:
        return _regular(_open(root, parts), "rb")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UsageError(f"cannot read {path}: {_why(error)}") from None


def read(path: Path, within: Path | None = None, most: int = MOST) -> bytes:
    """The whole of a file, if that is no more than `most` bytes."""
    with open_regular(path, within) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise UsageError(f"cannot read {path}: it has {size} bytes, more than {most}")
        return file.read(size)


def read_json(path: Path, within: Path | None = None, most: int = MOST) -> Any:
    try:
        return load_json(read(path, within, most))
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(f"cannot read {path}: {error}") from None


def write(path: Path, content: str | bytes) -> None:
    """All of it or nothing."""
    write_whole(path, content.encode() if isinstance(content, str) else content)


def open_to_append(path: Path) -> IO[str]:
    """Line by line; makes the file, and writes through no link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | _SAFELY
    try:
        return _regular(os.open(path, flags, 0o666), "a", buffering=1)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EINVAL):
            raise UsageError(f"cannot write {path}: {_why(error)}") from None
        raise storage_error(path, error) from None


@contextmanager
def refusing_damage(folder: Path) -> Iterator[None]:
    """Around code that takes the records of a directory for what they should be: whatever else they
    are is one line, and no traceback."""
    try:
        yield
    except ThinwireError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError) as error:
        raise _damaged(folder, error) from error
    except (AssertionError, TypeError, ValueError) as error:
        raise _damaged(folder, error) from error


def _damaged(folder: Path, error: Exception) -> UsageError:
    return UsageError(f"the records in {folder} are damaged: {type(error).__name__}: {error}")


def _open(root: Path, parts: Sequence[str]) -> int:
    """One part after another: O_NOFOLLOW looks at the last of a path alone."""
    at = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
    for part in parts:
        above = at
        try:
            at = os.open(part, _READ, dir_fd=above)
        finally:
            os.close(above)
    return at


def _regular(file: int, mode: str, buffering: int = -1) -> IO[Any]:
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is no regular file")
    return os.fdopen(file, mode, buffering)


def _why(error: OSError) -> str:
    return "it is a symbolic link" if error.errno == errno.ELOOP else str(error.strerror)

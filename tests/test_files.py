"""Files that others may have made: what is read, what is written through, what is said."""

import errno
import os
from pathlib import Path

import pytest

from thinwire.errors import StorageError
from thinwire.files import create, load_json, open_plain, read_bytes, write_whole, writing


def odd_files(folder: Path) -> dict[str, Path]:
    target = folder / "target"
    target.write_text("kept")
    paths = {name: folder / name for name in ("pipe", "link", "zeros", "folder", "nowhere")}
    os.mkfifo(paths["pipe"])
    paths["link"].symlink_to(target)
    paths["zeros"].symlink_to("/dev/zero")
    paths["folder"].mkdir()
    return paths


def test_only_plain_files_are_read(tmp_path: Path) -> None:
    for name, path in odd_files(tmp_path).items():
        with pytest.raises(OSError, match=rf"(?i)plain|link|directory.*{name}"):
            read_bytes(path, 100)
        if name != "link":
            with pytest.raises(OSError, match=r"(?i)plain|directory"):
                open_plain(path, follow=True)
    assert read_bytes(tmp_path / "link", 100, follow=True) == b"kept"


def test_no_more_is_read_than_is_bearable(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(bytes(101))
    assert len(read_bytes(path, 101)) == 101
    with pytest.raises(OSError, match="101 bytes, and at most 100"):
        read_bytes(path, 100)


@pytest.mark.parametrize("text", ["[" * 100_000, "[" * 100_000 + "]" * 100_000, '{"a":' * 100_000])
def test_what_is_nested_beyond_use_is_no_json(text: str) -> None:
    with pytest.raises(ValueError, match=r"nested|Expecting"):
        load_json(text)


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("kept")
    for name in ("file", "file.tmp"):
        (tmp_path / name).symlink_to(target)
    write_whole(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
    assert not (tmp_path / "file").is_symlink()
    assert target.read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "target"]
    (tmp_path / "other").symlink_to(target)
    with create(tmp_path / "other") as file:
        file.write(b"new")
    assert target.read_text() == "kept"


def test_what_the_disk_refuses_names_the_file_and_the_disk(tmp_path: Path) -> None:
    with pytest.raises(StorageError) as caught, writing(tmp_path / "a" / "file"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert f"cannot write {tmp_path}/a/file: No space left" in str(caught.value)
    assert "MB free" in str(caught.value)
    with pytest.raises(StorageError, match="was removed or moved"):
        write_whole(tmp_path / "gone" / "file", b"")
    full = Path("/dev/full")
    said = pytest.raises(StorageError, match="No space left on device")
    with said, writing(full), full.open("wb", buffering=0) as file:
        file.write(b"x")

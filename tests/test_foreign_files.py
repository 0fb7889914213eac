"""Files in a directory that somebody else has filled."""

import json
import os
from pathlib import Path

import pytest

from thinwire import foreign_files as files
from thinwire.errors import StorageError, UsageError


@pytest.mark.parametrize("name", ["", ".", "..", "/", "a/b", "../a", "/etc", "a\0b", None, 3])
def test_a_name_is_no_path(name: object) -> None:
    with pytest.raises(UsageError, match="a method takes a name that is no path"):
        files.component(name, "a method")


@pytest.mark.parametrize("name", ["ddp", "one-bit-adam", "..a", "a..", "power<sgd>", " ", "é"])
def test_any_name_of_one_file_is_one(name: str) -> None:
    assert files.component(name, "a method") == name


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text("{}")
    (tmp_path / "run").mkdir()
    link, pipe = tmp_path / "run" / "link.json", tmp_path / "run" / "pipe.json"
    link.symlink_to(secret)
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match=r"link\.json: it is a symbolic link"):
        files.read(link)
    with pytest.raises(UsageError, match=r"pipe\.json: it is no regular file"):
        files.read(pipe)
    with pytest.raises(UsageError, match="it is no regular file"):
        files.read(tmp_path / "run")
    with pytest.raises(FileNotFoundError):
        files.read(tmp_path / "run" / "nothing")


def test_a_folder_that_is_a_link_is_not_entered(tmp_path: Path) -> None:
    """But the directory that the user named may be one."""
    (tmp_path / "home" / "ddp").mkdir(parents=True)
    (tmp_path / "home" / "ddp" / "config.json").write_text("[1]")
    run = tmp_path / "run"
    run.mkdir()
    (run / "seed-0").symlink_to(tmp_path / "home")
    with pytest.raises(UsageError, match="it is a symbolic link"):
        files.read(run / "seed-0" / "ddp" / "config.json", within=run)
    (tmp_path / "moved").symlink_to(tmp_path / "home")
    moved = tmp_path / "moved"
    assert files.read_json(moved / "ddp" / "config.json", within=moved) == [1]
    with pytest.raises(UsageError, match="no path"):
        files.read(run / ".." / "home" / "ddp" / "config.json", within=run)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.write_bytes(b"12345")
    assert files.read(path, most=5) == b"12345"
    with pytest.raises(UsageError, match="5 bytes, more than 4"):
        files.read(path, most=4)
    os.truncate(path, 1 << 40)  # a terabyte that takes no room
    with pytest.raises(UsageError, match="more than"):
        files.read(path)


@pytest.mark.parametrize("text", ["{", "", "\xff", "[" * 100_000 + "]" * 100_000])
def test_what_is_no_json_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(UsageError, match=r"cannot read .*config\.json"):
        files.read_json(path)


def test_a_link_is_replaced_and_not_written_through(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "report.html"
    target.write_text("precious")
    link.symlink_to(target)
    files.write(link, "new")
    assert target.read_text() == "precious"
    assert not link.is_symlink()
    assert link.read_text() == "new"
    files.write(link, b"newer")
    assert link.read_text() == "newer"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "target"]


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    with pytest.raises(StorageError, match=r"cannot write .*report\.html: Is a directory"):
        files.write(tmp_path / "report.html", "new")
    with pytest.raises(StorageError, match="No such file or directory"):
        files.write(tmp_path / "nowhere" / "report.html", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_lines_are_added_to_a_file_and_through_no_link(tmp_path: Path) -> None:
    for number in range(2):
        with files.open_to_append(tmp_path / "log") as file:
            file.write(f"{number}\n")
    assert (tmp_path / "log").read_text() == "0\n1\n"
    (tmp_path / "link").symlink_to(tmp_path / "log")
    with pytest.raises(UsageError, match="it is a symbolic link"):
        files.open_to_append(tmp_path / "link")


@pytest.mark.parametrize(
    "record", ['{"kind": 3}', "[]", '{"tokens": "many"}', "0", "null", "[" * 100_000]
)
def test_records_of_another_form_are_one_line(tmp_path: Path, record: str) -> None:
    def take() -> None:
        with files.refusing_damage(tmp_path):
            value = json.loads(record)
            assert 10 / value["tokens"] > value["kind"]

    with pytest.raises(UsageError, match=f"the records in {tmp_path} are damaged: "):
        take()

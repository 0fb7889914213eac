import os

import pytest

from thinwire.lab.output import Failure, Line, Log, Reader, culprit


def read_all(chunks: list[bytes]) -> list[str]:
    seen: list[Line] = []
    read, write = os.pipe()
    reader = Reader(read, False, Log("host2", seen.append))
    for chunk in chunks:
        os.write(write, chunk)
        assert reader.read()
    os.close(write)
    assert not reader.read()
    os.close(read)
    return [str(line) for line in seen]


def test_lines_are_whole_and_prefixed() -> None:
    assert read_all([b"one\ntw", b"o\n\n", b"rest"]) == [
        "host2 | one",
        "host2 | two",
        "host2 | ",
        "host2 | rest",
    ]


def test_a_redrawn_line_shows_its_last_state() -> None:
    assert read_all([b"10 %\r20 %\r\n"]) == ["host2 | 20 %"]


def test_bad_text_is_shown_anyway() -> None:
    assert read_all([b"\xff\n"]) == ["host2 | \ufffd"]


def log_of(text: str) -> Log:
    log = Log("host0", lambda line: None)
    for line in text.splitlines():
        log.add(line.encode(), error=True)
    return log


def test_the_tail_is_the_last_traceback_with_its_chain() -> None:
    old = "Traceback (most recent call last):\nOldError: handled\nwent on\n"
    new = (
        "Traceback (most recent call last):\nKeyError: 1\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\nValueError: boom"
    )
    tail = [line.text for line in log_of(old + new).tail()]
    assert tail == new.splitlines()


def test_without_a_traceback_the_tail_is_the_last_lines() -> None:
    log = log_of("\n".join(str(number) for number in range(30)))
    assert [line.text for line in log.tail()] == [str(number) for number in range(10, 30)]
    assert log.traceback_time() is None


@pytest.mark.parametrize(
    ("failures", "blamed"),
    [
        ([Failure(0, 1, 1.0, 0.9), Failure(1, -9, 1.2, None)], 1),  # killed beats any traceback
        ([Failure(0, 1, 1.0, 0.9), Failure(1, 1, 1.2, 0.5)], 1),  # the earlier traceback
        ([Failure(0, 3, 1.0, None), Failure(1, 1, 1.2, 1.1)], 1),  # any traceback beats none
        ([Failure(0, 3, 1.0, None), Failure(1, 3, 0.9, None)], 1),  # the earlier exit
    ],
)
def test_whom_to_blame(failures: list[Failure], blamed: int) -> None:
    assert culprit(failures).rank == blamed

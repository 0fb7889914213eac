"""The one fixture behind all tests that need a real emulated network."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.lab.lab_tools import MakeLab
from thinwire.errors import LabError
from thinwire.lab import Lab, Link


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker("alone")


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skips where the machine forbids what the lab needs, with the lab's own reason."""
    try:
        with Lab(1, Link.of()):
            pass
    except LabError as error:
        if "cannot build its network here" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.fixture
def make_lab(namespaces: None) -> Iterator[MakeLab]:
    """`make_lab(hosts, link)` opens a lab that is closed after the test."""
    with ExitStack() as stack:

        def make(hosts: int, link: Link | None = None, **settings: Any) -> Lab:
            link = link or Link.of("50mbit", delay="2ms")
            return stack.enter_context(Lab(hosts, link, **settings))

        yield make

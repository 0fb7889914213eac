import pytest

from thinwire.errors import UsageError
from thinwire.lab.command import LabConfig, run_lab


def test_the_flags_make_links() -> None:
    config = LabConfig(
        hosts=3,
        rate="100mbit",
        delay="10ms",
        host=("2:up=10mbit,delay=30ms", "1:rate=1gbit,loss=0.1"),
    )
    lab = config.lab()
    assert lab.links is not None
    assert [(link.up, link.down, link.delay, link.loss) for link in lab.links] == [
        (1e8, 1e8, 0.01, 0),
        (1e9, 1e9, 0.01, 0.1),
        (1e7, 1e8, 0.03, 0),
    ]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"hosts": 0}, "hosts: got 0"),
        ({"per_host": 0}, "--per-host takes 1 to 400, got 0"),
        ({"rate": "quick"}, "rate: got 'quick'"),
        ({"delay": "10"}, "--delay: got '10'"),
        ({"host": ("4:up=1mbit",)}, "host 4 does not exist"),
        ({"host": ("1",)}, "host: got '1'"),
        ({"host": ("x:up=1mbit",)}, "host: got 'x:up=1mbit'"),
        ({"host": ("1:speed=1mbit",)}, "host: got '1:speed=1mbit'"),
        ({"host": ("1:loss=some",)}, "host: got '1:loss=some'"),
        ({"host": ("1:up=quick",)}, "rate: got 'quick'"),
    ],
)
def test_bad_flags_are_named(settings: dict[str, object], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        LabConfig(**settings).lab()  # type: ignore[arg-type]


def test_a_command_is_needed() -> None:
    with pytest.raises(UsageError, match="no command"):
        run_lab(LabConfig(), [])

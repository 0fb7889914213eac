import pytest

from thinwire.errors import UsageError
from thinwire.lab.link import Link, Path


def test_one_rate_or_two() -> None:
    assert Link.of("100mbit", delay="10ms") == Link(1e8, 1e8, 0.01)
    assert Link.of("100mbit", up="10mbit", delay="0") == Link(1e7, 1e8)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"rate": "1kbit"}, "up: got"),
        ({"down": "1kbit"}, "down: got"),
        ({"delay": "1ms", "jitter": "2ms"}, "jitter: got 2 ms"),
        ({"loss": 1.0}, "loss: got"),
        ({"loss": -0.1}, "loss: got"),
        ({"loss": float("nan")}, "loss: got"),
    ],
)
def test_bad_links_are_named(settings: dict[str, str], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        Link.of(**settings)  # type: ignore[arg-type]


def test_bad_seconds_are_named() -> None:
    with pytest.raises(UsageError, match="delay: got"):
        Link(1e8, 1e8, delay=-1)


def test_a_packet_never_takes_long() -> None:
    assert Link.of("1gbit").mtu == 65000
    assert Link.of("100mbit").mtu * 8 / 100e6 == pytest.approx(5e-3)
    assert Link.of("100mbit", up="1mbit").mtu == 1500


def test_a_path_is_half_of_both_ends() -> None:
    path = Path.between(Link(1e8, 1e8, 0.01, 0.002, 0.19), Link(1e8, 1e8, 0.03))
    assert path.delay == pytest.approx(0.02)
    assert path.jitter == pytest.approx(0.001)
    assert path.loss == pytest.approx(0.1)

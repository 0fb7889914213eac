import pytest

from thinwire.errors import UsageError
from thinwire.lab.units import format_duration, format_rate, parse_duration, parse_rate


@pytest.mark.parametrize(
    ("text", "rate"),
    [("100mbit", 1e8), ("1gbit", 1e9), ("1.5Gbit/s", 1.5e9), ("500 kbit", 5e5), ("9bitps", 9)],
)
def test_rates(text: str, rate: float) -> None:
    assert parse_rate(text) == pytest.approx(rate)


@pytest.mark.parametrize(
    "text", ["", "100", "fast", "0mbit", "-5mbit", "100MB/s", "100mbps", "1e3mbit", "nanbit"]
)
def test_bad_rates_are_named(text: str) -> None:
    with pytest.raises(UsageError, match="rate: got") as caught:
        parse_rate(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "seconds"), [("10ms", 0.01), ("1s", 1), ("250us", 250e-6), ("0", 0), ("0.5 s", 0.5)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "10", "-1ms", "soon", "1min"])
def test_bad_durations_are_named(text: str) -> None:
    with pytest.raises(UsageError, match="duration: got"):
        parse_duration(text)


def test_formats() -> None:
    assert [format_rate(r) for r in (1e8, 1.5e9, 64e3, 9)] == [
        "100 Mbit/s",
        "1.5 Gbit/s",
        "64 kbit/s",
        "9 bit/s",
    ]
    assert [format_duration(s) for s in (0, 0.02, 2, 250e-6)] == ["0 s", "20 ms", "2 s", "250 us"]

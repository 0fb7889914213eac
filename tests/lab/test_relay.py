"""The packet engine under a virtual clock: every arrival can be worked out by hand."""

import socket
import struct

import pytest

from thinwire.lab.link import Link
from thinwire.lab.relay import Relay, address

RATE = 8e6  # bit/s: a byte takes a microsecond
US = 1e-6
UDP, TCP = 17, 6


def ip(source: int, target: int, size: int, port: int = 1, proto: int = UDP) -> bytes:
    """An IPv4 packet of `size` bytes in all; for TCP the header is 20 bytes long."""
    ends = socket.inet_aton(address(source)) + socket.inet_aton(address(target))
    head = struct.pack(">BBHHHBBH", 0x45, 0, size, 0, 0, 64, proto, 0) + ends
    body = struct.pack(">HH8xB", port, port, 5 << 4)
    return (head + body).ljust(size, b"\0")


def arrivals(relay: Relay) -> list[tuple[float, int, bytes]]:
    """(time, host, packet) of all that is under way, in the order of arrival."""
    found = []
    while (due := relay.next_time()) is not None:
        found += [(due, host, data) for host, data in relay.advance(due)]
    return found


def times(relay: Relay) -> list[float]:
    return [time for time, _, _ in arrivals(relay)]


def links(count: int, **settings: float) -> list[Link]:
    return [Link(**{"up": RATE, "down": RATE, **settings}) for _ in range(count)]


def test_rate_and_delay_are_paid_once() -> None:
    relay = Relay(links(2, delay=0.01))
    for _ in range(3):
        relay.push(1.0, 0, ip(0, 1, 1000))
    expected = [1.0 + 0.01 + n * 1000 * US for n in (1, 2, 3)]
    assert times(relay) == pytest.approx(expected)


def test_a_late_wake_up_loses_no_rate() -> None:
    relay = Relay(links(2))
    for _ in range(10):
        relay.push(0.0, 0, ip(0, 1, 1000))
    assert len(relay.advance(0.0025)) == 2
    assert len(relay.advance(0.0092)) == 7  # woken late: all that were due
    assert times(relay) == pytest.approx([0.010])


def test_both_directions_at_once_have_the_full_rate() -> None:
    relay = Relay(links(2))
    for _ in range(5):
        relay.push(0.0, 0, ip(0, 1, 1000))
        relay.push(0.0, 1, ip(1, 0, 1000))
    found = arrivals(relay)
    for host in (0, 1):
        assert [t for t, h, _ in found if h == host] == pytest.approx(
            [n * 1e-3 for n in range(1, 6)]
        )


def test_the_slower_end_sets_the_rate() -> None:
    slow_down = [Link(RATE, RATE), Link(RATE, RATE / 4)]
    slow_up = [Link(RATE / 4, RATE), Link(RATE, RATE)]
    for pair in (slow_down, slow_up):
        relay = Relay(pair)
        for _ in range(3):
            relay.push(0.0, 0, ip(0, 1, 1000))
        assert times(relay) == pytest.approx([0.004, 0.008, 0.012])


def test_a_slow_sender_leaves_a_fast_receiver_to_the_others() -> None:
    relay = Relay([Link(RATE / 10, RATE), Link(RATE, RATE), Link(RATE, RATE)])
    relay.push(0.0, 0, ip(0, 2, 1000))
    for _ in range(5):
        relay.push(0.0, 1, ip(1, 2, 1000))
    assert times(relay) == pytest.approx([0.002, 0.003, 0.004, 0.005, 0.006, 0.010])


def test_two_senders_share_a_receiver() -> None:
    relay = Relay(links(3))
    for _ in range(4):
        relay.push(0.0, 0, ip(0, 2, 1000))
        relay.push(0.0, 1, ip(1, 2, 1000))
    found = arrivals(relay)
    assert found[-1][0] == pytest.approx(0.008)
    senders = [data[15] - 1 for _, _, data in found]
    assert sorted(senders[:4]) == [0, 0, 1, 1]


def test_a_small_message_passes_another_flows_bulk() -> None:
    relay = Relay(links(2))
    for _ in range(50):
        relay.push(0.0, 0, ip(0, 1, 1000, port=1))
    relay.push(0.0, 0, ip(0, 1, 100, port=2))
    small = [time for time, _, data in arrivals(relay) if len(data) == 100]
    assert small == pytest.approx([0.0011])


def test_an_acknowledgement_passes_its_own_connections_bulk() -> None:
    relay = Relay(links(2))
    for _ in range(50):
        relay.push(0.0, 0, ip(0, 1, 1000, proto=TCP))
    relay.push(0.0, 0, ip(0, 1, 40, proto=TCP))
    small = [time for time, _, data in arrivals(relay) if len(data) == 40]
    assert small == pytest.approx([0.00104])


def test_jitter_varies_the_delay_and_keeps_the_order() -> None:
    relay = Relay(links(2, delay=0.01, jitter=0.008))
    for number in range(200):
        relay.advance(number * 1e-4)
        relay.push(number * 1e-4, 0, ip(0, 1, 30 + number))
    found = arrivals(relay)
    sizes = [len(data) for _, _, data in found]
    assert sizes == sorted(sizes)

    spread = Relay(links(2, delay=0.01, jitter=0.008))
    delays = []
    for number in range(200):  # a second apart: nothing to keep in order
        spread.push(float(number), 0, ip(0, 1, 40))
        delays.append(times(spread)[0] - number)
    assert min(delays) < 0.004
    assert max(delays) > 0.016
    assert sum(delays) / 200 == pytest.approx(0.01, rel=0.1)


def test_loss_is_the_asked_share_and_the_same_for_a_seed() -> None:
    def run(seed: int) -> tuple[list[int], int]:
        relay = Relay(links(2, loss=0.2), seed=seed)
        for number in range(1000):
            relay.push(0.0, 0, ip(0, 1, 30 + number))
        return [len(data) for _, _, data in arrivals(relay)], relay.tallies[0].lost

    first, lost = run(1)
    assert lost == 1000 - len(first)
    assert lost == pytest.approx(200, abs=50)
    assert run(1)[0] == first
    assert run(2)[0] != first


def test_a_partition_drops_what_is_under_way_and_heals() -> None:
    relay = Relay(links(3, delay=0.01))
    relay.push(0.0, 0, ip(0, 1, 1000))
    relay.push(0.0, 1, ip(1, 2, 1000))
    relay.push(0.0, 0, ip(0, 2, 1000))
    relay.advance(0.005)
    relay.partition(1, True)
    assert [host for _, host, _ in arrivals(relay)] == [2]
    relay.push(1.0, 1, ip(1, 0, 1000))
    relay.push(1.0, 0, ip(0, 1, 1000))
    assert arrivals(relay) == []
    relay.partition(1, False)
    relay.push(2.0, 0, ip(0, 1, 1000))
    assert len(arrivals(relay)) == 1
    assert sum(tally.cut for tally in relay.tallies) == 4


def test_a_new_rate_counts_from_the_next_packet() -> None:
    relay = Relay(links(2))
    for _ in range(3):
        relay.push(0.0, 0, ip(0, 1, 1000))
    relay.advance(0.0015)  # the second is on the wire
    relay.set_link(0, Link(RATE / 2, RATE))
    assert times(relay) == pytest.approx([0.002, 0.004])


def test_flush_forgets_everything() -> None:
    relay = Relay(links(2))
    for _ in range(3):
        relay.push(0.0, 0, ip(0, 1, 1000))
    relay.advance(0.0015)
    relay.flush()
    assert arrivals(relay) == []
    relay.push(1.0, 0, ip(0, 1, 1000))
    assert times(relay) == pytest.approx([1.001])


def test_strangers_are_ignored() -> None:
    relay = Relay(links(2))
    relay.push(0.0, 0, ip(0, 5, 100))  # no such host
    relay.push(0.0, 0, b"\x60" + bytes(60))  # IPv6
    relay.push(0.0, 0, b"")
    assert relay.next_time() is None
    assert relay.tallies[0].packets == 0

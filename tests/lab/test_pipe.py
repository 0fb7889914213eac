import pytest

from thinwire.lab import pipe
from thinwire.lab.pipe import Packet, Pipe


def packet(flow: bytes, size: int = 100) -> Packet:
    return Packet(bytes(size), flow, 0, 1)


def test_flows_take_turns() -> None:
    queue = Pipe(1e6)
    for flow in (b"a", b"a", b"a", b"b", b"c", b"b"):
        assert queue.add(packet(flow))
    assert [queue.pop().flow for _ in range(6)] == [b"a", b"b", b"c", b"a", b"b", b"a"]
    assert not queue
    assert queue.bytes == 0


def test_a_full_flow_drops_and_leaves_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipe, "FLOW_LIMIT", 250)
    monkeypatch.setattr(pipe, "PIPE_LIMIT", 350)
    queue = Pipe(1e6)
    assert [queue.add(packet(flow)) for flow in (b"a", b"a", b"a")] == [True, True, False]
    assert queue.add(packet(b"b"))
    assert not queue.add(packet(b"c"))  # the whole pipe is full

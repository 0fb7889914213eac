"""Pipe: one direction of one host's link, a queue per flow, served in turn.

A queue per flow, because in one common queue the acknowledgements of what a host receives would
wait behind the bulk data it sends, and both directions at once would get half the rate.
"""

from collections import deque

FLOW_LIMIT = 32 << 20  # bytes; TCP's own buffers keep a flow below this, a UDP flood is cut off
PIPE_LIMIT = 256 << 20  # bytes; bounds the relay's memory whatever the number of flows


class Packet:
    """An IP packet on its way; `last` is when its last bit reaches the far end's access link."""

    __slots__ = ("data", "flow", "last", "source", "target")

    def __init__(self, data: bytes, flow: bytes, source: int, target: int) -> None:
        self.data = data
        self.flow = flow
        self.source = source
        self.target = target
        self.last = 0.0


class Flow:
    __slots__ = ("bytes", "queue")

    def __init__(self) -> None:
        self.bytes = 0
        self.queue: deque[Packet] = deque()


class Pipe:
    def __init__(self, rate: float) -> None:
        self.rate = rate  # bit/s
        self.free = 0.0  # when the packet on the wire will have left it
        self.armed = False  # whether the relay holds an event that will call pop
        self.bytes = 0
        self._flows: dict[bytes, Flow] = {}
        self._turns: deque[Flow] = deque()

    def __bool__(self) -> bool:
        return bool(self._turns)

    def add(self, packet: Packet) -> bool:
        """Queue it; False when there is no room."""
        size = len(packet.data)
        flow = self._flows.get(packet.flow)
        if flow is None:
            if self.bytes + size > PIPE_LIMIT:
                return False
            flow = self._flows[packet.flow] = Flow()
            self._turns.append(flow)
        elif flow.bytes + size > FLOW_LIMIT or self.bytes + size > PIPE_LIMIT:
            return False
        flow.queue.append(packet)
        flow.bytes += size
        self.bytes += size
        return True

    def pop(self) -> Packet:
        """The next packet of the flow whose turn it is."""
        flow = self._turns.popleft()
        packet = flow.queue.popleft()
        size = len(packet.data)
        flow.bytes -= size
        self.bytes -= size
        if flow.queue:
            self._turns.append(flow)
        else:
            del self._flows[packet.flow]
        return packet

    def clear(self) -> None:
        self._flows.clear()
        self._turns.clear()
        self.bytes = 0
        self.armed = False

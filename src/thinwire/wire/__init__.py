"""Everything that crosses the network: the only code that calls torch.distributed's collectives."""

from thinwire.wire import topology
from thinwire.wire.account import Account
from thinwire.wire.flight import Flight
from thinwire.wire.wire import Wire
from thinwire.wire.world import World, init, shutdown

__all__ = ["Account", "Flight", "Wire", "World", "init", "shutdown", "topology"]

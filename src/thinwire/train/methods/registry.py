"""Methods by name. Each family's file lists its own; nothing else in the trainer, the command line
or the reports knows which methods there are.
"""

from thinwire.errors import UsageError
from thinwire.train.methods.dense import DENSE_METHODS
from thinwire.train.methods.gossip import DECENTRALIZED_METHODS
from thinwire.train.methods.local import LOCAL_METHODS
from thinwire.train.methods.method import Method
from thinwire.train.methods.onebit import ONE_BIT_METHODS
from thinwire.train.methods.pytorch import PEER_METHODS
from thinwire.train.methods.sparse import SPARSE_METHODS
from thinwire.train.methods.threshold import THRESHOLD_METHODS

METHODS: dict[str, Method] = {
    method.name: method
    for family in (
        DENSE_METHODS,
        LOCAL_METHODS,
        ONE_BIT_METHODS,
        SPARSE_METHODS,
        THRESHOLD_METHODS,
        DECENTRALIZED_METHODS,
        PEER_METHODS,
    )
    for method in family
}


def find_method(name: str) -> Method:
    if name not in METHODS:
        raise UsageError(f"--method takes one of {', '.join(METHODS)}; got {name!r}")
    return METHODS[name]

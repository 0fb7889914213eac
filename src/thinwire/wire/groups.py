"""Groups: a process group of its own for every wire, made by its members alone.

[Note: names of groups] The members of a new group find each other in the store under its name.
torch makes that name from the ranks and from how many groups this process has at the moment: ranks
that are in different numbers of groups never meet, and a group made after another was destroyed
finds the addresses that one has left. Here the name comes from the ranks and from how many wires
were ever made among them, which its members know alike.
"""

import hashlib
import threading
from collections import Counter
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

# Waiting is bounded by `Wire`, which can tell a slow link from a lost peer; the backend's own
# limit, which can not, is set out of the way.
NEVER = timedelta(hours=24)

_made: Counter[tuple[int, ...]] = Counter()
_naming = threading.Lock()


def new_group(ranks: list[int]) -> ProcessGroup:
    """A group of these ranks in ascending order; all of them call this, and nobody else."""
    members = tuple(sorted(ranks))
    with _naming:
        _made[members] += 1
        text = f"thinwire {members} {_made[members]}"
        name = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        torchs_own = c10d._process_group_name
        c10d._process_group_name = lambda *_, **__: name  # type: ignore[assignment]
        try:
            group = dist.new_group(list(members), timeout=NEVER, use_local_synchronization=True)
        finally:
            c10d._process_group_name = torchs_own
    assert isinstance(group, ProcessGroup)
    return group

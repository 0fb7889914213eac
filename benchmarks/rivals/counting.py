"""Counts the collectives that anybody in this process starts.

Import it before those who are to be counted: a library may keep the functions of torch.distributed
that it found at its own import. A batch of messages, in which thinwire's wire exchanges payloads
with all peers, counts as one collective; single isend and irecv cannot be wrapped (torch compares
them) and are not counted.
"""

from typing import Any

import torch.distributed as dist

_COUNTED = (
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "all_reduce", "all_to_all"),
    *("all_to_all_single", "barrier", "broadcast", "gather", "reduce", "reduce_scatter"),
    *("reduce_scatter_tensor", "scatter", "send", "recv", "batch_isend_irecv"),
)
_calls = 0


def calls() -> int:
    """So far."""
    return _calls


def _counted(original: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        global _calls
        _calls += 1
        return original(*args, **kwargs)

    return call


for _name in _COUNTED:
    if hasattr(dist, _name):
        setattr(dist, _name, _counted(getattr(dist, _name)))

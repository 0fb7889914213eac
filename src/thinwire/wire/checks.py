"""Checks of what only the wire knows: codecs and groups of ranks."""

from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from thinwire.checks import refusal
from thinwire.wire.codecs import NAMES, Codec, ErrorFeedback, Feedback

_WANTS = "an object of thinwire.codecs such as Int8()"


def require_codec(
    name: str, key: str, codec: Any, *, memory: bool = True, why: str = "each payload is another"
) -> None:
    """None, or a codec; with `memory` also one that keeps what it has lost for the next payload.

    Asked for when the method is built: on one rank nothing is sent, and nothing would ask later.
    """
    if codec is None or isinstance(codec, Codec) or (memory and isinstance(codec, Feedback)):
        return
    if isinstance(codec, Feedback):
        plain = f"{codec.codec!r}" if isinstance(codec, ErrorFeedback) else "a codec without it"
        raise ValueError(
            f"{name}({key}=...) takes no error feedback: it adds to a payload what the one before "
            f"has lost, and {why}; use {plain}"
        )
    raise refusal(name, key, f"{_WANTS}, or None", codec, hint=_hint(codec))


def _hint(given: Any) -> str:
    if isinstance(given, str) and given.partition("+")[0].partition(":")[0] in NAMES:
        return f"; names are for the command line, thinwire.codecs.parse({given!r}) makes one of it"
    if isinstance(given, type) and issubclass(given, Codec | Feedback):
        return f"; make one of it, {given.__name__}(...)"
    return ""


def require_group(name: str, key: str, group: Any) -> None:
    if group is None or isinstance(group, ProcessGroup | DeviceMesh):
        return
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"{name}({key}=...): this rank is no member of the group; make it only where the group "
            "includes the rank"
        )
    raise refusal(
        name, key, "a ProcessGroup, one dimension of a DeviceMesh, or None for all ranks", group
    )

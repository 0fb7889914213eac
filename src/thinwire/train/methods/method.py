"""Method: what the trainer and the command line know of a method."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from thinwire.train.methods.replica import Replica
from thinwire.wire.ranks import Group

Build = Callable[[nn.Module, torch.optim.Optimizer, Any, Group], Replica]


@dataclass(frozen=True)
class Method:
    name: str
    summary: str
    settings: type
    build: Build
    check: Callable[[Any], None] = lambda settings: None
    """Refuses bad settings with a UsageError before anything is started."""
    shardable: bool = True
    """Whether a replica may be spread over several ranks (--shards)."""
    first_steps: Callable[[Any], int] = lambda settings: 0
    """Steps after which the method begins to be itself: a run must have more."""
    averages: Callable[[Any], bool] = lambda settings: False
    """Whether its replicas average gradients exactly (`Replica.averages_gradients`), at first at
    least."""
    fits: Callable[[Any, int], None] = lambda settings, replicas: None
    """Refuses a number of replicas that the settings do not work with, with a UsageError."""
    stageable: bool = True
    """Whether a replica may be cut into stages (--stages)."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Flags of the trainer that this method sets unless told otherwise, by name."""
    slack: Callable[[Any], int] = lambda settings: 0
    """Steps by which the method lets replicas be apart; the trainer must not hold them closer."""

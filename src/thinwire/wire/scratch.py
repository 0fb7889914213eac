"""Scratch: buffers that are used again and again.

New ones would be new pages from the kernel for every bucket of every step, which costs several
times what is done with them.
"""

import threading

import torch
from torch import Tensor


class Scratch(threading.local):
    """One buffer for each use, device and type; every thread has its own."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, torch.device, torch.dtype], Tensor] = {}

    def take(self, like: Tensor, use: str) -> Tensor:
        """As many values as `like` has, with whatever is in them."""
        key = use, like.device, like.dtype
        if key not in self._held or self._held[key].numel() < like.numel():
            self._held[key] = torch.empty_like(like)
        return self._held[key][: like.numel()]

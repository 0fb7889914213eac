"""Dynamic thresholds, plain and sequential: what Threshold and the means that use it must give."""

from collections.abc import Sequence

import torch
from torch import Tensor

SMALL = 256


def is_refresh(step: int, refresh: int) -> bool:
    """Steps count from 1: 1, 2, 4, 8, ... below `refresh`, then every `refresh`."""
    powers = {2**i for i in range(40)}
    return step % refresh == 0 or (step < refresh and step in powers)


class Stream:
    """One side's memory of a buffer made of pieces (start, stop, whole?)."""

    def __init__(self, pieces: Sequence[tuple[int, int, bool]], density: float, refresh: int):
        self.pieces, self.density, self.refresh = pieces, density, refresh
        self.error: Tensor | None = None
        self.velocity: Tensor | None = None
        self.tau: dict[int, float] = {}
        self.step = 0
        self.counts: list[int] = []
        self.searches = 0

    def send(self, x: Tensor, momentum: float = 0.0) -> Tensor:
        self.step += 1
        if momentum:
            v = self.velocity
            self.velocity = x if v is None else torch.add(x, v, alpha=momentum)
            x = self.velocity
        f = x if self.error is None else x + self.error
        sent = torch.zeros_like(f)
        self.counts = []
        for number, (start, stop, whole) in enumerate(self.pieces):
            if whole:
                sent[start:stop] = f[start:stop].bfloat16().float()
                continue
            places = start + self._choose(number, f[start:stop])
            self.counts.append(len(places))
            sent[places] = f[places]
            if momentum and self.velocity is not None:
                self.velocity = self.velocity.clone()
                self.velocity[places] = 0
        self.error = f - sent
        return sent

    def _choose(self, number: int, f: Tensor) -> Tensor:
        keep = max(1, round(self.density * f.numel()))
        if keep == f.numel():
            return torch.arange(keep)
        order = f.abs().argsort(descending=True)
        kth = max(float(f.abs()[order[keep - 1]]), torch.finfo(torch.float32).tiny)
        tau = self.tau.get(number)
        count = 0 if tau is None else int((f.abs() >= tau).sum())
        away = count > 4 * keep or (2 * count < keep and tau != torch.finfo(torch.float32).tiny)
        if tau is None or is_refresh(self.step, self.refresh) or away:
            tau = kth
            self.searches += 1
        self.tau[number] = tau
        above = order[f.abs()[order] >= tau]
        return above[:keep].sort().values


def pieces_of(
    sizes: Sequence[int], begin: int = 0, end: int | None = None
) -> list[tuple[int, int, bool]]:
    """What begin..end has of tensors of these sizes, counted from begin."""
    end = sum(sizes) if end is None else end
    pieces, start = [], 0
    for size in sizes:
        first, last = max(start, begin), min(start + size, end)
        if first < last:
            pieces.append((first - begin, last - begin, size < SMALL))
        start += size
    return pieces


class Mean:
    """The mean over `ranks` of what each of them sends, over many steps."""

    def __init__(
        self,
        ranks: int,
        sizes: Sequence[int],
        density: float,
        refresh: int = 1000,
        momentum: float = 0.0,
    ):
        self.ranks, self.numel, self.momentum = ranks, sum(sizes), momentum
        parts = 1 if ranks <= 2 else ranks
        self.part = -(-self.numel // parts)
        self.spans = [(i * self.part, min((i + 1) * self.part, self.numel)) for i in range(parts)]
        cut = [(a + s, b + s, w) for s, e in self.spans for a, b, w in pieces_of(sizes, s, e)]
        self.workers = [Stream(cut, density, refresh) for _ in range(ranks)]
        self.owners = [Stream(pieces_of(sizes, s, e), density, refresh) for s, e in self.spans]

    def of(self, values: Sequence[Tensor]) -> Tensor:
        pairs = zip(self.workers, values, strict=True)
        mean = sum(worker.send(x, self.momentum) for worker, x in pairs) / self.ranks
        assert isinstance(mean, Tensor)
        if self.ranks <= 2:
            return mean
        parts = zip(self.owners, self.spans, strict=True)
        return torch.cat([owner.send(mean[begin:end]) for owner, (begin, end) in parts])

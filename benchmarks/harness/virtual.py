"""Virtual replicas: several in one process, a thread each, for learning curves without a network.

The optimizers are the real ones. Only their wire is replaced, by one that averages among threads:
codecs encode and decode as they do on the way, and nothing takes any time. What is measured here is
what a method learns, never how fast.
"""

import statistics
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.harness.learning import train, validate
from thinwire.methods.base import WireOptimizer
from thinwire.methods.dense.gradient_average import GradientAverage
from thinwire.train.data.corpus import Corpus
from thinwire.train.data.tokens import Batches
from thinwire.train.loop.optimizers import OptimizerConfig
from thinwire.train.tasks.models import ModelConfig, build_model
from thinwire.wire.account import Account
from thinwire.wire.codecs import Codec, Dense, Feedback
from thinwire.wire.collectives import all_reduce_bytes
from thinwire.wire.flight import Flight, all_finite
from thinwire.wire.world import World

T = TypeVar("T")


def train_virtual(
    make: Callable[[nn.Module], WireOptimizer],
    corpus: Corpus,
    *,
    replicas: int,
    steps: int,
    seed: int,
    settings: OptimizerConfig,
    batch: int,
    context: int,
    windows: int,
    averaged: Callable[[GradientAverage], None] = lambda optimizer: None,
) -> dict[str, float]:
    """A gpt-0.3m on virtual replicas: the validation loss of their mean, the bytes that one of them
    has sent, and `apart`, how far they were from the mean in the end, relative to its norm."""
    world = VirtualWorld(replicas)

    def replica(rank: int) -> dict[str, float]:
        with world.lock:  # one random number generator for all threads
            model = build_model(ModelConfig(), corpus.vocab, context, seed)
        optimizer = world.build(lambda: make(model))
        batches = Batches(corpus.train, context, batch, rank, replicas, seed)
        train(model, optimizer, batches, settings, steps, averaged)
        sent, own = optimizer.account.bytes, _weights(model)
        optimizer.finish()
        mean = _weights(model)
        apart = float((own - mean).norm() / mean.norm())
        loss = validate(model, corpus, optimizer.wire, context=context, windows=windows)
        return {"loss": loss, "bytes": sent, "apart": apart}

    answers = world.run(replica)
    return answers[0] | {"apart": statistics.mean(each["apart"] for each in answers)}


def _weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


class VirtualWorld:
    """The meeting point of `size` replicas. Rank and wire of a thread are its own."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.RLock()
        self._open: dict[
            tuple[str, int], list[tuple[int, Tensor, Codec | Feedback, Future[float]]]
        ] = {}
        self._own = threading.local()

    def run(self, replica: Callable[[int], T]) -> list[T]:
        """replica(rank) in a thread for each rank; the first error of any of them is raised."""
        results: list[Future[T]] = [Future() for _ in range(self.size)]

        def thread(rank: int) -> None:
            self._own.rank = rank
            try:
                results[rank].set_result(replica(rank))
            except BaseException as error:
                for result in results:
                    if not result.done():
                        result.set_exception(error)

        for rank in range(self.size):
            threading.Thread(target=thread, args=(rank,), daemon=True).start()
        return [result.result() for result in results]

    def build(self, make: Callable[[], T]) -> T:
        """make(), with a virtual wire wherever an optimizer of thinwire makes one."""
        module = sys.modules[WireOptimizer.__module__]  # where they all get it from
        with self.lock, mock.patch.object(module, "Wire", self._wire):
            return make()

    def _wire(self, group: Any = None, *, name: str = "wire") -> "VirtualWire":
        return VirtualWire(self, self._own.rank, name)

    def hand_in(
        self, key: tuple[str, int], entry: tuple[int, Tensor, Codec | Feedback, Any]
    ) -> None:
        """The last replica to come averages for all of them."""
        with self.lock:
            entries = self._open.setdefault(key, [])
            entries.append(entry)
            if len(entries) < self.size:
                return
            del self._open[key]
        entries.sort(key=lambda e: e[0])
        flats = [flat for _, flat, _, _ in entries]
        if isinstance(entry[2], Feedback):
            mean = _remembered_mean(flats, [codec for _, _, codec, _ in entries])
        else:
            mean = _mean(flats, entry[2])
        for _, flat, _, arrival in entries:
            flat.copy_(mean)
            arrival.set_result(0.0)


class VirtualWire:
    """The part of `Wire` that optimizers use."""

    def __init__(self, meeting: VirtualWorld, rank: int, name: str) -> None:
        self._meeting, self.rank, self.size, self.name = meeting, rank, meeting.size, name
        self.world = World(rank, meeting.size, torch.device("cpu"), timeout=60.0, heartbeat=None)
        self.ranks = list(range(meeting.size))
        self.account = Account()
        self._issued = 0

    def mean(self, flat: Tensor, codec: Codec | Feedback | None = None) -> Flight:
        flight, arrival = Flight(flat, self.account), Future[float]()
        flight._lands_with(arrival)
        self.account.launched()
        self._issued += 1
        self.account.sent(_sent_bytes(flat, codec or Dense(flat.dtype), self.size))
        entry = (self.rank, flat, codec or Dense(flat.dtype), arrival)
        self._meeting.hand_in((self.name, self._issued), entry)
        return flight

    def agree(self, values: Sequence[float], how: str = "max") -> list[float]:
        rows = torch.zeros(self.size, len(values), dtype=torch.float64)
        rows[self.rank] = torch.tensor(list(values), dtype=torch.float64)
        rows = self.mean(rows.view(-1)).wait().view(rows.shape).mul_(self.size)
        return {"max": rows.amax(0), "min": rows.amin(0), "sum": rows.sum(0)}[how].tolist()

    def union(self, flags: Sequence[bool]) -> Flight:
        answer = torch.tensor(self.agree([float(flag) for flag in flags]), dtype=torch.uint8)
        return Flight(answer, self.account)

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """For the comparison of settings at the start: here they come from one program."""
        return [payload] * self.size


def _mean(payloads: list[Tensor], codec: Codec) -> Tensor:
    """As the wire computes it: summed as it is, or coded on the way there and on the way back."""
    if isinstance(codec, Dense) and codec.summable:
        return torch.stack(payloads).sum(0).div_(len(payloads))
    rows = len(payloads)
    return _coded(torch.stack([_coded(p, codec, rows) for p in payloads]).mean(0), codec, rows)


def _coded(values: Tensor, codec: Codec, rows: int) -> Tensor:
    part = codec.part(values.numel(), rows)
    return codec.decode(codec.encode(values, rows, part), part, torch.empty_like(values))


def _remembered_mean(payloads: list[Tensor], codecs: Sequence[Any]) -> Tensor:
    """The same with codecs that remember: every replica has its own, on both sides."""
    size, numel = len(payloads), payloads[0].numel()
    gathers = codecs[0].gathers(size)
    split = codecs[0].split(numel, 1 if gathers else size)
    pairs = zip(codecs, payloads, strict=True)
    sent = [codec.encode_worker(x.clone(), split) for codec, x in pairs]
    scratch = torch.empty(numel)
    decoded = [codecs[0].decode(rows, split, 0, scratch).clone() for rows in sent]
    mean = torch.stack(decoded).sum(0).div_(size)
    if not gathers:
        owned = mean.split(split.part)
        rows = [codecs[r].encode_owner(x.clone(), split, r) for r, x in enumerate(owned)]
        mean = codecs[0].decode(torch.cat(rows), split, 0, scratch).clone()
    for codec in codecs:
        codec.landed(all_finite(mean))
    return mean


def _sent_bytes(flat: Tensor, codec: Codec | Feedback, size: int) -> int:
    """What `Wire` would count."""
    if isinstance(codec, Dense) and codec.summable:
        return all_reduce_bytes(flat.numel() * codec.dtype.itemsize, size)
    gathers = codec.gathers(size)
    split = codec.split(flat.numel(), 1 if gathers else size)
    return (size - 1) * codec.row_bytes(split) * (1 if gathers else 2)

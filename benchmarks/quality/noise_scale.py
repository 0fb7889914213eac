"""The gradient noise scale: against the truth, from ranks and from micro-batches, and its cost.

    python -m benchmarks.quality.noise_scale             known problems, a GPT, the time it takes
    python -m benchmarks.quality.noise_scale --quick     fewer steps

Four real workers. Known: loss |w - sample|² / 2 with Gaussian samples, whose noise scale is known
exactly, for three values of it. GPT: gpt-0.3m after some steps of AdamW; the truth at those weights
is taken from the gradients of single sequences, one by one. `ranks` compares each rank's gradient
with the mean of all, `micro-batches` each pass with its own rank's step. Cost: the same step with
and without the hooks, alternating in one process. Prints tables and, as its last line, one JSON
object: {"known": [...], "gpt": {...}, "cost": {...}}.
"""

import math
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

import thinwire as tw
from benchmarks.harness.arguments import Size, Table, end, parser
from benchmarks.harness.hosts import on_hosts
from benchmarks.harness.learning import joined
from thinwire.train.data.corpus import load_corpus
from thinwire.train.data.tokens import Batches, DataConfig
from thinwire.train.tasks.models import ModelConfig, build_model

PASSES = 2
VALUES, SPREAD = 1000, 1.0
TRUE = (20.0, 131.5, 2000.0)
BATCH, CONTEXT, LR = 4, 64, 2e-3


class Known(nn.Module):
    """At distance d from the centre of the samples: noise scale VALUES SPREAD² / d²."""

    centre: Tensor

    def __init__(self, true: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(VALUES))
        self.register_buffer("centre", torch.full((VALUES,), SPREAD / math.sqrt(true)))

    def forward(self, draw: torch.Generator, batch: int) -> Tensor:
        samples = self.centre + SPREAD * torch.randn(batch, VALUES, generator=draw)
        return (self.w - samples).square().sum(1).mean() / 2


def watch(model: nn.Module, batch: float, unit: str) -> dict[str, tw.NoiseScale]:
    return {
        name: tw.NoiseScale(model.parameters(), batch=batch, decay=0.995, unit=unit)
        for name in ("ranks", "micro-batches")
    }


def observe(seen: dict[str, tw.NoiseScale], optimizer: tw.GradientAverage) -> None:
    """After the passes of a step: once with this rank's gradients, once with the mean."""
    seen["micro-batches"].step()
    optimizer.average()
    seen["ranks"].step(replicas=optimizer.wire.size)


def results(seen: dict[str, tw.NoiseScale]) -> dict[str, list[float]]:
    for estimate in seen.values():
        estimate.finish()
    return {name: [estimate.value, estimate.error] for name, estimate in seen.items()}


def known(true: float, steps: int) -> dict[str, Any]:
    model = Known(true)
    optimizer = tw.GradientAverage(torch.optim.SGD(model.parameters(), lr=0.0), overlap=False)
    seen = watch(model, 8, "samples")
    draw = torch.Generator().manual_seed(int(true) + optimizer.wire.rank)
    for _ in range(steps):
        for _ in range(PASSES):
            (model(draw, 8) / PASSES).backward()
        observe(seen, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return {"true": true, "steps": steps} | results(seen)


def gpt(train_steps: int, steps: int, sequences: int) -> dict[str, Any]:
    corpus = load_corpus(DataConfig())
    model = build_model(ModelConfig(), corpus.vocab, CONTEXT, 0)
    inner = torch.optim.AdamW(model.parameters(), lr=LR)
    optimizer = tw.GradientAverage(inner, overlap=False)
    wire = optimizer.wire
    batches = Batches(corpus.train, CONTEXT, BATCH, wire.rank, wire.size, 0)
    seen: dict[str, tw.NoiseScale] = {}
    for step in range(train_steps + steps):
        if step == train_steps:  # from here on the weights stay
            inner.param_groups[0]["lr"] = 0.0
            seen = watch(model, BATCH * CONTEXT, "tokens")
        for _ in range(PASSES):
            (model(*batches.next()) / PASSES).backward()
        if seen:
            observe(seen, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    found: dict[str, Any] = {"steps": steps} | results(seen)
    found["reading"] = seen["ranks"].reading()
    found["true"] = one_by_one(model, wire, Batches(corpus.train, CONTEXT, 1, 0, 1, 99), sequences)
    return found


def one_by_one(model: nn.Module, wire: tw.Wire, batches: Batches, count: int) -> float:
    """From the gradients of single sequences: their variance, and the mean's norm less its noise.

    The ranks share the sequences out.
    """
    total = torch.zeros(sum(p.numel() for p in model.parameters()))
    squares = 0.0
    for number in range(count):
        x, y = batches.next()
        if number % wire.size != wire.rank:
            continue
        model.zero_grad()
        model(x, y).backward()
        g = torch.cat([p.grad.view(-1) for p in model.parameters()])  # type: ignore[union-attr]
        total += g
        squares += float(g.square().sum())
    mean = wire.mean(total).wait() * (wire.size / count)
    squares = wire.agree([squares], "sum")[0] / count
    noise = (squares - float(mean.square().sum())) * count / (count - 1)
    return CONTEXT * noise / (float(mean.square().sum()) - noise / count)


def cost(steps: int) -> dict[str, float]:
    """Milliseconds of a step of one worker, alternating with and without."""
    corpus = load_corpus(DataConfig())
    model = build_model(ModelConfig(), corpus.vocab, CONTEXT, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    batches = Batches(corpus.train, CONTEXT, BATCH, 0, 1, 0)
    taken: dict[bool, list[float]] = {True: [], False: []}
    for step in range(2 * steps):
        on = step % 2 == 1
        noise = tw.NoiseScale(model.parameters(), batch=1, every=1) if on else None
        x, y = batches.next()
        start = time.perf_counter()
        model(x, y).backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        if noise is not None:
            noise.step(norm, replicas=2)
        optimizer.step()
        taken[on].append(1000 * (time.perf_counter() - start))
        optimizer.zero_grad()
        if noise is not None:
            noise.close()
    plain, measured = (statistics.median(taken[on][3:]) for on in (False, True))
    return {"without_ms": plain, "with_ms": measured, "share": measured / plain - 1}


def worker(size: Size) -> dict[str, Any]:
    size = Size(size)
    steps = size.of(full=400, quick=80, tiny=4)
    trained, watched, sequences = size.of(full=(150, 300, 2048), quick=(10, 40, 64), tiny=(1, 4, 4))
    with joined():
        found: dict[str, Any] = {"known": [known(true, steps) for true in TRUE]}
        found["gpt"] = gpt(trained, watched, sequences)
        return found


def report(found: dict[str, Any]) -> None:
    table = Table("", "truth", "ranks", "micro-batches", "apart, in errors", first=24, width=22)
    for name, entry in [
        *((f"known, {e['true']:g} samples", e) for e in found["known"]),
        ("gpt-0.3m, tokens", found["gpt"]),
    ]:
        (a, da), (b, db) = entry["ranks"], entry["micro-batches"]
        entry["off"] = {"ranks": a / entry["true"] - 1, "micro-batches": b / entry["true"] - 1}
        entry["apart in errors"] = abs(a - b) / (math.hypot(da, db) or math.nan)
        cells = [
            f"{v:,.1f} ± {d:,.1f} ({v / entry['true'] - 1:+.0%})" for v, d in ((a, da), (b, db))
        ]
        table.row(name, f"{entry['true']:,.1f}", *cells, f"{entry['apart in errors']:.1f}")
    print(found["gpt"]["reading"])
    figures = found["cost"]
    print(
        f"a step of gpt-0.3m: {figures['without_ms']:.2f} ms, with the hooks "
        f"{figures['with_ms']:.2f} ms ({figures['share']:+.1%})"
    )


def main() -> None:
    size = parser(__doc__).parse_args().size
    ranks = size.of(full=4, quick=4, tiny=2)
    found = on_hosts(worker, size, hosts=ranks, link=None)[0]
    torch.set_num_threads(1)
    found["cost"] = cost(size.of(full=150, quick=20, tiny=4))
    report(found)
    end(found, size)


if __name__ == "__main__":
    main()

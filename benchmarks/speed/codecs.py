"""Encode and decode of every coarse codec over the time of copying the tensor.

    python -m benchmarks.speed.codecs            20M elements, about half a minute
    python -m benchmarks.speed.codecs --quick    2M elements

One thread. The copy and all codecs take turns; the ratio is that of the medians. On a busy machine
the longer jobs are interrupted more often, and come out too slow. Last line: JSON,
{"ratio": {codec: x}}.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.harness.arguments import Table, end, parser
from benchmarks.harness.interleaved import interleave
from thinwire.wire.codecs import Int4, Int8, OneBit
from thinwire.wire.codecs.base import Codec

CODECS: dict[str, Codec] = {"onebit": OneBit(), "int8": Int8(), "int4": Int4()}


def main() -> None:
    size = parser(__doc__).parse_args().size
    torch.set_num_threads(1)
    numel, turns = size.of(full=(20_000_000, 15), quick=(2_000_000, 5), tiny=(20_000, 1))
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    out = torch.empty_like(x)
    jobs: dict[str, Callable[[], object]] = {"copy": lambda: out.copy_(x)}
    for name, codec in CODECS.items():
        part = codec.part(numel, 1)
        payload = codec.encode(x, 1, part)
        jobs[f"{name} encode"] = partial(codec.encode, x, 1, part)
        jobs[f"{name} decode"] = partial(codec.decode, payload, part, out)
    times = medians(jobs, turns)
    copy = times["copy"]
    print(f"{numel:,} float32, one thread; copy {copy * 1e3:.1f} ms (median of {turns})")
    table, ratio = Table("codec", "encode ms", "decode ms", "both/copy", "bits", first=10), {}
    for name, codec in CODECS.items():
        encode, decode = times[f"{name} encode"], times[f"{name} decode"]
        ratio[name] = round((encode + decode) / copy, 2)
        shown = f"{encode * 1e3:.1f}", f"{decode * 1e3:.1f}", f"{ratio[name]:.2f}"
        table.row(name, *shown, f"{codec.bits:.2f}")
    end({"ratio": ratio}, size)


def medians(jobs: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Median seconds of each job, one after the other in every turn; the first turn warms up."""
    times: dict[str, list[float]] = {name: [] for name in jobs}

    def timed(name: str) -> None:
        start = time.perf_counter()
        jobs[name]()
        times[name].append(time.perf_counter() - start)

    interleave([partial(timed, name) for name in jobs], turns + 1)
    return {name: statistics.median(taken[1:]) for name, taken in times.items()}


if __name__ == "__main__":
    main()

"""Encode and decode of every coarse codec over the time of copying the tensor.

    python benchmarks/codecs.py            20M elements, about half a minute
    python benchmarks/codecs.py --quick    2M elements

One thread. The copy and all codecs take turns; the ratio is that of the medians. On a busy machine
the longer jobs are interrupted more often, and come out too slow. Last line: JSON,
{"ratio": {codec: x}}.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from thinwire.wire.codecs import Int4, Int8, OneBit
from thinwire.wire.codecs.base import Codec

CODECS: dict[str, Codec] = {"onebit": OneBit(), "int8": Int8(), "int4": Int4()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the elements")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    numel, turns = (2_000_000, 5) if quick else (20_000_000, 15)
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    out = torch.empty_like(x)
    jobs: dict[str, Callable[[], object]] = {"copy": lambda: out.copy_(x)}
    for name, codec in CODECS.items():
        part = codec.part(numel, 1)
        payload = codec.encode(x, 1, part)
        jobs[f"{name} encode"] = partial(codec.encode, x, 1, part)
        jobs[f"{name} decode"] = partial(codec.decode, payload, part, out)
    times = take_turns(jobs, turns)
    copy = times["copy"]
    print(f"{numel:,} float32, one thread; copy {copy * 1e3:.1f} ms (median of {turns})")
    print(f"  {'codec':10}{'encode':>10}{'decode':>10}{'both/copy':>12}{'bits':>8}")
    ratio = {}
    for name, codec in CODECS.items():
        encode, decode = times[f"{name} encode"], times[f"{name} decode"]
        ratio[name] = round((encode + decode) / copy, 2)
        print(
            f"  {name:10}{encode * 1e3:7.1f} ms{decode * 1e3:7.1f} ms{ratio[name]:12.2f}"
            f"{codec.bits:8.2f}"
        )
    print(json.dumps({"ratio": ratio}))


def take_turns(jobs: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Median seconds of each job, one after the other in every turn; the first turn warms up."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(turns + 1):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in times.items()}


if __name__ == "__main__":
    main()

"""What decentralized methods cost a GPT in loss, and what they send to whom.

    python -m benchmarks.quality.decentralized            4 emulated hosts in a ring, gpt-0.3m
    python -m benchmarks.quality.decentralized --quick    fewer steps
    python -m benchmarks.quality.decentralized --methods "data parallel,DecentLaM,DmSGD" --seeds 3
    python -m benchmarks.quality.decentralized --results FILE    keep each run, skip those kept

Momentum SGD, data parallelism beside the decentralized methods, and the bytes that each rank's
kernel says each of its peers has acknowledged. Nothing here is timed. Prints a table and, as its
last line, one JSON object: {"steps", "lr", "momentum", "methods": {method: {"loss", "losses",
"loss / data parallel", "acknowledged bytes a step": {peer: ...}, ...}}}.
"""

import os
import socket
import struct
from pathlib import Path
from typing import Any

import torch

import thinwire as tw
from benchmarks.harness.arguments import Size, Table, end, parser
from benchmarks.harness.learning import joined, validate
from benchmarks.harness.results import Job, Record, Results, run_on_hosts
from benchmarks.harness.telling import tell
from thinwire.lab import Link
from thinwire.lab.relay import address
from thinwire.train.data.corpus import Corpus, load_corpus
from thinwire.train.data.tokens import Batches, DataConfig
from thinwire.train.loop.optimizers import OptimizerConfig, learning_rate
from thinwire.train.tasks.models import ModelConfig, build_model
from thinwire.wire.wire import Wire

LR, BETA, CLIP = 0.1, 0.9, 1.0
METHODS = "data parallel,DecentLaM,DmSGD,DecentLaM int8"


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--seeds", type=int, default=1)
    arguments.add_argument("--steps", type=int)
    arguments.add_argument("--methods", default=METHODS)
    arguments.add_argument("--results", type=Path, help="a file of JSON lines")
    given = arguments.parse_args()
    steps = given.steps or given.size.of(full=400, quick=30, tiny=3)
    jobs: list[Job] = [
        {"method": method, "seed": seed, "steps": steps}
        for seed in range(given.seeds)
        for method in given.methods.split(",")
    ]
    records = run_on_hosts(
        jobs,
        Results(given.results),
        worker,
        given.size,
        hosts=given.size.of(full=4, quick=4, tiny=2),
        link=given.size.emulated(Link.of("1gbit", delay="1ms")),
    )
    report(records, steps, given.size)


def worker(jobs: list[Job], size: Size) -> None:
    """Every run in turn; rank 0 tells each loss, and what it has sent to whom."""
    with joined() as world:
        corpus = load_corpus(DataConfig())
        for job in jobs:
            record = train(job, corpus, Size(size))
            if world.rank == 0:
                tell(job | record)


def acknowledged() -> dict[str, int]:
    """Bytes that each peer's kernel has acknowledged, over all TCP sockets of this process."""
    totals: dict[str, int] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as sock:
                peer = sock.getpeername()[0]
                info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
        except (OSError, IndexError, TypeError):
            continue  # no connected TCP socket
        totals[peer] = totals.get(peer, 0) + struct.unpack_from("Q", info, 120)[0]
    return totals


def build(method: str, parameters: list[torch.nn.Parameter]) -> tw.WireOptimizer:
    if method == "data parallel":
        return tw.GradientAverage(torch.optim.SGD(parameters, lr=LR, momentum=BETA), overlap=False)
    kind, _, codec = method.partition(" ")
    settings: dict[str, Any] = {} if kind == "DSGD" else {"momentum": BETA}
    if kind == "DSGD":
        return tw.DSGD(parameters, LR / (1 - BETA), clip=CLIP)
    if codec:
        settings["codec"] = tw.codecs.parse(codec)
    if kind == "DmSGD":
        return tw.DmSGD(parameters, LR, clip=CLIP, **settings)
    return tw.DecentLaM(parameters, LR, clip=CLIP, **settings)


def train(job: Job, corpus: Corpus, size: Size) -> Record:
    batch, context, windows = size.of(full=(4, 64, 400), quick=(4, 64, 400), tiny=(1, 16, 4))
    steps = job["steps"]
    model = build_model(ModelConfig(), corpus.vocab, context, job["seed"])
    parameters = list(model.parameters())
    optimizer = build(job["method"], parameters)
    wire = optimizer.wire
    schedule = OptimizerConfig(lr=1.0)
    peaks = [group["lr"] for group in optimizer.param_groups]
    batches = Batches(corpus.train, context, batch, wire.rank, wire.size, job["seed"])
    before: tuple[int, dict[str, int]] = (0, {})
    for step in range(steps):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * learning_rate(schedule, step, steps)
        model(*batches.next()).backward()
        if isinstance(optimizer, tw.GradientAverage):
            optimizer.average()
            torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:  # the first also agrees on settings
            before = (optimizer.account.bytes, acknowledged())
    wire.barrier()  # what was sent is acknowledged
    counted = (optimizer.account.bytes - before[0]) / (steps - 1)
    sent = sent_to_peers(before[1], wire, steps - 1)
    with optimizer.consensus():
        loss = validate(model, corpus, wire, context=context, windows=windows)
    wire.close()
    return {
        "loss": loss,
        "parameters": sum(p.numel() for p in parameters),
        "account bytes a step": counted,
        "acknowledged bytes a step": sent,
    }


def sent_to_peers(before: dict[str, int], wire: Wire, steps: int) -> dict[str, float]:
    """Bytes a step that every other rank has acknowledged since."""
    now = acknowledged()
    return {
        str(rank): (now.get(address(rank), 0) - before.get(address(rank), 0)) / steps
        for rank in range(wire.size)
        if rank != wire.rank
    }


def report(records: list[Record], steps: int, size: Size) -> None:
    """Losses over the seeds, and bytes to each peer beside 4 bytes a parameter to a neighbour."""
    found: dict[str, Any] = {}
    for record in records:
        entry = found.setdefault(record["method"], record | {"losses": []})
        entry["losses"].append(round(record["loss"], 4))
    base = found.get("data parallel")
    peers = records[0]["acknowledged bytes a step"]
    print(f"{len(peers) + 1} hosts, gpt-0.3m, {steps} steps, lr {LR}, momentum {BETA}")
    table = Table(
        "method", "loss", "to DP", *(f"MB a step, 0 to {peer}" for peer in peers), first=20
    )
    for name, entry in found.items():
        loss = entry["loss"] = sum(entry["losses"]) / len(entry["losses"])
        mean = sum(base["losses"]) / len(base["losses"]) if base else float("nan")
        entry["loss / data parallel"] = round(loss / mean, 4)
        sent = (f"{each / 1e6:.4f}" for each in entry["acknowledged bytes a step"].values())
        table.row(name, f"{loss:.4f}", f"{loss / mean:.4f}", *sent)
        for key in ("method", "seed", "steps"):
            entry.pop(key)
    print(f"predicted to each neighbour: {4 * records[0]['parameters'] / 1e6:.4f} MB (float32)")
    end({"steps": steps, "lr": LR, "momentum": BETA, "methods": found}, size)


if __name__ == "__main__":
    main()

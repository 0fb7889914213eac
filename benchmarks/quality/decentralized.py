"""What talking to neighbours alone costs in accuracy, and what it sends.

    python benchmarks/decentlam.py                    both parts
    python benchmarks/decentlam.py --part quadratic   16 nodes in a ring, least squares
    python benchmarks/decentlam.py --part lab         4 emulated hosts in a ring, gpt-0.3m
    python benchmarks/decentlam.py --quick            fewer steps and ranks: under a minute

Quadratic: every node has a least-squares problem of its own, gradients are exact, and the error is
how far the nodes come to rest from the common optimum, mean_i |x_i - x*|² / |x*|². Nodes are rows
of a matrix in one process; real ranks run the first steps of the same, and must agree. Beside the
methods: codecs, applied to weights as they are and to the news in them; Adam's preconditioner.
Lab: a GPT with momentum SGD, data parallelism beside the decentralized methods, and the bytes that
each rank's kernel says each of its peers has acknowledged. Prints tables and, as its last line, one
JSON object: {"quadratic": {...}, "lab": {...}}.
"""

import argparse
import json
import math
import os
import socket
import struct
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import thinwire as tw
from thinwire.lab import Lab, Link
from thinwire.lab.relay import address
from thinwire.train.corpus import load_corpus
from thinwire.train.data import Batches, DataConfig, validation_batches
from thinwire.train.models import ModelConfig, build_model
from thinwire.train.optimizers import OptimizerConfig, learning_rate
from thinwire.wire.codecs import Codec, Dense, Int4, Int8, OneBit

NODES, ROWS, VALUES, BETA = 16, 50, 30, 0.9
RATES = (1e-3, 3e-3, 1e-2, 2e-2)
HOSTS, BATCH, CONTEXT, LR, CLIP = 4, 4, 64, 0.1, 1.0
VALIDATION_WINDOWS = 400

# -- quadratic -------------------------------------------------------------------------------------


class Quadratic:
    """f_i(x) = |A_i x - b_i|² / (2 rows), with another solution on every node."""

    def __init__(self, nodes: int) -> None:
        draw = torch.Generator().manual_seed(0)
        a = torch.randn(nodes, ROWS, VALUES, generator=draw, dtype=torch.float64)
        common = torch.randn(VALUES, generator=draw, dtype=torch.float64)
        own = common + torch.randn(nodes, VALUES, generator=draw, dtype=torch.float64)
        b = torch.einsum("nrv,nv->nr", a, own)
        self.curve = torch.einsum("nrv,nrw->nvw", a, a) / ROWS
        self.slope = torch.einsum("nrv,nr->nv", a, b) / ROWS
        self.best = torch.linalg.solve(self.curve.mean(0), self.slope.mean(0))

    def gradient(self, x: Tensor) -> Tensor:
        """(nodes, values) -> the same: every node's own, at its own x."""
        return torch.einsum("nvw,nw->nv", self.curve, x) - self.slope

    def error(self, x: Tensor) -> float:
        return float((x - self.best).square().sum(1).mean() / self.best.square().sum())


def rest(
    method: str,
    problem: Quadratic,
    w: Tensor,
    lr: float,
    steps: int,
    *,
    codec: Codec | None = None,
    as_they_are: bool = False,
    adam: bool = False,
) -> Tensor:
    """Where the nodes are after so many steps, all of them rows of one matrix."""
    x = torch.zeros_like(problem.slope)
    m, u, v, told = (torch.zeros_like(x) for _ in range(4))
    for _ in range(steps):
        g = problem.gradient(x)
        if adam:
            v = 0.99 * v + 0.01 * g * g
            g = g / (v.sqrt() + 1e-3)
        if method == "DmSGD":
            m = BETA * m + g
        z = x - lr * (m if method == "DmSGD" else g)
        if codec is None:
            mixed = w @ z
        elif as_they_are:
            q = _coded(z, codec)
            mixed = w @ q + w.diagonal().unsqueeze(1) * (z - q)
        else:
            told = told + _coded(z - told, codec)
            mixed = z + w @ told - told
        if method == "DecentLaM":
            u = BETA * u + x - mixed
            x = x - u
        else:
            x = mixed
    return x


def _coded(rows: Tensor, codec: Codec) -> Tensor:
    part = codec.part(rows.shape[1], 1)
    values = rows.float()
    return torch.stack(
        [codec.decode(codec.encode(r, 1, part), part, torch.empty_like(r)) for r in values]
    ).to(rows.dtype)


def quadratic(quick: bool) -> dict[str, Any]:
    problem, ring = Quadratic(NODES), tw.topology.ring(NODES)
    rates = RATES[1:] if quick else RATES
    found: dict[str, Any] = {"nodes": NODES, "momentum": BETA, "gap": round(ring.gap, 4)}
    found["error"], found["dmsgd / decentlam"] = {}, {}
    print(f"\n{ring.describe()}, momentum {BETA}: error at rest")
    print(f"{'lr':>8}{'DSGD':>12}{'DmSGD':>12}{'DecentLaM':>12}{'DmSGD / DecentLaM':>20}")
    for lr in rates:
        steps = round(20 / lr)
        errors = {
            name: problem.error(rest(name, problem, ring.matrix, lr, steps))
            for name in ("DSGD", "DmSGD", "DecentLaM")
        }
        ratio = errors["DmSGD"] / errors["DecentLaM"]
        found["error"][str(lr)] = errors
        found["dmsgd / decentlam"][str(lr)] = round(ratio, 1)
        print(f"{lr:>8g}" + "".join(f"{e:>12.2e}" for e in errors.values()) + f"{ratio:>20.1f}")
    found["codecs"] = _codecs(problem, ring.matrix, quick)
    found["adam"] = _adam(problem, ring.matrix, quick)
    found["real ranks"] = _real(quick)
    return found


def _codecs(problem: Quadratic, w: Tensor, quick: bool) -> dict[str, dict[str, float | None]]:
    """Null where it diverged."""
    kinds: dict[str, Codec] = {"bf16": Dense(torch.bfloat16), "int8": Int8(), "int4": Int4()}
    kinds["one bit"] = OneBit()
    found: dict[str, dict[str, float | None]] = {}
    print(f"\nlr 0.003 with a codec, error at rest\n{'':>8}{'weights coded':>16}{'news coded':>16}")
    for name, codec in kinds.items():
        steps, errors = 600 if quick else 3000, []
        for as_they_are in (True, False):
            x = rest("DecentLaM", problem, w, 3e-3, steps, codec=codec, as_they_are=as_they_are)
            errors.append(problem.error(x))
        print(f"{name:>8}{errors[0]:>16.2e}{errors[1]:>16.2e}")
        kept = [error if math.isfinite(error) else None for error in errors]
        found[name] = dict(zip(("weights", "news"), kept, strict=True))
    return found


def _adam(problem: Quadratic, w: Tensor, quick: bool) -> dict[str, float]:
    """Every node divides its gradient by its own sqrt(v), on the ring and on the complete graph."""
    steps = 2000 if quick else 20000
    found = {
        name: problem.error(rest("DecentLaM", problem, graph, 1e-3, steps, adam=True))
        for name, graph in (("ring", w), ("complete", tw.topology.complete(NODES).matrix))
    }
    plain = rest("DecentLaM", problem, tw.topology.complete(NODES).matrix, 1e-3, steps)
    found["complete, without"] = problem.error(plain)
    print("\nown Adam preconditioners: " + ", ".join(f"{k} {v:.2e}" for k, v in found.items()))
    return found


def _real(quick: bool) -> dict[str, float]:
    """The largest difference between real ranks and the rows of the matrix."""
    size, steps = (4, 30) if quick else (NODES, 200)
    problem, w = Quadratic(size), tw.topology.ring(size).matrix
    lines: list[str] = []
    with Lab(size, None) as lab:
        command = [sys.executable, str(Path(__file__).resolve()), "--ranks", str(steps)]
        outcome = lab.start(command, sink=lambda line: lines.append(line.text)).wait()
    if outcome.code:
        sys.exit(str(outcome))
    answers = dict(json.loads(line) for line in lines if line.startswith("["))
    found = {}
    for method in ("DSGD", "DmSGD", "DecentLaM"):
        wanted = rest(method, problem, w, 3e-3, steps)
        got = torch.tensor([answers[str(rank)][method] for rank in range(size)])
        found[method] = float((got - wanted).abs().max() / wanted.abs().max())
    print(
        f"{size} real ranks, {steps} steps: off by " + ", ".join(f"{v:.0e}" for v in found.values())
    )
    return found


def ranks(steps: int) -> None:
    rank = tw.init().rank
    problem = Quadratic(tw.Wire().size)
    ends: dict[str, list[float]] = {}
    for method in ("DSGD", "DmSGD", "DecentLaM"):
        x = torch.nn.Parameter(torch.zeros(VALUES, dtype=torch.float64))
        momentum = {} if method == "DSGD" else {"momentum": BETA}
        optimizer = getattr(tw, method)([x], 3e-3, **momentum)
        for _ in range(steps):
            x.grad = problem.curve[rank] @ x.detach() - problem.slope[rank]
            optimizer.step()
        ends[method] = x.tolist()
    print(json.dumps([str(rank), ends]), flush=True)
    tw.shutdown()


# -- lab -------------------------------------------------------------------------------------------


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


def train(method: str, steps: int, seed: int) -> dict[str, Any]:
    corpus = load_corpus(DataConfig())
    model = build_model(ModelConfig(), corpus.vocab, CONTEXT, seed)
    parameters = list(model.parameters())
    optimizer = build(method, parameters)
    wire = optimizer.wire
    schedule = OptimizerConfig(lr=1.0)
    peaks = [group["lr"] for group in optimizer.param_groups]
    batches = Batches(corpus.train, CONTEXT, BATCH, wire.rank, wire.size, seed)
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
    now = acknowledged()
    counted = (optimizer.account.bytes - before[0]) / (steps - 1)
    peers = {
        str(rank): (now.get(address(rank), 0) - before[1].get(address(rank), 0)) / (steps - 1)
        for rank in range(wire.size)
        if rank != wire.rank
    }
    with optimizer.consensus(), torch.no_grad():
        losses = [
            (float(model(x, y)) * y.numel(), y.numel())
            for x, y in validation_batches(
                corpus.validation, CONTEXT, 16, wire.rank, wire.size, VALIDATION_WINDOWS
            )
        ]
    total, count = wire.agree([sum(a for a, _ in losses), sum(b for _, b in losses)], "sum")
    numel = sum(p.numel() for p in parameters)
    wire.close()
    return {
        "loss": total / count,
        "parameters": numel,
        "account bytes a step": counted,
        "acknowledged bytes a step": peers,
    }


def worker(steps: int, seeds: int, methods: list[str]) -> None:
    """Every method in turn; rank 0 prints each loss, and what it has sent to whom."""
    rank = tw.init().rank
    torch.set_num_threads(1)
    for seed in range(seeds):
        for method in methods:
            record = train(method, steps, seed)
            if rank == 0:
                print(json.dumps({"method": method, "seed": seed} | record), flush=True)
    tw.shutdown()


def lab(quick: bool, seeds: int, methods: list[str], steps: int | None) -> dict[str, Any]:
    steps = steps or (30 if quick else 400)
    lines: list[str] = []

    def show(text: str) -> None:
        lines.append(text)
        print(text, file=sys.stderr, flush=True)

    with Lab(HOSTS, Link.of("1gbit", delay="1ms")) as hosts:  # no time is measured: no check of it
        command = [sys.executable, str(Path(__file__).resolve())]
        command += ["--worker", str(steps), str(seeds), ",".join(methods)]
        outcome = hosts.start(command, sink=lambda line: show(line.text)).wait()
    if outcome.code:
        sys.exit(str(outcome))
    records = [json.loads(line) for line in lines if line.startswith("{")]
    return report(records, steps)


def report(records: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Losses over the seeds, and bytes to each peer beside 4 bytes a parameter to a neighbour."""
    table: dict[str, Any] = {}
    for record in records:
        entry = table.setdefault(record["method"], record | {"losses": []})
        entry["losses"].append(round(record["loss"], 4))
    base = table.get("data parallel")
    print(f"\n{HOSTS} hosts, gpt-0.3m, {steps} steps, lr {LR}, momentum {BETA}; bytes of host 0")
    print(f"{'method':20}{'loss':>8}{'to DP':>8}{'to peers 1, 2, 3, MB a step':>34}")
    for name, entry in table.items():
        loss = entry["loss"] = sum(entry["losses"]) / len(entry["losses"])
        mean = sum(base["losses"]) / len(base["losses"]) if base else float("nan")
        entry["loss / data parallel"] = round(loss / mean, 4)
        peers = entry["acknowledged bytes a step"]
        shown = "   ".join(f"{sent / 1e6:.4f}" for sent in peers.values())
        print(f"{name:20}{loss:>8.4f}{loss / mean:>8.4f}{shown:>34}")
        for key in ("method", "seed"):
            entry.pop(key)
    print(f"predicted to each neighbour: {4 * records[0]['parameters'] / 1e6:.4f} MB (float32)")
    return {"steps": steps, "lr": LR, "momentum": BETA, "methods": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--part", choices=["quadratic", "lab"])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--methods", default="data parallel,DecentLaM,DmSGD,DecentLaM int8")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"quick": given.quick}
    if given.part != "lab":
        found["quadratic"] = quadratic(given.quick)
    if given.part != "quadratic":
        methods = given.methods.split(",")
        found["lab"] = lab(given.quick, given.seeds, methods, given.steps)
    print(json.dumps(found))


if __name__ == "__main__":
    if "--ranks" in sys.argv:
        ranks(int(sys.argv[2]))
    elif "--worker" in sys.argv:
        worker(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4].split(","))
    else:
        main()

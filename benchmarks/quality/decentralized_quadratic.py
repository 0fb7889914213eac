"""Where decentralized methods come to rest: neighbours alone, exact gradients, known optimum.

    python -m benchmarks.quality.decentralized_quadratic            16 nodes in a ring
    python -m benchmarks.quality.decentralized_quadratic --quick    fewer steps and ranks

Every node has a least-squares problem of its own, and the error is how far the nodes come to rest
from the common optimum, mean_i |x_i - x*|² / |x*|². Nodes are rows of a matrix in one process; real
ranks run the first steps of the same, and must agree. Beside the methods: codecs, applied to the
weights as they are and to the news in them; Adam's preconditioner. Prints tables and, as its last
line, one JSON object: {"error": {lr: {method: ...}}, "dmsgd / decentlam": {lr: ...}, "codecs":
{codec: {"weights", "news"}}, "adam": {graph: error}, "real ranks": {method: difference}, ...}.
"""

import math
from typing import Any

import torch
from torch import Tensor

import thinwire as tw
from benchmarks.harness.arguments import Size, Table, end, parser
from benchmarks.harness.hosts import on_hosts
from benchmarks.harness.learning import joined
from thinwire.wire.codecs import Codec, Dense, Int4, Int8, OneBit

NODES, ROWS, VALUES, BETA = 16, 50, 30, 0.9
METHODS = ("DSGD", "DmSGD", "DecentLaM")


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


def main() -> None:
    size = parser(__doc__).parse_args().size
    torch.set_num_threads(1)
    problem, ring = Quadratic(NODES), tw.topology.ring(NODES)
    found: dict[str, Any] = {"nodes": NODES, "momentum": BETA, "gap": round(ring.gap, 4)}
    print(f"\n{ring.describe()}, momentum {BETA}: error at rest")
    found |= by_rate(problem, ring.matrix, size)
    found["codecs"] = by_codec(problem, ring.matrix, size)
    found["adam"] = by_preconditioner(problem, ring.matrix, size)
    found["real ranks"] = on_real_ranks(size)
    end(found, size)


def by_rate(problem: Quadratic, w: Tensor, size: Size) -> dict[str, Any]:
    rates = size.of(full=(1e-3, 3e-3, 1e-2, 2e-2), quick=(3e-3, 1e-2, 2e-2), tiny=(2e-2,))
    table = Table("lr", *METHODS, "DmSGD / DecentLaM", first=8, width=12)
    found, ratios = {}, {}
    for lr in rates:
        steps = size.of(full=round(20 / lr), quick=round(20 / lr), tiny=20)
        errors = {name: problem.error(rest(name, problem, w, lr, steps)) for name in METHODS}
        ratio = errors["DmSGD"] / errors["DecentLaM"]
        found[str(lr)], ratios[str(lr)] = errors, round(ratio, 1)
        table.row(f"{lr:g}", *(f"{e:.2e}" for e in errors.values()), f"{ratio:.1f}")
    return {"error": found, "dmsgd / decentlam": ratios}


def by_codec(problem: Quadratic, w: Tensor, size: Size) -> dict[str, dict[str, float | None]]:
    """Null where it diverged."""
    kinds: dict[str, Codec] = {"bf16": Dense(torch.bfloat16), "int8": Int8(), "int4": Int4()}
    kinds["one bit"] = OneBit()
    steps = size.of(full=3000, quick=600, tiny=5)
    found: dict[str, dict[str, float | None]] = {}
    print("\nlr 0.003 with a codec, error at rest")
    table = Table("", "weights coded", "news coded", first=8, width=16)
    for name, codec in kinds.items():
        errors = []
        for as_they_are in (True, False):
            x = rest("DecentLaM", problem, w, 3e-3, steps, codec=codec, as_they_are=as_they_are)
            errors.append(problem.error(x))
        table.row(name, *(f"{error:.2e}" for error in errors))
        kept = [error if math.isfinite(error) else None for error in errors]
        found[name] = dict(zip(("weights", "news"), kept, strict=True))
    return found


def by_preconditioner(problem: Quadratic, w: Tensor, size: Size) -> dict[str, float]:
    """Every node divides its gradient by its own sqrt(v), on the ring and on the complete graph."""
    steps = size.of(full=20000, quick=2000, tiny=5)
    found = {
        name: problem.error(rest("DecentLaM", problem, graph, 1e-3, steps, adam=True))
        for name, graph in (("ring", w), ("complete", tw.topology.complete(NODES).matrix))
    }
    plain = rest("DecentLaM", problem, tw.topology.complete(NODES).matrix, 1e-3, steps)
    found["complete, without"] = problem.error(plain)
    print("\nown Adam preconditioners: " + ", ".join(f"{k} {v:.2e}" for k, v in found.items()))
    return found


def on_real_ranks(size: Size) -> dict[str, float]:
    """The largest difference between real ranks and the rows of the matrix."""
    ranks, steps = size.of(full=(NODES, 200), quick=(4, 30), tiny=(2, 5))
    problem, w = Quadratic(ranks), tw.topology.ring(ranks).matrix
    answers = on_hosts(worker, steps, hosts=ranks, link=None)
    found = {}
    for method in METHODS:
        wanted = rest(method, problem, w, 3e-3, steps)
        got = torch.tensor([answer[method] for answer in answers])
        found[method] = float((got - wanted).abs().max() / wanted.abs().max())
    off = ", ".join(f"{value:.0e}" for value in found.values())
    print(f"{ranks} real ranks, {steps} steps: off by {off}")
    return found


def worker(steps: int) -> dict[str, list[float]]:
    with joined() as world:
        problem = Quadratic(world.size)
        ends: dict[str, list[float]] = {}
        for method in METHODS:
            x = torch.nn.Parameter(torch.zeros(VALUES, dtype=torch.float64))
            momentum = {} if method == "DSGD" else {"momentum": BETA}
            optimizer = getattr(tw, method)([x], 3e-3, **momentum)
            for _ in range(steps):
                x.grad = problem.curve[world.rank] @ x.detach() - problem.slope[world.rank]
                optimizer.step()
            ends[method] = x.tolist()
        return ends


if __name__ == "__main__":
    main()

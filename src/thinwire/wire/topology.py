"""Topology: who talks to whom, and how much each weighs what it hears.

A graph of n ranks and a mixing matrix W (n x n): rank i replaces z_i by sum_j w_ij z_j. W is doubly
stochastic - no entry below 0, rows and columns sum to 1 - so that the mean of all ranks stays where
it is. Weights that are not given are Metropolis-Hastings': w_ij = 1 / (1 + max(degree_i, degree_j))
for neighbours, w_ii what is left; symmetric and doubly stochastic on any graph.

[Note: gap] lambda are the eigenvalues of W; one of them is 1, the mean's. The spectral gap, 1 minus
the largest modulus of the others, is the share of the disagreement that a mixing takes away in the
long run: 1 on the complete graph, about 13 / n² on a ring, whose weights are 1/3.

[Note: ellipse] DecentLaM keeps the difference x - W z in its momentum. A disagreement along an
eigenvector of lambda then obeys e_{t+1} = (lambda + b) e_t - b e_{t-1}, whose roots lie inside the
unit circle exactly if lambda lies inside the ellipse with centre -b and semi-axes 1 + b (real) and
1 - b (imaginary). Real eigenvalues in (-1, 1) always do. Complex ones, which only weights that are
not symmetric have, leave it as b grows: `largest_momentum` is where the first one does.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

_TOLERANCE = 1e-6  # of sums and symmetry: what is left of weights given in float32
_EDGE = 1e-7  # how far inside its bound an eigenvalue must be: LAPACK's error is below that


@dataclass(frozen=True, eq=False)
class Topology:
    """A checked mixing matrix. Make one with `ring`, `torus`, `exponential`, `complete`,
    `from_edges` or `from_matrix`."""

    name: str
    matrix: Tensor
    """W, (n, n) float64."""
    eigenvalues: Tensor = field(init=False, repr=False)
    """Of W, complex, by falling modulus; the first is 1."""

    def __post_init__(self) -> None:
        values = torch.linalg.eigvals(self.matrix)
        order = values.abs().argsort(descending=True)
        object.__setattr__(self, "eigenvalues", values[order])

    @property
    def size(self) -> int:
        return self.matrix.shape[0]

    def neighbours(self, rank: int) -> tuple[list[int], list[float]]:
        """The ranks that `rank` talks to, ascending, and what each of them weighs there."""
        row = self.matrix[rank].tolist()
        peers = [j for j, weight in enumerate(row) if weight > 0 and j != rank]
        return peers, [row[j] for j in peers]

    @property
    def edges(self) -> list[tuple[int, int]]:
        """Pairs (i, j), i < j, that talk to each other."""
        size = self.size
        return [(i, j) for i in range(size) for j in range(i + 1, size) if self.matrix[i, j] > 0]

    @property
    def gap(self) -> float:
        """See [Note: gap]; 1 for a single rank."""
        return 1.0 if self.size == 1 else max(0.0, 1.0 - float(self._others().abs().max()))

    @property
    def symmetric(self) -> bool:
        return bool((self.matrix - self.matrix.T).abs().max() <= _TOLERANCE)

    def stable(self, momentum: float) -> bool:
        """Whether every eigenvalue but the mean's is inside the ellipse, see its note."""
        if not 0 <= momentum < 1:
            return False
        others = self._others()
        across = (others.real + momentum) / (1 + momentum)
        along = others.imag / (1 - momentum)
        return bool((across.square() + along.square() < (1 - _EDGE) ** 2).all())

    @property
    def largest_momentum(self) -> float:
        """Stable up to this one, rounded down to 3 digits; 1 where any momentum below 1 is."""
        if self.symmetric:
            return 1.0
        return max((k / 1000 for k in range(1000) if self.stable(k / 1000)), default=0.0)

    def describe(self) -> str:
        """One line for logs: `ring of 4: 2 neighbours each, spectral gap 0.667`."""
        degrees = sorted({len(self.neighbours(rank)[0]) for rank in range(self.size)})
        span = str(degrees[0]) if len(degrees) == 1 else f"{degrees[0]} to {degrees[-1]}"
        plural = "neighbour" if degrees == [1] else "neighbours"
        return f"{self.name} of {self.size}: {span} {plural} each, spectral gap {self.gap:.3g}"

    def _others(self) -> Tensor:
        """All eigenvalues but the mean's."""
        nearest = int((self.eigenvalues - 1).abs().argmin())
        return torch.cat([self.eigenvalues[:nearest], self.eigenvalues[nearest + 1 :]])


# -- graphs by name --------------------------------------------------------------------------------


def ring(size: int) -> Topology:
    """Each rank talks to the one before and the one after it."""
    _require_size("ring", size)
    return from_edges(size, _steps(size, [1]), name="ring")


def torus(size: int, rows: int | None = None) -> Topology:
    """A grid of `rows` x `size / rows` whose borders meet: up to 4 neighbours. The squarest grid by
    default."""
    _require_size("torus", size)
    if rows is None:
        rows = max((r for r in range(1, math.isqrt(size) + 1) if size % r == 0), default=1)
    bad = not isinstance(rows, int) or rows < 1
    if bad or (size > 1 and (rows < 2 or size % rows or size // rows < 2)):
        raise ValueError(
            f"torus(size={size}, rows={rows}) needs at least 2 x 2 ranks in whole rows; take "
            "another number of ranks, or a ring"
        )
    columns = max(1, size // rows)  # of one rank, which has nobody to talk to
    edges = []
    for rank in range(size if size > 1 else 0):
        row, column = divmod(rank, columns)
        edges.append((rank, row * columns + (column + 1) % columns))
        edges.append((rank, (row + 1) % rows * columns + column))
    return from_edges(size, edges, name=f"torus {rows}x{columns}")


def exponential(size: int) -> Topology:
    """Each rank talks to those 1, 2, 4, ... places away, in both directions: about 2 log2(n)
    neighbours and a gap that shrinks only with log(n)."""
    _require_size("exponential", size)
    hops = [2**k for k in range(size.bit_length()) if 2**k < size]
    return from_edges(size, _steps(size, hops), name="exponential")


def complete(size: int) -> Topology:
    """Everybody talks to everybody; W averages in one step."""
    _require_size("complete", size)
    edges = [(i, j) for i in range(size) for j in range(i + 1, size)]
    return from_edges(size, edges, name="complete")


NAMES: dict[str, Callable[[int], Topology]] = {
    "ring": ring,
    "torus": torus,
    "exponential": exponential,
    "complete": complete,
}


def parse(text: str, size: int) -> Topology:
    """`ring`, `torus`, `torus:2` (rows), `exponential`, `complete`, or `edges:0-1,1-2,2-0`."""
    kind, colon, rest = text.partition(":")
    if kind == "edges" and colon:
        return from_edges(size, [_edge(text, word) for word in rest.split(",") if word.strip()])
    if kind == "torus" and colon and rest.strip().isdigit():
        return torus(size, int(rest))
    if kind not in NAMES or colon:
        raise ValueError(
            f"topology takes one of {', '.join(NAMES)}, torus:ROWS or edges:0-1,1-2,..., "
            f"got {text!r}"
        )
    return NAMES[kind](size)


# -- any graph -------------------------------------------------------------------------------------


def from_edges(
    size: int, edges: Iterable[tuple[int, int]], *, name: str = "given graph"
) -> Topology:
    """Any undirected graph, with Metropolis-Hastings weights. (i, j) and (j, i) are one edge."""
    _require_size("from_edges", size)
    pairs: set[tuple[int, int]] = set()
    for edge in edges:
        i, j = _checked_edge(edge, size)
        if i != j:
            pairs.add((min(i, j), max(i, j)))
    degree = [sum(rank in pair for pair in pairs) for rank in range(size)]
    matrix = torch.zeros(size, size, dtype=torch.float64)
    for i, j in pairs:
        matrix[i, j] = matrix[j, i] = 1 / (1 + max(degree[i], degree[j]))
    matrix += torch.diag(1 - matrix.sum(1))
    _require_connected(matrix, name)
    return Topology(name, matrix)


def from_matrix(
    matrix: Tensor | Sequence[Sequence[float]],
    *,
    symmetric: bool = True,
    name: str = "given matrix",
) -> Topology:
    """Weights of your own. Row i is what rank i makes of what it hears.

    Args:
        symmetric: whether to insist on w_ij = w_ji. With False the two ends of an edge may weigh
            each other differently; DecentLaM then checks its momentum against the ellipse.
    """
    w = torch.as_tensor(matrix, dtype=torch.float64)
    if w.dim() != 2 or w.shape[0] != w.shape[1] or w.shape[0] == 0:
        raise ValueError(f"from_matrix takes a square matrix, got shape {tuple(w.shape)}")
    if not bool(torch.isfinite(w).all()):
        raise ValueError("from_matrix takes finite weights, got NaN or infinity")
    w = w.cpu().clone()
    _require_undirected(w)
    _require_doubly_stochastic(w)
    if symmetric:
        _require_symmetric(w)
    _require_connected(w, name)
    return Topology(name, w)


# -- checks ----------------------------------------------------------------------------------------


def _steps(size: int, hops: Sequence[int]) -> list[tuple[int, int]]:
    return [(rank, (rank + hop) % size) for rank in range(size) for hop in hops]


def _require_size(name: str, size: int) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"{name}(size=...) takes a number of ranks >= 1, got {size!r}")


def _edge(text: str, word: str) -> tuple[int, int]:
    if ">" in word:
        raise ValueError(
            f"topology {text!r}: {word.strip()!r} is an edge in one direction, and what a rank "
            "sends its neighbour must send back; write it as 0-1, which goes both ways"
        )
    ends = word.split("-")
    if len(ends) != 2 or not all(end.strip().isdigit() for end in ends):
        raise ValueError(f"topology {text!r}: an edge is two ranks as in 0-1, got {word.strip()!r}")
    return int(ends[0]), int(ends[1])


def _checked_edge(edge: tuple[int, int], size: int) -> tuple[int, int]:
    try:
        i, j = (int(end) for end in edge)
    except (TypeError, ValueError):
        raise ValueError(f"an edge is a pair of ranks, got {edge!r}") from None
    if not (0 <= i < size and 0 <= j < size):
        raise ValueError(f"edge ({i}, {j}) names a rank that is none of 0..{size - 1}")
    return i, j


def _require_undirected(w: Tensor) -> None:
    one_way = ((w != 0) & (w.T == 0)).nonzero().tolist()
    if one_way:
        i, j = one_way[0]
        raise ValueError(
            f"a directed graph: rank {i} hears rank {j} (weight {float(w[i, j]):g}) and does not "
            f"answer (weight {float(w[j, i]):g}); give both directions a weight, or name the edges "
            "to from_edges, which goes both ways"
        )


def _require_doubly_stochastic(w: Tensor) -> None:
    if bool((w < 0).any()):
        i, j = (w < 0).nonzero()[0].tolist()
        raise ValueError(f"weights are >= 0, got {float(w[i, j]):g} for rank {j} at rank {i}")
    for dim, kind in ((1, "row"), (0, "column")):
        sums = w.sum(dim)
        worst = int((sums - 1).abs().argmax())
        if abs(float(sums[worst]) - 1) > _TOLERANCE:
            raise ValueError(
                f"not doubly stochastic: {kind} {worst} sums to {float(sums[worst]):.9g} instead "
                "of 1, so the mean of the replicas would drift; from_edges makes weights that are"
            )


def _require_symmetric(w: Tensor) -> None:
    worst = int((w - w.T).abs().argmax())
    i, j = divmod(worst, w.shape[0])
    if abs(float(w[i, j] - w[j, i])) > _TOLERANCE:
        raise ValueError(
            f"not symmetric: ranks {i} and {j} weigh each other {float(w[i, j]):g} and "
            f"{float(w[j, i]):g}; make them equal, or pass symmetric=False if that is meant"
        )


def _require_connected(w: Tensor, name: str) -> None:
    size = w.shape[0]
    seen, fresh = {0}, [0]
    while fresh:
        rank = fresh.pop()
        for peer in range(size):
            if peer not in seen and float(w[rank, peer]) > 0:
                seen.add(peer)
                fresh.append(peer)
    if len(seen) < size:
        apart = sorted(set(range(size)) - seen)
        raise ValueError(
            f"{name} of {size} ranks is not connected: no path leads from rank 0 to "
            f"{'rank' if len(apart) == 1 else 'ranks'} {', '.join(map(str, apart))}; add an edge"
        )

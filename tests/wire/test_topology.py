"""Graphs and mixing matrices: their weights, their spectrum, and what is refused."""

import math

import pytest
import torch

from thinwire.wire import topology
from thinwire.wire.topology import Topology

SIZES = [1, 2, 3, 4, 5, 8, 12, 16]


def lopsided(size: int, forward: float, back: float) -> list[list[float]]:
    """A ring whose two directions weigh differently: doubly stochastic, not symmetric."""
    rows = [[0.0] * size for _ in range(size)]
    for rank, row in enumerate(rows):
        row[rank] = 1 - forward - back
        row[(rank + 1) % size] += forward
        row[(rank - 1) % size] += back
    return rows


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", list(topology.NAMES))
def test_every_named_graph_keeps_the_mean_and_is_symmetric(name: str, size: int) -> None:
    if name == "torus" and size in (2, 3, 5):
        with pytest.raises(ValueError, match=r"at least 2 x 2 ranks.*or a ring"):
            topology.parse(name, size)
        return
    graph = topology.parse(name, size)
    ones = torch.ones(size, dtype=torch.float64)
    torch.testing.assert_close(graph.matrix @ ones, ones)
    torch.testing.assert_close(graph.matrix.T @ ones, ones)
    assert graph.symmetric
    assert graph.stable(0.99)
    assert graph.largest_momentum == 1.0
    for rank in range(size):
        peers, weights = graph.neighbours(rank)
        assert peers == sorted(set(peers) - {rank})
        assert all(rank in graph.neighbours(peer)[0] for peer in peers)
        assert float(graph.matrix[rank, rank]) == pytest.approx(1 - sum(weights))
        assert min([float(graph.matrix[rank, rank]), *weights]) > 0


def test_who_talks_to_whom() -> None:
    assert topology.ring(5).neighbours(0) == ([1, 4], pytest.approx([1 / 3, 1 / 3]))
    assert topology.ring(2).neighbours(1) == ([0], [0.5])
    assert topology.torus(12).name == "torus 3x4"
    assert topology.torus(12).neighbours(0) == ([1, 3, 4, 8], pytest.approx([0.2] * 4))
    assert topology.torus(12, rows=2).neighbours(0)[0] == [1, 5, 6]
    assert topology.exponential(16).neighbours(0)[0] == [1, 2, 4, 8, 12, 14, 15]
    assert topology.complete(4).neighbours(2) == ([0, 1, 3], [0.25] * 3)
    assert topology.ring(4).edges == [(0, 1), (0, 3), (1, 2), (2, 3)]


def test_metropolis_hastings_weights_of_a_star_with_a_tail() -> None:
    graph = topology.from_edges(5, [(0, 1), (2, 0), (0, 3), (3, 4), (0, 2)])  # one of them twice
    degrees = [3, 1, 1, 2, 1]
    for i, j in graph.edges:
        assert float(graph.matrix[i, j]) == pytest.approx(1 / (1 + max(degrees[i], degrees[j])))
    assert graph.neighbours(3) == ([0, 4], pytest.approx([1 / 4, 1 / 3]))
    assert topology.parse("edges:0-1,0-2,0-3,3-4", 5).edges == graph.edges


@pytest.mark.parametrize("size", [3, 4, 7, 16])
def test_the_spectral_gap(size: int) -> None:
    slowest = max(abs(1 / 3 + 2 / 3 * math.cos(2 * math.pi * k / size)) for k in range(1, size))
    assert topology.ring(size).gap == pytest.approx(1 - slowest, abs=1e-9)
    assert topology.complete(size).gap == pytest.approx(1.0, abs=1e-9)
    # The gap is the rate at which disagreement fades, in the long run.
    z = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    w = topology.ring(size).matrix
    apart = [float((v - z.mean()).norm()) for v in (w.matrix_power(k) @ z for k in (60, 61))]
    if apart[0] > 1e-12:
        assert apart[1] / apart[0] == pytest.approx(slowest, abs=1e-3)


def growth(graph: Topology, momentum: float, steps: int = 4000) -> float:
    """What DecentLaM makes of a disagreement where no gradient is left, by plain recursion."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(graph.size, generator=generator, dtype=torch.float64)
    u, start = torch.zeros_like(x), float((x - x.mean()).norm())
    for _ in range(steps):
        u = momentum * u + x - graph.matrix @ x
        x = x - u
    return float((x - x.mean()).norm()) / start


@pytest.mark.parametrize(("size", "forward", "back"), [(8, 0.6, 0.1), (5, 0.45, 0.3), (16, 0.9, 0)])
def test_the_ellipse_is_where_the_recursion_begins_to_grow(
    size: int, forward: float, back: float
) -> None:
    weights = lopsided(size, forward, back or 1e-3)
    graph = topology.from_matrix(weights, symmetric=False)
    largest = graph.largest_momentum
    assert 0 < largest < 0.95
    assert growth(graph, largest - 0.01) < 1
    assert growth(graph, largest + 0.01) > 1
    assert not graph.stable(largest + 0.001)


def test_ranks_that_only_swap_never_agree_without_momentum() -> None:
    swap = topology.from_matrix([[0.0, 1.0], [1.0, 0.0]])
    assert swap.gap == pytest.approx(0.0, abs=1e-9)
    assert not swap.stable(0.0)
    assert swap.stable(0.9)
    assert growth(swap, 0.9) < 1e-9


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: topology.from_edges(4, [(0, 1), (2, 3)]), r"not connected.*ranks 2, 3; add"),
        (lambda: topology.from_matrix(torch.eye(2)), r"not connected.*to rank 1"),
        (lambda: topology.from_edges(3, [(0, 3)]), r"\(0, 3\) names a rank that is none of 0..2"),
        (lambda: topology.from_edges(3, [(0, 1, 2)]), "an edge is a pair of ranks"),  # type: ignore
        (lambda: topology.from_matrix([[0.5, 0.5]]), "square matrix"),
        (lambda: topology.from_matrix([[0.5, 0.6], [0.6, 0.5]]), "row 0 sums to 1.1"),
        (
            lambda: topology.from_matrix([[0.9, 0.1], [0.2, 0.8]]),
            r"not doubly stochastic: column 0 sums to 1.1",
        ),
        (lambda: topology.from_matrix([[1.5, -0.5], [-0.5, 1.5]]), r"weights are >= 0, got -0.5"),
        (lambda: topology.from_matrix([[math.nan, 1], [1, 0]]), "finite weights"),
        (
            lambda: topology.from_matrix([[0.5, 0.5, 0], [0, 0.5, 0.5], [0.5, 0, 0.5]]),
            r"a directed graph: rank 0 hears rank 1 \(weight 0.5\) and does not answer",
        ),
        (lambda: topology.from_matrix(lopsided(3, 0.5, 0.2)), "not symmetric: ranks 0 and 1"),
        (lambda: topology.parse("edges:0>1,1>2", 3), "'0>1' is an edge in one direction"),
        (lambda: topology.parse("edges:0-1,1_2", 3), "two ranks as in 0-1, got '1_2'"),
        (lambda: topology.parse("star", 3), "takes one of ring, torus, .*, got 'star'"),
        (lambda: topology.parse("torus:3", 8), r"rows=3\) needs at least 2 x 2"),
        (lambda: topology.ring(0), r"ring\(size=...\) takes a whole number of 1 to 10000, got 0"),
    ],
)
def test_bad_graphs_are_refused_with_what_is_wrong(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_line_for_logs() -> None:
    assert topology.ring(4).describe() == "ring of 4: 2 neighbours each, spectral gap 0.667"
    assert "1 to 3 neighbours" in topology.from_edges(4, [(0, 1), (0, 2), (0, 3)]).describe()

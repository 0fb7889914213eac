"""Cutting models into stages: by hand, by cost, and what cannot be cut."""

import itertools
import random

import pytest
import torch
from torch import nn

from tests.pipeline import oracle
from thinwire.pipeline import Cost, Schedule, balance, measure, parts_of, split, stage_memory
from thinwire.pipeline.micro_batches import micro_batches
from thinwire.train.tasks.models import GPT, GPTConfig, token_loss

SHAPE = GPTConfig(layers=4, width=16, heads=2, vocab=30, context=8, tied=False)


def costs(*seconds: float, weights: int = 1) -> list[Cost]:
    return [Cost(s, weights, activations=10, input=1) for s in seconds]


def test_by_hand() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(8)))
    stages = split(model, 3, at=[3, 6])
    assert [stage.names for stage in stages] == [["0", "1", "2"], ["3", "4", "5"], ["6", "7"]]
    assert stages[1].get_submodule("3") is model[3]
    assert set(stages[1].state_dict()) == {
        f"{i}.{kind}" for i in (3, 4, 5) for kind in ("weight", "bias")
    }
    x = torch.ones(1, 2)
    out = x
    for stage in stages:
        out = stage(out)
    assert torch.equal(out, model(x))


def test_by_cost_the_slowest_stage_is_as_fast_as_can_be() -> None:
    """Against all cuts there are."""
    draw = random.Random(0)
    for count, stages in [(1, 1), (5, 2), (7, 3), (8, 4), (8, 8)]:
        for _ in range(5):
            given = [draw.choice([0.5, 1, 2, 7]) for _ in range(count)]
            cuts = balance(costs(*given), stages)

            def slowest(cuts: tuple[int, ...], given: list[float] = given) -> float:
                return max(sum(given[a:b]) for a, b in itertools.pairwise((0, *cuts, len(given))))

            best = min(map(slowest, itertools.combinations(range(1, count), stages - 1)))
            assert len(cuts) == stages - 1
            assert slowest(tuple(cuts)) == best, given


def test_equally_slow_cuts_are_even_elsewhere() -> None:
    assert balance(costs(8, 1, 1, 1, 1), 3) == [1, 3]


def test_memory_is_kept_to() -> None:
    """The first stage holds more graphs and versions than the last, so it gets fewer parts."""
    given = costs(1, 1, 1, 1, 1, 1, weights=100)
    assert balance(given, 2) == [3]
    first, last = Schedule("1f1b", 0, 2), Schedule("1f1b", 1, 2)
    whole = given[0] + given[1] + given[2]
    assert stage_memory(first, whole) == (4 + 2) * 300 + 2 * 30
    assert stage_memory(last, whole) == 4 * 300 + 30
    assert stage_memory(first, whole, recompute=True) == (4 + 2) * 300 + 30 + 2
    assert stage_memory(first, whole, look_ahead=1.0) == (4 + 3) * 300 + 2 * 30
    assert stage_memory(last, whole, look_ahead=1.0) == 4 * 300 + 30
    assert stage_memory(first, whole, stash=False) == 4 * 300 + 30 + 2
    assert balance(given, 2, memory=1700) == [2]
    with pytest.raises(ValueError, match="memory=1e"):
        balance(given, 2, memory=1000)


def test_parts_are_measured() -> None:
    small, large = nn.Linear(64, 64), nn.Sequential(*(nn.Linear(64, 64) for _ in range(24)))
    norm = nn.BatchNorm1d(64)
    state = torch.get_rng_state()
    found = measure(parts_of([small, norm, large]), torch.ones(128, 64), repeats=3)
    assert torch.equal(state, torch.get_rng_state())
    assert found[2].seconds > found[0].seconds
    assert found[2].weights == 24 * found[0].weights == 24 * 4 * (64 * 64 + 64)
    assert found[0].activations == found[0].input == 4 * 128 * 64
    assert found[2].activations == 24 * 4 * 128 * 64
    assert norm.num_batches_tracked == 0
    assert all(p.grad is None for p in small.parameters())
    assert balance(found, 2) == [2]
    with pytest.raises(ValueError, match=r"part '1' must give one tensor, it gave tuple"):
        measure(parts_of([small, nn.LSTM(64, 4), small]), torch.randn(8, 64))


def test_the_trainers_gpt_splits_with_embedding_and_head() -> None:
    torch.manual_seed(0)
    model = GPT(SHAPE)
    tokens = torch.randint(30, (2, 8))
    for stages in (1, 2, 3, 6):
        x = tokens
        parts = split(model, stages)
        for part in parts:
            x = part(x)
        assert torch.equal(x, model(tokens))
        state = {}
        for part in parts:
            state |= part.state_dict()
        assert set(state) == set(model.state_dict())
        other = GPT(SHAPE)
        for part in split(other, stages):
            part.load_state_dict({name: state[name] for name in part.state_dict()})
        assert oracle.same(other, model)
    loss = token_loss(model(tokens), tokens)
    assert torch.equal(loss, model(tokens, tokens))


def test_a_parameter_of_two_stages_is_refused() -> None:
    model = GPT(GPTConfig(**{**vars(SHAPE), "tied": True}))
    with pytest.raises(
        ValueError, match=r"'embed.tokens.weight' \(stage 0\).*'head.linear.weight'"
    ):
        split(model, 2)
    assert len(split(model, 1)) == 1


class NoSequence(nn.Module):
    pass


@pytest.mark.parametrize(
    ("stages", "settings", "words"),
    [
        (4, {}, "4 stages were asked for, but the model has 3 parts"),
        (0, {}, r"stages=...\) takes a whole number >= 1, got 0"),
        (2, {"at": [1, 2]}, r"at=\.\.\.\) takes the first part of stages 1..1"),
        (3, {"at": [2, 1]}, "2 rising numbers of 1..2"),
        (2, {"at": [3]}, "1..2"),
        (2, {"at": [1], "memory": 3.0}, "not both"),
    ],
)
def test_bad_splits_are_refused(stages: int, settings: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        split(nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))), stages, **settings)


def test_a_model_that_is_no_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="NoSequence cannot be split"):
        split(NoSequence(), 2)


def test_micro_batches() -> None:
    x, y = torch.arange(12).view(6, 2), torch.arange(6)
    cut = list(micro_batches([(x, y), (x, y)], 3))
    assert [tuple(a.shape) for a, _ in cut] == [(2, 2)] * 6
    assert torch.equal(torch.cat([b for _, b in cut[:3]]), y)
    with pytest.raises(ValueError, match=r"x has shape \(6, 2\) does not divide into 4"):
        next(micro_batches([(x, y)], 4))
    with pytest.raises(ValueError, match="count"):
        micro_batches([(x, y)], 0)

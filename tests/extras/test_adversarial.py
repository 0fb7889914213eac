"""ConcurrentAdversarial against a plain sequential loop, with nothing beside anything."""

import copy
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.conftest import Ranks

EPSILON, WEIGHT, LR = 0.1, 0.7, 0.2
Batch = tuple[Tensor, Tensor]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
    )


def data(count: int = 5, seed: int = 0) -> list[Batch]:
    draw = torch.Generator().manual_seed(seed)
    return [
        (torch.rand(6, 1, 4, 4, generator=draw), torch.randint(3, (6,), generator=draw))
        for _ in range(count)
    ]


def attack(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    F.cross_entropy(model(x), y).backward()
    assert x.grad is not None
    slope = x.grad
    model.zero_grad()
    return (x.detach() + EPSILON * slope.sign()).clamp(0, 1)


def twin(model: nn.Sequential) -> nn.Sequential:
    """The same weights with BatchNorms of their own."""
    other = copy.deepcopy(model)
    for name, module in other.named_children():
        if not isinstance(module, nn.BatchNorm2d):
            setattr(other, name, model.get_submodule(name))
    return other


def everything(*models: nn.Module) -> list[Tensor]:
    unique = {p: None for model in models for p in model.parameters()}
    return list(unique)


def oracle(
    batches: list[Batch],
    *,
    stale: bool = True,
    mean: Callable[[Tensor], None] = lambda gradient: None,
) -> dict[str, Tensor]:
    """Every pass one after the other, with two networks that share all but BatchNorm."""
    first = network()
    second = twin(first)
    moved = attack(second, *batches[0])
    for step, (x, y) in enumerate(batches):
        if not stale:
            moved = attack(second, x, y)
        loss = F.cross_entropy(first(x), y) + WEIGHT * F.cross_entropy(second(moved), y)
        loss.backward()
        gradients = {p: p.grad.clone() for p in everything(first, second) if p.grad is not None}
        if stale and step + 1 < len(batches):
            moved = attack(second, *batches[step + 1])  # before the weights change
        with torch.no_grad():
            for parameter, gradient in gradients.items():
                mean(gradient)
                parameter -= LR * gradient
        first.zero_grad()
        second.zero_grad()
    names = {f"1.second.{n}": p.detach() for n, p in second[1].named_parameters()}
    return first.state_dict() | names


def build(
    wrap: Callable[..., torch.optim.Optimizer] = lambda inner: inner, **settings: Any
) -> tuple[nn.Module, torch.optim.Optimizer, tw.ConcurrentAdversarial]:
    model = tw.dual_batch_norm(network())
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=LR))
    options = {"epsilon": EPSILON, "weight": WEIGHT, "bounds": (0.0, 1.0), **settings}
    return model, optimizer, tw.ConcurrentAdversarial(model, optimizer, **options)


def train(
    adversary: tw.ConcurrentAdversarial, optimizer: torch.optim.Optimizer, batches: list[Batch]
) -> None:
    for x, y in adversary.ahead(batches):
        adversary.loss(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], exact: bool = False) -> None:
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        if exact:
            assert ours[name].equal(value), name
        else:
            torch.testing.assert_close(ours[name], value, msg=name)


@pytest.mark.parametrize("overlap", [True, False])
def test_it_equals_a_sequential_loop(overlap: bool) -> None:
    model, optimizer, adversary = build(overlap=overlap)
    train(adversary, optimizer, data())
    assert_same(model.state_dict(), oracle(data()))
    fresh = oracle(data(), stale=False)
    assert not torch.allclose(model.state_dict()["0.weight"], fresh["0.weight"], rtol=1e-4)


def test_the_pass_runs_in_a_thread_once_all_gradients_exist_and_before_the_weights_change() -> None:
    seen: list[tuple[str, bool, float]] = []

    def loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        weights = list(model.parameters())
        known = all(p.grad is not None for p in weights)
        where = threading.current_thread().name.split("_")[0]
        seen.append((where, known, float(weights[0].detach().sum())))
        return F.cross_entropy(module(x), y)

    model, optimizer, adversary = build(loss=loss)
    train(adversary, optimizer, data(3))
    main = threading.current_thread().name
    first, rest = seen[:3], seen[3:]
    assert [where for where, _, _ in first] == [main] * 3  # made on the spot, clean, perturbed
    assert [s[:2] for s in rest] == [("perturbation", True), (main, False), (main, False)] * 2
    assert rest[0][2] == first[0][2]  # the weights of the first step
    assert rest[3][2] == rest[1][2]  # those of the second


def test_without_overlap_nothing_is_hidden_and_the_time_is_on_the_books() -> None:
    _, optimizer, adversary = build(overlap=False)
    train(adversary, optimizer, data())
    assert adversary.hidden == 0
    assert adversary.exposed > 0
    _, optimizer, adversary = build()
    train(adversary, optimizer, data())
    assert adversary.exposed >= 0
    assert adversary.hidden >= 0
    assert adversary.exposed + adversary.hidden > 0


def test_a_loaded_state_goes_on_as_if_nothing_had_happened() -> None:
    batches = data(6)
    straight, optimizer, adversary = build()
    train(adversary, optimizer, batches)
    model, optimizer, adversary = build()
    for step, (x, y) in enumerate(adversary.ahead(batches)):
        if step == 3:
            break
        adversary.loss(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, kept = copy.deepcopy(model.state_dict()), adversary.state_dict()
    model, optimizer, adversary = build()
    model.load_state_dict(weights)
    adversary.load_state_dict(kept)
    assert adversary.state_dict()["perturbed"].equal(kept["perturbed"])
    train(adversary, optimizer, batches[3:])
    assert_same(model.state_dict(), straight.state_dict(), exact=True)


def test_accumulated_gradients_and_a_step_that_never_comes() -> None:
    """A batch is perturbed by the weights that the one before was trained at, whether or not these
    have changed in between."""
    results = []
    for overlap in (True, False):
        model, optimizer, adversary = build(overlap=overlap)
        for step, (x, y) in enumerate(adversary.ahead(data(6))):
            adversary.loss(x, y).backward()
            if step % 2:
                optimizer.step()
            if step != 2:
                optimizer.zero_grad()
        results.append(model.state_dict())
    assert_same(*results, exact=True)


def test_it_follows_autocast() -> None:
    results = []
    for overlap in (True, False):
        model, optimizer, adversary = build(overlap=overlap)
        for x, y in adversary.ahead(data()):
            with torch.autocast("cpu", torch.bfloat16):
                loss = adversary.loss(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(model.state_dict())
    assert_same(*results, exact=True)
    assert not results[0]["0.weight"].equal(oracle(data())["0.weight"])


def test_a_slope_that_is_not_finite_moves_nothing() -> None:
    _, _, adversary = build(loss=lambda model, x, y: (x * math.nan).sum() + model(x).sum() * 0)
    x, y = data(1)[0]
    assert adversary.perturb(x, y).equal(x)


def test_a_perturbation_is_one_bounded_step_up_the_loss() -> None:
    model, _, adversary = build(bounds=None)
    x, y = data(1)[0]
    moved = adversary.perturb(x, y)
    distance = (moved - x).abs()
    torch.testing.assert_close(distance[distance > 0], torch.full_like(distance[distance > 0], 0.1))
    assert F.cross_entropy(model(moved), y) > F.cross_entropy(model(x), y)
    assert all(p.grad is None for p in model.parameters())


def both_ways() -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """On every rank with data of its own: ours under GradientAverage and DDP, and the oracle."""
    world = tw.init()
    batches = data(seed=world.rank)

    def mean(gradient: Tensor) -> None:
        dist.all_reduce(gradient)
        gradient /= world.size

    wanted = oracle(batches, mean=mean)
    averaged, optimizer, adversary = build(tw.GradientAverage)
    train(adversary, optimizer, batches)
    model = tw.dual_batch_norm(network())
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    adversary = tw.ConcurrentAdversarial(
        ddp, optimizer, epsilon=EPSILON, weight=WEIGHT, bounds=(0.0, 1.0)
    )
    train(adversary, optimizer, batches)
    # DDP by itself gives the running statistics of rank 0 to all.
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    return [(averaged.state_dict(), wanted), (parameters, {n: wanted[n] for n in parameters})]


def test_several_replicas_equal_sequential_ones(ranks: Ranks) -> None:
    for pairs in ranks(2, both_ways):
        for ours, theirs in pairs:
            assert_same(ours, theirs)


def test_a_model_without_batch_norm_needs_no_second_set() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    adversary = tw.ConcurrentAdversarial(model, optimizer, epsilon=EPSILON)
    before = model[1].weight.detach().clone()
    train(adversary, optimizer, data(2))
    assert not model[1].weight.equal(before)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"epsilon": 0.0}, r"ConcurrentAdversarial\(epsilon=...\) takes a number > 0, got 0.0"),
        ({"epsilon": math.nan}, r"\(epsilon=...\) takes"),
        ({"weight": -1.0}, r"\(weight=...\) takes a number >= 0, got -1.0"),
        ({"bounds": (1.0, 0.0)}, r"\(bounds=...\) takes \(least, largest\)"),
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build(**settings)


def test_what_would_be_silently_wrong_is_refused() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with pytest.raises(ValueError, match=r"1 has one set of BatchNorm.*call dual_batch_norm"):
        tw.ConcurrentAdversarial(model, optimizer, epsilon=0.1)
    tw.dual_batch_norm(model)
    with pytest.raises(ValueError, match=r"does not train 1\.second\.weight"):
        tw.ConcurrentAdversarial(model, optimizer, epsilon=0.1)
    _, optimizer, adversary = build()
    with pytest.raises(ValueError, match=r"floating point; got torch\.int64"):
        adversary.announce(*(torch.zeros(2, dtype=torch.int64),) * 2)
    with pytest.raises(ValueError, match="another batch than was announced"):  # noqa: PT012
        for x, y in adversary.ahead(data()):
            adversary.loss(x + 0, y).backward()
            optimizer.step()

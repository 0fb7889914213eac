"""Loading a state: over a flight in the air, twice from one dictionary, with another period."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire.errors import PeerLost
from thinwire.wire.codecs import ErrorFeedback, Feedback, Int4, Threshold, TopK

KINDS: dict[str, dict[str, Any]] = {
    "LocalSGD": {"every": 4, "codec": ErrorFeedback(Int4())},
    "SlowMo": {"every": 4, "codec": Threshold(0.1)},
    "DiLoCo": {"every": 4},
    "StreamingDiLoCo": {"every": 12, "fragments": 3, "delay": 3, "codec": ErrorFeedback(Int4())},
    "CO2": {"every": 4, "codec": ErrorFeedback(TopK(256, 64), decay=0.9)},
    "Eager": {"every": 4},
    "Overlapped": {"every": 4, "fragments": 2, "codec": ErrorFeedback(Int4())},
    "SparseAverage": {"fraction": 0.25, "delay": 5},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 16), nn.Linear(16, 1)
        )

    def loss(self, seed: int) -> Tensor:
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
        return (self.layers(x) - x.sum(1, keepdim=True)).square().mean()


def build(kind: str, **more: Any) -> tuple[Net, Any]:
    net = Net()
    inner = torch.optim.AdamW(net.parameters(), lr=1e-2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return net, getattr(tw, kind)(inner, buffers=net.buffers(), **{**KINDS[kind], **more})


def train(net: Net, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last):
        net.loss(1000 * step + optimizer.wire.rank).backward()
        optimizer.step()
        optimizer.zero_grad()


def tensors(tree: Any, path: str = "") -> dict[str, Tensor]:
    if isinstance(tree, Tensor):
        return {path: tree}
    if isinstance(tree, dict):
        items: Any = tree.items()
    elif isinstance(tree, list | tuple):
        items = enumerate(tree)
    else:
        return {}
    return {k: v for key, value in items for k, v in tensors(value, f"{path}.{key}").items()}


def same(a: Any, b: Any) -> list[str]:
    """Paths at which two trees differ, bit for bit."""
    left, right = tensors(a), tensors(b)
    assert left.keys() == right.keys()
    return [path for path, value in left.items() if not torch.equal(value, right[path])]


def rolled_back(kind: str) -> list[str]:
    """Trains on after a save, and goes back to it, twice, at steps with flights in the air."""
    tw.init()
    net, optimizer = build(kind)
    train(net, optimizer, 0, 9)
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    untouched = copy.deepcopy(saved)
    train(net, optimizer, 9, 21)
    straight = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    differ = []
    for detour in (13, 22):  # past the save by another number of steps, and so of flights
        train(net, optimizer, 100, 100 + detour)
        net.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        train(net, optimizer, 9, 21)
        now = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
        differ += [f"after {detour}: {path}" for path in same(straight, now)]
        differ += [f"loaded: {path}" for path in same(untouched, saved)]
    return differ


@pytest.mark.parametrize("kind", KINDS)
def test_going_back_over_a_flight_in_the_air_is_bit_exact_and_uses_nothing_up(
    ranks, kind: str
) -> None:
    assert ranks(2, rolled_back, kind) == [[], []]


def gathered_errors() -> list[str]:
    """Four ranks: owners' errors too, and the portable form of a memory."""
    tw.init()
    wire = tw.Wire()
    differ = []
    codecs: list[Feedback] = [ErrorFeedback(Int4()), ErrorFeedback(TopK(256, 16, gather=False))]
    codecs += [ErrorFeedback(TopK(256, 16)), Threshold(0.1, momentum=0.5)]
    for codec in codecs:

        def send(memory: Feedback, seed: int) -> None:
            values = torch.randn(1000, generator=torch.Generator().manual_seed(seed))
            wire.mean(values, memory).wait()

        send(codec, wire.rank)
        own = copy.deepcopy(codec.state_dict())
        mean = lambda values: wire.mean(values).wait()  # noqa: E731
        portable = copy.deepcopy(codec.portable_state(mean, wire.size, wire.rank))
        for state, load in (
            (own, lambda memory, s: memory.load_state_dict(s)),
            (portable, lambda memory, s: memory.load_portable_state(s, wire.size, wire.rank)),
        ):
            untouched, again = copy.deepcopy(state), codec.fresh()
            load(again, state)
            for seed in range(10):
                send(again, 10 * seed + wire.rank)
            differ += [f"{codec!r}: {path}" for path in same(untouched, state)]
    return differ


def test_a_loaded_memory_leaves_the_dictionary_alone(ranks) -> None:
    assert ranks(4, gathered_errors) == [[]] * 4


def failed_flight() -> tuple[bool, str]:
    """The peer dies with a mean in the air; the state is loaded all the same."""
    world = tw.init(timeout=3)
    net, optimizer = build("CO2", codec=None)
    train(net, optimizer, 0, 4)
    saved = copy.deepcopy(optimizer.state_dict())
    train(net, optimizer, 4, 7)
    if world.rank == 1:
        raise SystemExit(3)
    net.loss(7).backward()
    optimizer.step()  # launches a round nobody answers
    optimizer.load_state_dict(saved)
    fragment = optimizer.fragments[0]
    intact = not same(saved["method"]["fragments"][0], fragment.state())
    try:
        train(net, optimizer, 4, 13)
    except PeerLost as error:
        return intact, str(error)
    return intact, ""


def test_loading_over_a_flight_that_failed(ranks) -> None:
    first, _ = ranks(2, failed_flight, errors=True, silent=(1,))
    assert first[0], f"the loaded state is what it was: {first}"
    assert "rank 1" in first[1]


# -- the period -----------------------------------------------------------------------------------


def another_period(kind: str, more: dict[str, Any], saved_every: int) -> Any:
    tw.init()
    net, optimizer = build(kind, **{**more, "every": saved_every})
    train(net, optimizer, 0, 2 * saved_every + 1)
    state = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    again, second = build(kind, **more)
    again.load_state_dict(state[0])
    second.load_state_dict(state[1])
    transfers = [second.account.transfers]
    for step in range(2 * more["every"]):
        train(again, second, 50 + step, 51 + step)
        transfers.append(second.account.transfers)
    sent = [at + 1 for at in range(2 * more["every"]) if transfers[at] < transfers[at + 1]]
    second.finish()
    digests = second.wire.gather_bytes(tw.wire.agreement.digest(again.parameters()))
    return second.every, sent, len(set(digests)) == 1


@pytest.mark.parametrize(
    ("kind", "more", "sent"),
    [
        ("LocalSGD", {"every": 6}, [6, 12]),
        ("Overlapped", {"every": 6}, [3, 6, 9, 12]),
        ("StreamingDiLoCo", {"every": 15}, [5, 10, 15, 20, 25, 30]),
    ],
)
def test_the_period_asked_for_wins_over_the_saved_one(ranks, kind, more, sent: list[int]) -> None:
    """A new round begins at the resume; what was in the air lands, and nothing is lost or stuck."""
    for every, found, equal in ranks(2, another_period, kind, more, 12):
        assert every == more["every"]
        assert found == sent
        assert equal


def measured_period() -> tuple[Any, Any, Any]:
    tw.init()
    net, first = build("LocalSGD", every="auto")
    train(net, first, 0, 3)
    early = copy.deepcopy(first.state_dict())
    train(net, first, 3, 9)
    decided, state = first.every, copy.deepcopy(first.state_dict())
    net, second = build("LocalSGD", every="auto")
    train(net, second, 0, 4)  # its own measurement is in the air
    second.load_state_dict(state)
    taken = second.every
    second.load_state_dict(early)
    undecided = second.every
    train(net, second, 3, 12)
    return decided == taken, undecided, second.every


def test_auto_keeps_what_was_measured(ranks) -> None:
    for kept, undecided, measured in ranks(2, measured_period):
        assert kept
        assert undecided is None
        assert measured >= 8


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    net, optimizer = build("Overlapped")
    train(net, optimizer, 0, 5)
    state = copy.deepcopy(optimizer.state_dict())
    before = copy.deepcopy(optimizer.engine.method_state())
    state["method"]["fragments"][1]["anchor"] = torch.zeros(3)
    with pytest.raises(ValueError, match="anchor has 3 values"):
        optimizer.engine.load_method_state(state["method"])
    assert same(before, optimizer.engine.method_state()) == []


def loaded_late(kind: str) -> tuple[bool, bool]:
    """Weights that are loaded between the constructor and the first step are where it starts."""
    tw.init()
    other = {k: v + 1 if v.is_floating_point() else v for k, v in Net().state_dict().items()}
    results = []
    for late in (False, True):
        net = Net()
        if not late:
            net.load_state_dict(other)
        inner = torch.optim.SGD(net.parameters(), lr=1e-3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = getattr(tw, kind)(inner, every=3)
        if late:
            net.load_state_dict(other)
        train(net, optimizer, 0, 8)
        results.append((net, optimizer))
    stepped = not same(results[0][0].state_dict(), results[1][0].state_dict())
    for _, optimizer in results:
        optimizer.finish()
    return stepped, not same(results[0][0].state_dict(), results[1][0].state_dict())


@pytest.mark.parametrize("kind", ["DiLoCo", "CO2", "Overlapped"])
def test_weights_loaded_after_the_constructor_are_the_first_anchor(ranks, kind: str) -> None:
    assert ranks(2, loaded_late, kind) == [(True, True)] * 2

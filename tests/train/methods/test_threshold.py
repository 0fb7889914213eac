"""dct in the trainer: its flags, its state, and a run that is taken up by other ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import Ranks
from thinwire.errors import UsageError
from thinwire.train.config import parse
from thinwire.train.methods.registry import find_method
from thinwire.train.methods.threshold import DctSettings
from thinwire.wire import world


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 20))


def build(settings: DctSettings) -> Any:
    net = model()
    inner = torch.optim.SGD(net.parameters(), lr=0.05)
    return find_method("dct").build(net, inner, settings, None)


def step(replica: Any, rank: int, number: int) -> None:
    generator = torch.Generator().manual_seed(100 * number + rank)
    x = torch.randn(8, 20, generator=generator)
    (replica.module(x) - x.flip(1)).square().mean().backward()
    replica.step(1.0)
    replica.optimizer.zero_grad()


def weights(replica: Any) -> list[Tensor]:
    return [p.detach().clone() for p in replica.model.parameters()]


def run(states: list[Any] | None, first: int, last: int) -> tuple[list[Tensor], Any, bool]:
    """Steps first..last, from saved states if there are any; (weights, state, overlapped)."""
    here = world.init()
    replica = build(DctSettings(density=0.1, bucket_mb=0.002))
    if states is not None:
        shared, private = states[here.rank % len(states)]
        replica.load_state(shared, private, same_replicas=len(states) == here.size)
    for number in range(first, last):
        step(replica, here.rank, number)
    return weights(replica), replica.state(), replica.optimizer.overlap


@pytest.mark.parametrize("size", [2, 3])
def test_a_resumed_run_goes_on_bit_for_bit(ranks: Ranks, size: int) -> None:
    whole = ranks(size, run, None, 0, 9)
    half = ranks(size, run, None, 0, 5)
    rest = ranks(size, run, [state for _, state, _ in half], 5, 9)
    for (ours, _, _), (theirs, _, _) in zip(whole, rest, strict=True):
        assert all(map(torch.equal, ours, theirs))
        assert all(map(torch.equal, ours, whole[0][0])), "replicas are equal"
    assert all(overlapped for _, _, overlapped in whole)


def test_another_number_of_ranks_starts_from_the_mean_error(ranks: Ranks) -> None:
    saved = [state for _, state, _ in ranks(3, run, None, 0, 5)]
    answers = ranks(2, run, saved, 5, 8)
    assert all(map(torch.equal, answers[0][0], answers[1][0]))
    (shared, _), (_, private) = saved[0], answers[0][1]
    assert [e["steps"] for e in shared["portable"]["errors"]] == [5] * len(
        shared["portable"]["errors"]
    )
    assert [e["steps"] for e in private["method"]["errors"]] == [8] * len(
        private["method"]["errors"]
    )
    for other in saved[1:]:
        pairs = zip(shared["portable"]["errors"], other[0]["portable"]["errors"], strict=True)
        assert all(torch.equal(a["error"], b["error"]) for a, b in pairs)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--density", "0"], r"^--density takes a number in \(0, 1\], got 0"),
        (["--density", "1.5"], r"^--density takes a number in \(0, 1\], got 1.5"),
        (["--refresh", "0"], r"^--refresh takes a whole number >= 1, got 0"),
        (["--value-bits", "3"], r"^--value-bits takes one of 1, 2, 4, 8, 16, 32, got 3"),
        (["--correction", "1"], r"^--correction takes a number in \[0, 1\), got 1"),
        (["--bucket-mb", "-1"], r"--bucket-mb takes a number >= 0, got -1"),
    ],
)
def test_bad_flags_are_refused_before_anything_starts(flags: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse(["--method", "dct", *flags])


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        ("threshold:2", r"takes a share in \(0, 1\]"),
        ("threshold:", r"takes a share in \(0, 1\]"),
        ("threshold+ef", "threshold has it built in"),
    ],
)
def test_bad_codecs_are_refused(codec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse(["--method", "average", "--codec", codec])


def test_optimizers_it_does_not_work_with_are_refused() -> None:
    net = model()
    dct = find_method("dct")
    with pytest.raises(UsageError, match=r"learns badly under Adam.*--optimizer SGD --lr 0.3"):
        dct.build(net, torch.optim.AdamW(net.parameters()), DctSettings(), None)
    inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(UsageError, match="leave the optimizer's own out"):
        dct.build(net, inner, DctSettings(), None)

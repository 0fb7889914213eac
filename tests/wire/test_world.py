"""Joining the world, and what is refused there."""

import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist

import thinwire as tw
from thinwire.errors import UsageError
from thinwire.wire.agreement import digest, require_same, require_same_values
from thinwire.wire.world import current


def rank_of(values: dict[int, Any]) -> Any:
    """The value of this rank; -1 is everybody else's."""
    import os

    return values.get(int(os.environ["RANK"]), values[-1])


def join(settings: dict[int, dict[str, Any]]) -> tuple[int, int, float]:
    world = tw.init(rank_of(settings), timeout=7)
    # A wire made after the settings' own was closed.
    total = tw.Wire().agree([1.0], "sum")[0]
    return world.rank, world.size, total


def test_equal_settings_are_accepted(ranks) -> None:
    settings = {"lr": 0.1, "tags": {"b", "a", "c"}, "model": {"width": 3}, "none": None}
    assert ranks(3, join, {-1: settings}) == [(0, 3, 3.0), (1, 3, 3.0), (2, 3, 3.0)]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {-1: {"lr": 0.1, "seed": 1}, 1: {"lr": 0.2, "seed": 1}},
            "setting 'lr' differs between ranks: 0.1 on ranks 0, 2; 0.2 on rank 1",
        ),
        (
            {-1: {"model": {"width": 8, "act": "gelu"}}, 2: {"model": {"width": 8, "act": "relu"}}},
            'setting \'model.act\' differs between ranks: "gelu" on ranks 0, 1; "relu" on rank 2',
        ),
        (
            {-1: {"every": 4}, 0: {}},
            "setting 'every' differs between ranks: not set on rank 0; 4 on ranks 1, 2",
        ),
        # A NaN equals itself here, and an empty mapping is something.
        (
            {-1: {"a": float("nan"), "b": {}}, 0: {"a": float("nan"), "b": None}},
            "setting 'b' differs between ranks: null on rank 0; {} on ranks 1, 2",
        ),
    ],
)
def test_a_setting_that_differs_is_named(ranks, given: dict[int, Any], expected: str) -> None:
    for failure in ranks(3, join, given, errors=True):
        assert (failure.kind, failure.message) == ("UsageError", expected)


def unequal_tensors() -> str:
    tw.init()
    wire = tw.Wire()
    weights = [torch.ones(3), torch.full((2, 2), 2.0 + (wire.rank == 2), dtype=torch.bfloat16)]
    require_same_values(wire, weights[:1], "the weights")
    with pytest.raises(UsageError) as caught:
        require_same_values(wire, weights, "the weights")
    return str(caught.value)


def test_values_that_differ_name_the_ranks(ranks) -> None:
    for message in ranks(3, unequal_tensors):
        assert message.startswith("the weights differ between ranks (digest ")
        assert "on ranks 0, 1;" in message
        assert "on rank 2)" in message


def unequal_in_a_subgroup() -> str:
    tw.init()
    group = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        with pytest.raises(ValueError, match=r"no member of the group|not a member|invalid"):
            tw.Wire(group)
        return ""
    with pytest.raises(UsageError) as caught:
        require_same(tw.Wire(group), {"x": dist.get_rank()})
    return str(caught.value)


def test_ranks_of_a_subgroup_are_named_as_the_launcher_counts_them(ranks) -> None:
    answers = ranks(4, unequal_in_a_subgroup)
    expected = "setting 'x' differs between ranks: 1 on rank 1; 3 on rank 3"
    assert answers == ["", expected, "", expected]


def test_a_digest_sees_every_bit() -> None:
    x = torch.randn(100)
    same = digest([x.clone()])
    assert digest([x]) == same
    for index in (0, 99):
        y = x.clone()
        y.view(torch.int32)[index] ^= 1
        assert digest([y]) != same
    assert digest([torch.tensor(1.0), torch.empty(0)]) == digest([torch.tensor([1.0])])
    assert digest([x.view(10, 10).t()]) != same


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "5", None])
def test_a_bad_timeout_is_refused(timeout: Any) -> None:
    with pytest.raises(UsageError, match=r"init\(timeout=...\) takes seconds > 0"):
        tw.init(timeout=timeout)
    if timeout is not None:
        with pytest.raises((ValueError, TypeError)):
            tw.Wire(timeout=timeout)


def test_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    world = tw.init({"lr": 1}, timeout=5)
    assert (world.rank, world.size, world.timeout, world.heartbeat) == (0, 1, 5, None)
    tw.shutdown()


def test_half_of_torchruns_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    for name in ("WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="RANK is set but WORLD_SIZE, MASTER_PORT not"):
        tw.init()


def test_a_port_in_use_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MASTER_PORT", str(port))
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        with pytest.raises(UsageError, match=f"no free port: 127.0.0.1:{port} is in use"):
            tw.init()
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("name", "value"),
    [("RANK", "x"), ("WORLD_SIZE", "two"), ("MASTER_PORT", "http"), ("RANK", "5")],
)
def test_nonsense_in_the_environment_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    for key in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(key, "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=name):
        tw.init()


def users_own_group() -> tuple[float, float, int]:
    dist.init_process_group("gloo")
    assert current().size == 2, "known without init"
    default = current().timeout
    world = tw.init(timeout=9)
    assert tw.Wire().world is world
    total = tw.Wire().agree([1.0], "sum")[0]
    tw.shutdown()
    assert not dist.is_initialized()
    return default, world.timeout, int(total)


def test_a_group_that_the_user_made_is_joined(ranks) -> None:
    assert ranks(2, users_own_group) == [(60.0, 9, 2)] * 2


def two_worlds() -> list[float]:
    """Leave one world and join another through the same store."""
    totals = []
    for _ in range(2):
        world = tw.init(timeout=5)
        wire = tw.Wire()
        assert world.heartbeat is not None
        assert world.heartbeat.suspects(wire.ranks) == {}
        totals.append(wire.agree([1.0], "sum")[0])
        wire.barrier()
        tw.shutdown()
    return totals


def test_a_second_world_after_the_first(ranks) -> None:
    assert ranks(2, two_worlds) == [[2.0, 2.0]] * 2


def closed_wires() -> tuple[float, str]:
    tw.init()
    for _ in range(3):
        wire = tw.Wire()
        mean = wire.mean(torch.tensor([float(wire.rank)])).wait().item()
        wire.close()
    with pytest.raises(RuntimeError, match="closed") as caught:
        wire.mean(torch.zeros(3))
    return mean, str(caught.value)


def test_wires_are_made_and_closed_in_turn(ranks) -> None:
    assert ranks(2, closed_wires) == [(0.5, "wire 'wire' is closed")] * 2


def unequal_numbers_of_groups() -> list[float]:
    """Ranks in different numbers of groups still meet: 0-1 and 1-2, as pipeline stages do."""
    tw.init()
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    means = []
    for group in pairs:
        if dist.get_rank() in dist.get_process_group_ranks(group):
            wire = tw.Wire(group)
            means.append(wire.mean(torch.tensor([float(dist.get_rank())])).wait().item())
    return means


def test_ranks_in_unequal_numbers_of_groups(ranks) -> None:
    assert ranks(3, unequal_numbers_of_groups) == [[0.5], [0.5, 1.5], [1.5]]

"""Where the ranks meet: who may listen there, and what is asked of a process by its environment."""

import ipaddress
import os
import resource
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw
from tests.conftest import Ranks, free_port
from tests.sockets import listening
from thinwire.errors import UsageError
from thinwire.wire import rendezvous
from thinwire.wire.rendezvous import Place
from thinwire.wire.world import trial


def without_init(kind: str) -> str:
    model = nn.Linear(3, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    make: dict[str, Any] = {
        "wire": tw.Wire,
        "local": lambda: tw.LocalSGD(inner, every=4),
        "average": lambda: tw.GradientAverage(inner),
        "gossip": lambda: tw.DecentLaM(model.parameters(), lr=0.1),
    }
    with pytest.raises(UsageError) as refused:
        make[kind]()
    tw.init()  # what the message asks for
    make[kind]()
    return str(refused.value)


@pytest.mark.parametrize("kind", ["wire", "local", "average", "gossip"])
def test_a_launched_process_that_has_not_joined_is_refused(ranks: Ranks, kind: str) -> None:
    for rank, message in enumerate(ranks(2, without_init, kind)):
        assert f"WORLD_SIZE=2 RANK={rank}" in message
        assert "thinwire.init()" in message
        assert "unset WORLD_SIZE" in message


def tried_out() -> str:
    with trial():
        assert tw.Wire().size == 1
    with pytest.raises(UsageError) as refused:
        tw.Wire()
    with pytest.raises(RuntimeError, match="bad settings"), trial():
        raise RuntimeError("bad settings")
    with pytest.raises(UsageError):
        tw.Wire()
    tw.init()
    with trial():
        assert tw.Wire().size == 2, "what has been joined stays so"
    assert tw.Wire().size == 2
    return str(refused.value)


def test_settings_are_tried_before_the_others_are_joined(ranks: Ranks) -> None:
    """As a worker of `thinwire train` does, and nothing is left of it."""
    for message in ranks(2, tried_out):
        assert "WORLD_SIZE=2" in message


def test_alone_nothing_has_to_be_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    for size in ("1", "", None):
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        if size is not None:
            monkeypatch.setenv("WORLD_SIZE", size)
        tw.shutdown()
        assert tw.Wire().size == 1


def test_a_size_without_a_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UsageError, match="WORLD_SIZE=4 is set but RANK not"):
        tw.init()
    tw.shutdown()
    with pytest.raises(UsageError, match="RANK=not set"):
        tw.Wire()


def listens_on(host: str) -> set[str]:
    os.environ["MASTER_ADDR"] = host
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    tw.init()
    wire = tw.Wire()
    wire.barrier()
    found = listening("self")
    wire.barrier()
    return found


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_store_of_one_machine_is_on_loopback_alone(ranks: Ranks, host: str) -> None:
    found = set().union(*ranks(2, listens_on, host, own_store=True))
    assert found == {"127.0.0.1"}


def two_worlds_with_a_store_of_their_own() -> list[set[str]]:
    found = []
    for _ in range(2):
        found.append(listens_on("127.0.0.1"))
        tw.shutdown()
    return found


def test_a_store_is_made_again_by_a_second_world(ranks: Ranks) -> None:
    for found in ranks(1, two_worlds_with_a_store_of_their_own, own_store=True):
        assert found == [{"127.0.0.1"}] * 2


def test_an_address_of_no_interface_is_left_to_torch() -> None:
    """A router's address that is mapped to this machine: 192.0.2.0/24 is nobody's."""
    assert rendezvous._listener(Place(0, 2, "192.0.2.77", free_port())) is None
    assert rendezvous._listener(Place(0, 2, "some.host.name", free_port())) is None


def test_a_public_store_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    public = ipaddress.ip_address("8.8.8.8")
    monkeypatch.setattr(rendezvous, "_warned", False)
    monkeypatch.setattr(rendezvous, "_own_addresses", lambda: [public])
    everywhere = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    here = Place(0, 2, "127.0.0.1", everywhere.port)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rendezvous.warn_if_public(Place(1, 2, "8.8.8.8", everywhere.port), 1)
    with pytest.warns(UserWarning, match=rf"port {everywhere.port} of 8\.8\.8\.8.*security\.md"):
        rendezvous.warn_if_public(here, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rendezvous.warn_if_public(here, 1)


def test_a_public_address_is_known_by_its_name_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_warned", False)
    with pytest.warns(UserWarning, match=r"of 2606:4700::1111: a public"):
        rendezvous.warn_if_public(Place(0, 2, "2606:4700::1111", free_port()), 1)


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.3", "100.101.102.103", "fd00::2", "no.such"])
def test_private_addresses_are_not_warned_of(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """Loopback, a company's network, Tailscale's, a private one of IPv6, a name nobody knows."""
    monkeypatch.setattr(rendezvous, "_warned", False)
    monkeypatch.setattr(rendezvous, "_own_addresses", lambda: [ipaddress.ip_address("8.8.8.8")])
    bound = rendezvous._listener(Place(0, 1, "127.0.0.1", 0))
    assert bound is not None
    with bound, warnings.catch_warnings():
        warnings.simplefilter("error")
        rendezvous.warn_if_public(Place(0, 2, host, bound.getsockname()[1]), 1)


def files_allowed() -> tuple[int, int]:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 900), hard))
    tw.init()
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def test_more_files_are_allowed_at_init(ranks: Ranks) -> None:
    for soft, hard in ranks(1, files_allowed):
        assert soft == (1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16))

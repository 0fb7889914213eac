import socket

import pytest

from thinwire.errors import UsageError
from thinwire.lab.environment import worker_environment


def test_emulated_hosts_are_nodes() -> None:
    env = worker_environment(2, 2, True, {})[3]
    expected = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    expected |= {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}
    expected |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500"}
    expected |= {"GLOO_SOCKET_IFNAME": "wire0", "OMP_NUM_THREADS": "1", "THINWIRE_LAUNCHED": "1"}
    assert expected.items() <= env.items()


def test_plain_workers_share_one_node() -> None:
    env = worker_environment(4, 1, False, {"OMP_NUM_THREADS": "3"})[2]
    expected = {"RANK": "2", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "1"}
    expected |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "3"}
    assert expected.items() <= env.items()


def test_an_interface_that_the_user_named_is_kept_outside_the_lab_alone() -> None:
    given = {"GLOO_SOCKET_IFNAME": "eth7"}
    assert worker_environment(2, 1, False, given)[0]["GLOO_SOCKET_IFNAME"] == "eth7"
    assert worker_environment(2, 1, True, given)[0]["GLOO_SOCKET_IFNAME"] == "wire0"


def test_no_free_port(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: object) -> None:
        raise OSError(98, "Address already in use")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(UsageError, match="no free port"):
        worker_environment(2, 1, False, {})

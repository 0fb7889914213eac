"""The one fixture behind all multi-process tests: real ranks over real sockets on this machine."""

import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable, Container, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch
import torch.distributed as dist

os.environ["OMP_NUM_THREADS"] = "1"
# As the command line sets it before it imports torch, which the server below does once for all.
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
torch.set_num_threads(1)

# A server that has imported everything once: each rank is a fork of it, started in milliseconds.
# (The first step of any torch optimizer imports torch._dynamo, which takes seconds.)
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",
        "torch.distributed.pipelining",
        "pytest",
        "sklearn.datasets",  # passed over where it is not installed
        "thinwire.wire",
        "thinwire.optim",
        "thinwire.wire.ddp",
        "thinwire.pipeline",
    ]
)

Ranks = Callable[..., list[Any]]


class Died:
    """What a rank returned that ended without an answer."""

    def __init__(self, code: int | None) -> None:
        self.code = code


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """`ranks(size, function, *args)` runs function(*args) on `size` ranks and returns the results.

    The function is a module-level one and may call anything of torch.distributed or thinwire. An
    exception on any rank fails the test with that rank's traceback, unless `errors=True`: then
    exceptions come back as values, and a rank that died as `Died`. Ranks in `silent` are not asked
    for an answer and give None. With `own_store=True` the store lives in rank 0, as it does without
    torchrun, and dies with it.
    """
    started: list[Any] = []

    def run(
        size: int,
        function: Callable[..., Any],
        *args: Any,
        errors: bool = False,
        within: float = 90,
        silent: Container[int] = (),
        own_store: bool = False,
    ) -> list[Any]:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port, held = (free_port(), "False") if own_store else (store.port, "True")
        pipes = []
        for rank in range(size):
            ours, theirs = _context.Pipe()
            process = _context.Process(
                target=_rank, args=(rank, size, port, held, theirs, function, args), daemon=True
            )
            process.start()
            theirs.close()
            started.append(process)
            pipes.append((ours, process))
        return [
            None if rank in silent else _answer(pipe, process, errors, within)
            for rank, (pipe, process) in enumerate(pipes)
        ]

    yield run
    for process in started:
        process.kill()
        process.join()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _answer(pipe: Connection, process: Any, errors: bool, within: float) -> Any:
    if not wait([pipe], timeout=within):
        pytest.fail(f"a rank did not answer within {within} s")
    try:
        kind, value = pickle.loads(pipe.recv_bytes())
    except EOFError:
        process.join()
        kind, value = "died", Died(process.exitcode)
    if kind == "result" or errors:
        return value
    pytest.fail(f"a rank failed:\n{value if kind == 'died' else value.text}")


class Failed:
    """An exception of a rank, as text."""

    def __init__(self, error: BaseException) -> None:
        self.kind = type(error).__name__
        self.message = str(error)
        self.text = "".join(traceback.format_exception(error))


def _rank(
    rank: int,
    size: int,
    port: int,
    store_held: str,
    pipe: Connection,
    function: Callable[..., Any],
    args: Any,
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": store_held,  # if the test holds it, rank 0 may die
        "OMP_NUM_THREADS": "1",
    }
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    try:
        pipe.send_bytes(pickle.dumps(("result", function(*args))))
    except BaseException as error:
        pipe.send_bytes(pickle.dumps(("error", Failed(error))))
    pipe.close()
    os._exit(0)  # a broken group's destructor may wait for a peer that is gone

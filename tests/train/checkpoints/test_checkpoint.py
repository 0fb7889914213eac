"""Round trips, kills at every moment of a save, refusals."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from thinwire.errors import UsageError
from thinwire.train.checkpoints import checkpoint
from thinwire.train.checkpoints.checkpoint import flatten, load, save, unflatten
from thinwire.train.tasks.models import GPT, GPTConfig

NO_META: dict[str, Any] = {}


def save_alone(directory: Path, step: int, value: float | None = None, **settings: Any) -> Path:
    """A save of one replica whose whole state says which save it was."""
    value = float(step) if value is None else value
    arguments: dict[str, Any] = {
        "shared": {"model": {"w": torch.full((1000,), value)}, "position": value},
        "private": {"rng": torch.full((10,), value)},
        "replica": 0,
        "replicas": 1,
        "meta": NO_META,
        "barrier": lambda: None,
        "leader": True,
    }
    return save(directory, step, **arguments | settings)


def value_of(path: Path) -> float:
    """The value of `save_alone`, after checking that all parts are of one save."""
    loaded = load(path, replica=0)
    value = loaded.shared["position"]
    assert torch.equal(loaded.shared["model"]["w"], torch.full((1000,), value))
    assert torch.equal(loaded.private["rng"], torch.full((10,), value))
    return value


def assert_same(a: Any, b: Any) -> None:
    """Equal in every bit, type and key."""
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        left, right = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
        assert torch.equal(left, right)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        assert [type(key) for key in a] == [type(key) for key in b]
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert type(a) is type(b)
        assert len(a) == len(b)
        for left, right in zip(a, b, strict=True):
            assert_same(left, right)
    else:
        assert type(a) is type(b)
        assert a == b


# Round trips

ODD_STATE = {
    "bf16": torch.randn(7, 3).bfloat16(),
    "half": torch.tensor([float("nan"), float("-inf"), -0.0]).half(),
    "scalar": torch.tensor(3.25, dtype=torch.float64),
    "empty": torch.empty(0, 4, dtype=torch.int32),
    "flags": torch.tensor([True, False]),
    "strided": torch.arange(12).view(3, 4).t(),
    "part of more": torch.arange(100)[3:7],
    "expanded": torch.ones(1).expand(5),
    "leaves": [None, True, 3, 2**200, 0.1, float("inf"), "text", ()],
    "nested": ({"a/b": torch.zeros(1), "a": {"b": torch.ones(1)}}, [(1, (2,))]),
    "document": torch.full((2,), 5),
    1: {2: torch.tensor(1), "2": torch.tensor(2)},
    "nothing": {},
}


def test_odd_states_come_back_bit_for_bit(tmp_path: Path):
    assert_same(ODD_STATE, unflatten(flatten(ODD_STATE)))
    save_alone(tmp_path, 1, shared=ODD_STATE, private={"x": ODD_STATE})
    loaded = load(tmp_path, replica=0)
    assert_same(ODD_STATE, loaded.shared)
    assert_same(ODD_STATE, loaded.private["x"])


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=1e-3, betas=(0.8, 0.95)),
        lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD([{"params": p[:2]}, {"params": p[2:], "lr": 0.01}], lr=0.1),
    ],
    ids=["adamw", "amsgrad", "nesterov", "groups"],
)
def test_optimizer_resumes_bit_for_bit(tmp_path: Path, make: Any):
    def built() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
        return model, make(list(model.parameters()))

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()

    model, optimizer = built()
    steps(model, optimizer, 3)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert_same(state["optimizer"], unflatten(flatten(state))["optimizer"])
    save_alone(tmp_path, 3, shared=state)
    steps(model, optimizer, 2)

    resumed, fresh = built()  # an optimizer that has made no moments yet
    loaded = load(tmp_path, replica=0).shared
    resumed.load_state_dict(loaded["model"])
    fresh.load_state_dict(loaded["optimizer"])
    steps(resumed, fresh, 2)
    assert_same(dict(model.state_dict()), dict(resumed.state_dict()))
    assert_same(optimizer.state_dict(), fresh.state_dict())


def test_shared_memory_is_stored_once_and_shared_again(tmp_path: Path):
    model = GPT(GPTConfig(1, 32, 2, 100, 8))
    entries = flatten({"model": model.state_dict()})
    assert len(entries) == len(list(model.parameters())) + 1
    save_alone(tmp_path, 1, shared={"model": model.state_dict()})
    weights = load(tmp_path, replica=0).shared["model"]
    assert weights["head.linear.weight"] is weights["embed.tokens.weight"]
    assert_same(dict(model.state_dict()), weights)


@pytest.mark.parametrize("bad", [{"x": object()}, {(1, 2): 3}, {"x": {1, 2}}, {"x": {True: 1}}])
def test_what_cannot_be_kept_is_refused(bad: Any):
    with pytest.raises(TypeError, match=r"checkpoint|keys"):
        flatten(bad)


def test_loaded_says_everything(tmp_path: Path):
    path = save_alone(tmp_path, 120, meta={"model": {"name": "gpt"}, "digest": "abc"})
    assert path == tmp_path / "checkpoints" / "step-00000120"
    for place in (tmp_path, tmp_path / "checkpoints", path, str(path)):
        loaded = load(place, replica=0)
        assert (loaded.step, loaded.replicas, loaded.source) == (120, 1, 0)
        assert loaded.meta == {"model": {"name": "gpt"}, "digest": "abc"}
    assert checkpoint.latest(tmp_path) == path
    assert checkpoint.latest(tmp_path / "other") is None


def test_keys_limit_what_is_read(tmp_path: Path):
    save_alone(tmp_path, 1)
    loaded = load(tmp_path, replica=0, keys={"model"})
    assert list(loaded.shared) == ["model"]
    assert loaded.private == {}


def test_no_pickle_is_written_or_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = save_alone(tmp_path, 1)
    files = [file for file in path.rglob("*") if file.is_file()]
    assert {file.suffix for file in files} == {".json", ".distcp"}
    for file in files:
        if file.suffix == ".json":
            json.loads(file.read_text())

    trusted, real = [], torch.load

    def spy(*args: Any, **kwargs: Any) -> Any:
        trusted.append(kwargs.get("weights_only"))
        return real(*args, **kwargs)

    def unpickled(*_: Any, **__: Any) -> None:
        raise AssertionError("a pickle was loaded")

    monkeypatch.setattr(torch, "load", spy)
    monkeypatch.setattr(pickle, "load", unpickled)
    monkeypatch.setattr(pickle, "loads", unpickled)
    assert value_of(tmp_path) == 1
    assert set(trusted) == {True}


# Which checkpoints are kept


def kept(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "checkpoints").iterdir())


def test_the_newest_are_kept(tmp_path: Path):
    for step in (1, 2, 3, 4):
        save_alone(tmp_path, step, keep=2)
    assert kept(tmp_path) == ["latest", "step-00000003", "step-00000004"]
    with pytest.raises(UsageError, match="at least one"):
        save_alone(tmp_path, 5, keep=0)


def test_saving_a_step_again_replaces_it(tmp_path: Path):
    save_alone(tmp_path, 5, value=1.0)
    save_alone(tmp_path, 5, value=2.0)
    assert value_of(tmp_path) == 2.0
    assert kept(tmp_path) == ["latest", "step-00000005"]


def test_a_run_taken_up_further_back_keeps_its_own_latest(tmp_path: Path):
    for step in (10, 20, 30):
        save_alone(tmp_path, step, keep=3)
    save_alone(tmp_path, 12, keep=1)
    assert value_of(tmp_path) == 12
    assert kept(tmp_path) == ["latest", "step-00000012", "step-00000020", "step-00000030"]


# Kills

KILLER = """
import os, signal, shutil, sys
from pathlib import Path
import torch
sys.path.insert(0, sys.argv[2])
from test_checkpoint import save_alone
from thinwire.train.checkpoints import checkpoint

root = Path(sys.argv[1])
CALLS = [(os, n) for n in ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir")]
CALLS.append((torch, "save"))

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def killed(prepare, attempt):
    # True if the attempt, in a process of its own, was ended by SIGKILL
    pid = os.fork()
    if not pid:
        prepare()
        attempt()
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status != 0

def die_at_moment(moment):
    checkpoint._reached = lambda reached: die() if reached == moment else None

def die_at_call(number):
    count = [0]
    def wrap(real):
        def call(*args, **kwargs):
            count[0] += 1
            if count[0] == number:
                die()
            return real(*args, **kwargs)
        return call
    for module, name in CALLS:
        setattr(module, name, wrap(getattr(module, name)))

for moment in sys.argv[3].split(","):
    again = moment == "old one aside"
    run = root / "moment" / moment
    save_alone(run, 10, value=1.0)
    assert killed(lambda: die_at_moment(moment),
                  lambda: save_alone(run, 10 if again else 20, value=2.0, keep=1)), moment

for kind, step in (("next", 20), ("again", 10)):
    number = 1
    while True:
        run = root / kind / str(number)
        save_alone(run, 10, value=1.0)
        if not killed(lambda: die_at_call(number), lambda: save_alone(run, step, 2.0, keep=1)):
            break
        number += 1
"""

BEFORE = ["tidied", "shared written", "private written", "manifest written"]
MOMENTS = {
    **dict.fromkeys([*BEFORE, "old one aside", "renamed", "latest written"], 1.0),
    **dict.fromkeys(["latest moved", "pruned"], 2.0),
}


@pytest.fixture(scope="module")
def killed_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directories whose second save was killed: moment/NAME, next/N and again/N."""
    root = tmp_path_factory.mktemp("killed")
    command = [sys.executable, "-c", KILLER, str(root), str(Path(__file__).parent)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, ",".join(MOMENTS)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return root


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_at_a_named_moment_leaves_the_previous_one_whole(killed_runs: Path, moment: str):
    assert value_of(killed_runs / "moment" / moment) == MOMENTS[moment]


@pytest.mark.parametrize("kind", ["next", "again"])
def test_a_kill_before_any_call_that_changes_the_disk(killed_runs: Path, kind: str):
    runs = sorted((killed_runs / kind).iterdir(), key=lambda path: int(path.name))
    assert len(runs) > 25
    values = [value_of(run) for run in runs]
    assert values == sorted(values)  # the old one up to some call, the new one from there on
    assert set(values) == {1.0, 2.0}
    for step in (killed_runs / kind).glob("*/checkpoints/step-*"):
        assert step.suffix or value_of(step) in values  # no half carries a checkpoint's name
    for run in runs:  # and the next save leaves nothing of the killed one behind
        save_alone(run, 30, keep=1)
        assert value_of(run) == 30.0
        assert kept(run) == ["latest", "step-00000030"]


# Several replicas


def spawn(worker: Any, world: int, directory: Path) -> list[int | None]:
    """Exit codes of `worker(rank, world, directory)` in a gloo group of processes."""
    context = mp.get_context("spawn")
    processes = [
        context.Process(target=in_group, args=(worker, rank, world, directory))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def in_group(worker: Any, rank: int, world: int, directory: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(str(directory / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    worker(rank, world, directory)
    dist.destroy_process_group()


def save_as_one_of(rank: int, world: int, directory: Path, step: int) -> None:
    save(
        directory,
        step,
        shared={"model": torch.full((100,), float(step))},
        private={"rank": rank, "own": torch.full((50,), float(10 * step + rank))},
        replica=rank,
        replicas=world,
        meta=NO_META,
        barrier=dist.barrier,
        leader=rank == 0,
    )


def save_and_lose_a_rank(rank: int, world: int, directory: Path) -> None:
    save_as_one_of(rank, world, directory, step=1)
    loaded = load(directory, replica=rank)  # whole on every rank as soon as save returns
    assert loaded.private["rank"] == rank

    def die(moment: str) -> None:
        if rank == 1 and moment == "private written":
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint._reached = die
    with pytest.raises(RuntimeError):  # gloo's barrier, for lack of a peer
        save_as_one_of(rank, world, directory, step=2)
    os._exit(0)


def test_replicas_save_and_load_their_own_and_a_lost_one_spoils_nothing(tmp_path: Path):
    assert spawn(save_and_lose_a_rank, 3, tmp_path) == [0, -signal.SIGKILL, 0]
    assert checkpoint.latest(tmp_path) == tmp_path / "checkpoints" / "step-00000001"
    for replica in range(5):
        loaded = load(tmp_path, replica=replica)
        assert (loaded.step, loaded.replicas, loaded.source) == (1, 3, replica % 3)
        assert torch.equal(loaded.shared["model"], torch.full((100,), 1.0))
        assert torch.equal(loaded.private["own"], torch.full((50,), 10.0 + replica % 3))


def test_shared_state_is_stored_once(tmp_path: Path):
    big = torch.zeros(100_000)

    def other_replicas() -> None:
        for replica in (1, 2):
            save_part = {"shared": {"big": big}, "private": {}, "replica": replica}
            save_alone(tmp_path, 1, replicas=3, leader=False, **save_part)

    calls = [lambda: None, other_replicas, lambda: None]  # the others finish at the second barrier
    save_alone(tmp_path, 1, shared={"big": big}, replicas=3, barrier=lambda: calls.pop(0)())
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert size < 1.2 * big.nbytes


def test_ranks_without_a_common_directory_are_told(tmp_path: Path):
    with pytest.raises(UsageError, match="share"):
        save_alone(tmp_path, 1, replicas=2)
    assert checkpoint.latest(tmp_path) is None


# Refusals

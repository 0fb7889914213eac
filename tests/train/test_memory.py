"""Memory is looked at before it is taken: what a run needs at least, and what there is."""

from pathlib import Path

import pytest
import torch

from tests.programs import corpus  # noqa: F401
from thinwire.errors import UsageError
from thinwire.train import memory
from thinwire.train.available import available
from thinwire.train.config import TrainConfig, parse
from thinwire.train.preflight import preflight_parts
from thinwire.train.tasks.models import Stack
from thinwire.train.tasks.task import Task


def made(corpus: str, *argv: str) -> tuple[TrainConfig, Task, Stack]:
    config = parse(["--data", corpus, "--context", "16", *argv])
    return config, *preflight_parts(config)


def test_a_batch_that_cannot_fit_is_refused_before_it_is_made(corpus: str) -> None:
    for batch in ("100000000", "2147483647"):
        with pytest.raises(UsageError, match=rf"--batch {batch} takes at least .* memory free"):
            made(corpus, "--batch", batch)


def test_a_model_that_cannot_fit_is_refused(corpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: 10_000_000_000)
    with pytest.raises(UsageError, match="--model gpt-1b takes at least 16"):
        made(corpus, "--model", "gpt-1b")
    made(corpus, "--model", "gpt-85m")
    with pytest.raises(UsageError, match="on each of 20 workers"):
        made(corpus, "--model", "gpt-85m", "--workers", "20")


@pytest.mark.parametrize(
    "argv", [[], ["--checkpoint-activations"], ["--compile"], ["--objective", "masked"]]
)
def test_it_is_no_more_than_a_pass_really_keeps(corpus: str, argv: list[str]) -> None:
    config, task, meta = made(corpus, *argv, "--batch", "16")
    _, passing = memory.needed(config, task, meta, 2.0)
    model, kept = task.build_model(), [0]

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[0] += tensor.nbytes
        return tensor

    x, y = task.blank()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.forward(x, y)
    assert 0 < passing < kept[0]


def test_what_the_machine_and_its_groups_leave(tmp_path: Path) -> None:
    def put(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert available(tmp_path) is None
    put("proc/meminfo", "MemTotal: 9 kB\nMemAvailable: 4000 kB\nSwapFree: 96 kB\n")
    assert available(tmp_path) == 4096 * 1024
    put("proc/self/cgroup", "0::/a/b\n")
    put("sys/fs/cgroup/a/b/memory.max", "max\n")
    put("sys/fs/cgroup/a/b/memory.current", "5\n")
    assert available(tmp_path) == 4096 * 1024
    put("sys/fs/cgroup/a/memory.max", "3000000\n")
    put("sys/fs/cgroup/a/memory.current", "1000000\n")
    put("sys/fs/cgroup/a/memory.stat", "anon 1\ninactive_file 500000\n")
    assert available(tmp_path) == 2_500_000
    put("proc/self/cgroup", "5:cpu,memory:/c\n")
    put("sys/fs/cgroup/memory/c/memory.limit_in_bytes", "700\n")
    put("sys/fs/cgroup/memory/c/memory.usage_in_bytes", "800\n")
    assert available(tmp_path) == 0
    assert available() > 0

"""From a checkpoint to a safetensors file and back to a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from thinwire.errors import UsageError
from thinwire.train.checkpoints import checkpoint
from thinwire.train.checkpoints.export import export, load_exported
from thinwire.train.tasks.models import GPT, GPTConfig, model_settings

CONFIG = GPTConfig(layers=2, width=32, heads=4, vocab=50, context=16)


def model(seed: int) -> GPT:
    torch.manual_seed(seed)
    return GPT(CONFIG)


def save(directory: Path, models: list[GPT], *, shared: bool, meta: Any = None) -> Path:
    """A checkpoint of these replicas; replica 0, the leader, finds the others' parts written."""
    states = [{"model": m.state_dict(), "optimizer": {"steps": 3}} for m in models]

    def part(replica: int, barrier: Any) -> Path:
        return checkpoint.save(
            directory,
            7,
            shared=states[0] if shared else {},
            private={} if shared else states[replica],
            replica=replica,
            replicas=len(models),
            meta={"model": model_settings(models[0], "gpt")} if meta is None else meta,
            barrier=barrier,
            leader=replica == 0,
        )

    def others() -> None:
        for replica in range(1, len(models)):
            part(replica, lambda: None)

    turns = [others, lambda: None, lambda: None]
    return part(0, lambda: turns.pop(0)())


@pytest.mark.parametrize("shared", [True, False])
def test_a_single_model_comes_back_bit_for_bit(tmp_path: Path, shared: bool):
    original = model(1)
    save(tmp_path, [original], shared=shared)
    out = export(tmp_path, tmp_path / "model.safetensors")
    restored = load_exported(out)
    assert restored.config == CONFIG
    for (name, a), (same, b) in zip(
        original.state_dict().items(), restored.state_dict().items(), strict=True
    ):
        assert name == same
        assert torch.equal(a, b)
    x = torch.arange(16).view(1, 16)
    assert torch.equal(original(x), restored(x))
    assert restored.head.linear.weight is restored.embed.tokens.weight


def test_replicas_are_averaged(tmp_path: Path):
    models = [model(seed) for seed in range(3)]
    path = save(tmp_path, models, shared=False)
    restored = load_exported(export(path, tmp_path / "model.safetensors")).state_dict()
    for name, weight in restored.items():
        mean = torch.stack([m.state_dict()[name].double() for m in models]).mean(0)
        torch.testing.assert_close(weight.double(), mean, rtol=1e-6, atol=1e-8)


def test_low_precision_is_averaged_in_fp32(tmp_path: Path):
    models = [model(seed).bfloat16() for seed in range(3)]
    save(tmp_path, models, shared=False)
    out = export(tmp_path, tmp_path / "model.safetensors")
    with safe_open(out, framework="pt") as file:
        weight = file.get_tensor("embed.tokens.weight")
    exact = torch.stack([m.embed.tokens.weight.detach().float() for m in models]).sum(0) / 3
    assert torch.equal(weight, exact.bfloat16())


def test_the_tied_head_is_stored_once(tmp_path: Path):
    save(tmp_path, [model(0), model(1)], shared=False)
    out = export(tmp_path, tmp_path / "model.safetensors")
    with safe_open(out, framework="pt") as file:
        names = set(file.keys())
        header = file.metadata()
    assert names == {name for name, _ in model(0).named_parameters()}
    assert header["step"] == "7"
    assert "head.linear.weight" in header["tied"]


def test_an_existing_file_is_kept_unless_forced(tmp_path: Path):
    save(tmp_path, [model(0)], shared=True)
    out = tmp_path / "model.safetensors"
    out.write_text("precious")
    with pytest.raises(UsageError, match="--force"):
        export(tmp_path, out)
    assert out.read_text() == "precious"
    export(tmp_path, out, force=True)
    assert load_exported(out).config == CONFIG
    assert [path.name for path in tmp_path.iterdir() if ".tmp" in path.name] == []


def test_bad_sources_are_refused(tmp_path: Path):
    out = tmp_path / "model.safetensors"
    with pytest.raises(UsageError, match="no thinwire checkpoint"):
        export(tmp_path, out)
    with pytest.raises(UsageError, match="no directory"):
        export(tmp_path, tmp_path / "none" / "model.safetensors")
    save(tmp_path / "a", [model(0)], shared=True, meta={})
    with pytest.raises(UsageError, match="which model"):
        export(tmp_path / "a", out)
    assert not out.exists()


def test_bad_files_are_refused(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    with pytest.raises(UsageError, match="cannot read"):
        load_exported(path)
    path.write_bytes(b"not safetensors at all")
    with pytest.raises(UsageError, match="cannot read"):
        load_exported(path)
    save_file({"w": torch.ones(1)}, path)
    with pytest.raises(UsageError, match="not exported by thinwire"):
        load_exported(path)
    settings = '{"layers":1,"width":8,"heads":1,"vocab":5,"context":4,"causal":true}'
    save_file({"w": torch.ones(1)}, path, metadata={"thinwire": "0", "model": settings})
    with pytest.raises(UsageError, match="does not fit its model"):
        load_exported(path)

"""Checkpoints that are damaged, foreign, incomplete or another model's are refused."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.checkpoints.test_checkpoint import save_alone, value_of
from thinwire.errors import UsageError
from thinwire.train.checkpoints import checkpoint
from thinwire.train.checkpoints.checkpoint import check_model, describe_model, load
from thinwire.train.tasks.models import GPT, GPTConfig, model_settings

NO_META: dict[str, Any] = {}


def refused(path: Path) -> str:
    with pytest.raises(UsageError) as error:
        load(path, replica=0)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_nothing_there_is_refused(tmp_path: Path):
    assert "no such file" in refused(tmp_path / "none")
    assert "no thinwire checkpoint" in refused(tmp_path)
    (tmp_path / "file").write_text("text")
    assert "no thinwire checkpoint" in refused(tmp_path / "file")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_foreign_checkpoint_is_refused(tmp_path: Path):
    torch.distributed.checkpoint.save({"w": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    assert "thinwire did not make" in refused(tmp_path)


def flip(path: Path, place: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(len(content) * place)] ^= 1
    path.write_bytes(content)


DAMAGED = ["shared/__0_0.distcp", "replica-0/__0_0.distcp", "shared/metadata.json", "thinwire.json"]


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.parametrize("place", [0.1, 0.5, 0.9])
def test_damage_is_refused(tmp_path: Path, name: str, place: float):
    path = save_alone(tmp_path, 1) / name
    whole = path.read_bytes()
    flip(path, place)
    assert "corrupt" in refused(tmp_path)
    path.write_bytes(whole[: int(len(whole) * place)])
    assert "corrupt" in refused(tmp_path)
    path.write_bytes(b"")
    assert "corrupt" in refused(tmp_path)
    path.write_bytes(whole)
    assert value_of(tmp_path) == 1


def test_missing_pieces_are_refused(tmp_path: Path):
    path = save_alone(tmp_path, 1)
    (path / "shared" / "__0_0.distcp").unlink()
    assert "corrupt" in refused(tmp_path)
    (path / "shared" / "metadata.json").unlink()
    assert "corrupt" in refused(tmp_path)
    (path / "thinwire.json").unlink()
    assert "not there or not whole" in refused(tmp_path)
    (path.parent / "latest").write_text("../../etc")
    assert "garbled" in refused(tmp_path)


def test_a_newer_format_is_refused(tmp_path: Path):
    path = save_alone(tmp_path, 1) / "thinwire.json"
    content = json.loads(path.read_text())
    content["body"] |= {"format": 99, "thinwire": "9.9.0"}
    content["crc32"] = zlib.crc32(json.dumps(content["body"], sort_keys=True).encode())
    path.write_text(json.dumps(content))
    message = refused(tmp_path)
    assert "format 99" in message
    assert "9.9.0" in message
    assert "upgrade" in message


def test_metadata_cannot_point_outside(tmp_path: Path):
    path = save_alone(tmp_path, 1) / "shared" / "metadata.json"
    content = path.read_text().replace("__0_0.distcp", "../replica-0/__0_0.distcp")
    path.write_text(content)
    with pytest.raises(checkpoint.DamagedError, match="no name of a file in the same"):
        checkpoint.read_metadata(path.parent)


def test_another_model_is_refused():
    config = GPTConfig(layers=2, width=32, heads=4, vocab=50, context=16)
    model = GPT(config)
    settings = model_settings(model, "gpt")
    meta = json.loads(json.dumps({"model": settings, "parameters": describe_model(model)}))
    check_model(meta, model, settings)
    check_model(meta, GPT(config))

    def difference(other: GPT, given: dict[str, Any] | None = None) -> str:
        with pytest.raises(UsageError) as error:
            check_model(meta, other, given)
        return str(error.value)

    assert "heads is 4 there and 8 here" in difference(model, {**settings, "heads": 8})
    wide = GPT(GPTConfig(2, 64, 4, 50, 16))
    assert "embed.tokens.weight has the shape [50, 32] there" in difference(wide)
    deep = GPT(GPTConfig(3, 32, 4, 50, 16))
    assert "blocks.2.attention_norm.weight exists here only" in difference(deep)
    flat = GPT(GPTConfig(1, 32, 4, 50, 16))
    assert "blocks.1.attention_norm.weight exists there only" in difference(flat)

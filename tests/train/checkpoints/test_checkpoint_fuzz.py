"""Hundreds of damaged, foreign and hostile checkpoints: each is refused in one line that says
where, or it holds what was written. Nothing is read for ever, or goes on with half a state."""

import json
import os
import random
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.programs import corpus  # noqa: F401
from thinwire.errors import UsageError
from thinwire.train.checkpoints import checkpoint, storage
from thinwire.train.config import CONFIG, TrainConfig, flat_values, parse
from thinwire.train.loop.trainer import Trainer
from thinwire.train.preflight import preflight
from thinwire.train.worker import run_worker
from thinwire.wire import world as world_module
from thinwire.wire.wire import Wire

STEP = "checkpoints/step-00000002"
DEEP = 100_000
FILES = [
    "checkpoints/latest",
    f"{STEP}/thinwire.json",
    *(f"{STEP}/{part}/{file}" for part in ("shared", "replica-0") for file in ("metadata.json",)),
    *(f"{STEP}/{part}/{file}" for part in ("shared", "replica-0") for file in ("__0_0.distcp",)),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, corpus: str) -> Path:
    """A run of two steps."""
    run = tmp_path_factory.mktemp("whole") / "run"
    run_worker(parse([*flags(corpus), "--run-dir", str(run)]))
    return run


def flags(corpus: str) -> list[str]:
    sizes = ["--context", "16", "--batch", "2", "--eval-windows", "4", "--steps", "2"]
    return ["--data", corpus, *sizes, "--method", "average", "--codec", "int8+ef"]


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


def config_of(run: Path) -> TrainConfig:
    return parse(["--run-dir", str(run), "--resume", "--steps", "4"])


def go_on(run: Path) -> Trainer:
    """What a worker does with a checkpoint, up to its first step."""
    config = config_of(run)
    task = preflight(config, run)
    trainer = Trainer(config, world_module.init(), Wire(name="control"), task, run)
    trainer.resume()
    trainer._first_or_next_step()
    return trainer


def refusal(action: Callable[[], Any]) -> str:
    """Empty if it was none."""
    try:
        action()
    except UsageError as error:
        text = str(error)
        assert text
        assert "\n" not in text
        assert len(text) < 1500
        return text
    return ""


# -- damage ---------------------------------------------------------------------------------------


def damages(path: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    content = path.read_bytes()
    draw = random.Random(path.name + path.parent.name)

    def put(new: bytes) -> Callable[[], None]:
        return lambda: (path.unlink(), path.write_bytes(new))[0]  # type: ignore[func-returns-value]

    yield "gone", path.unlink
    for name, new in {
        "empty": b"",
        "short": content[: len(content) // 2],
        "one short": content[:-1],
        "long": content + content,
        "zeros": bytes(len(content)),
        "noise": draw.randbytes(len(content)),
        "deep": b"[" * DEEP + b"]" * DEEP,
        "deep objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
        "number": b"5",
        "list": b"[]",
        "nothing": b"{}",
        "digits": b"9" * 10_000,
        "NaN": b"NaN",
    }.items():
        yield name, put(new)
    for _ in range(25):
        place, bit = draw.randrange(len(content)), draw.randrange(8)
        flipped = bytearray(content)
        flipped[place] ^= 1 << bit
        yield f"bit {bit} of byte {place}", put(bytes(flipped))

    def odd(make: Callable[[], Any]) -> Callable[[], None]:
        return lambda: (path.unlink(), make())[0]  # type: ignore[func-returns-value]

    yield "a directory", odd(lambda: path.mkdir())
    yield "a pipe", odd(lambda: os.mkfifo(path))
    yield "a link to zeros", odd(lambda: path.symlink_to("/dev/zero"))
    yield "a link to itself", odd(lambda: path.symlink_to(path.name))
    elsewhere = path.with_name("elsewhere")
    elsewhere.write_bytes(content)
    yield "a link to a copy", odd(lambda: path.symlink_to(elsewhere))


def restore(path: Path, content: bytes) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    path.unlink(missing_ok=True)
    path.write_bytes(content)


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_refused_or_says_what_was_written(run: Path, name: str) -> None:
    path = run / name
    content, before = path.read_bytes(), fingerprint(run)
    for what, damage in damages(path):
        damage()
        found: list[Any] = []
        said = refusal(lambda found=found: found.append(fingerprint(run)))
        assert said or found == [before], what
        assert not said or str(run) in said, (what, said)
        assert not said or any(
            w in said for w in ("use another", "pass one of", "not there", "no ")
        ), said
        restore(path, content)
    assert fingerprint(run) == before


def fingerprint(run: Path) -> tuple[int, bytes]:
    """Of all that a checkpoint holds."""
    loaded = checkpoint.load(run, replica=0)
    text = repr((loaded.shared, loaded.private, loaded.meta))
    return loaded.step, text.encode()


def test_a_damaged_file_of_settings_is_refused_or_says_what_was_written(run: Path) -> None:
    path = run / CONFIG
    content, before = path.read_bytes(), flat_values(config_of(run))
    for what, damage in damages(path):
        damage()
        found: list[Any] = []
        said = refusal(lambda found=found: found.append(flat_values(config_of(run))))
        # Settings that the run has not written are somebody's own.
        assert said or found == [before] or what == "nothing", what
        assert not said or CONFIG in said, (what, said)
        restore(path, content)


# -- intent: everything is sealed again ------------------------------------------------------------


def seal(path: Path, body: dict[str, Any]) -> None:
    text = json.dumps(body, sort_keys=True).encode()
    (path / "thinwire.json").write_text(json.dumps({"crc32": zlib.crc32(text), "body": body}))


def body_of(path: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((path / "thinwire.json").read_text())["body"]
    return body


def reseal(path: Path, part: str) -> None:
    body = body_of(path)
    body["parts"][part] = zlib.crc32((path / part / "metadata.json").read_bytes())
    seal(path, body)


MANIFESTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "step -1": lambda b: b.update(step=-1),
    "step of another": lambda b: b.update(step=1),
    "step text": lambda b: b.update(step="2"),
    "step true": lambda b: b.update(step=True),
    "step 2.0": lambda b: b.update(step=2.0),
    "step huge": lambda b: b.update(step=10**400),
    "no step": lambda b: b.pop("step"),
    "replicas 0": lambda b: b.update(replicas=0),
    "replicas -1": lambda b: b.update(replicas=-1),
    "replicas 2": lambda b: b.update(replicas=2),
    "replicas huge": lambda b: b.update(replicas=2**62),
    "replicas text": lambda b: b.update(replicas="1"),
    "format text": lambda b: b.update(format="1"),
    "format 99": lambda b: b.update(format=99),
    "format none": lambda b: b.update(format=None),
    "meta list": lambda b: b.update(meta=[]),
    "meta empty": lambda b: b.update(meta={}),
    "no meta": lambda b: b.pop("meta"),
    "no model": lambda b: b["meta"].pop("model"),
    "model text": lambda b: b["meta"].update(model="gpt"),
    "parameters list": lambda b: b["meta"].update(parameters=[]),
    "other width": lambda b: b["meta"]["model"].update(width=65),
    "settings text": lambda b: b["meta"].update(settings="x"),
    "no settings": lambda b: b["meta"].pop("settings"),
    "other method": lambda b: b["meta"]["settings"].update(method="ddp"),
    "other seed": lambda b: b["meta"]["settings"].update(seed=7),
    "other codec": lambda b: b["meta"]["settings"].update(codec="fp32"),
    "more settings": lambda b: b["meta"]["settings"].update(more=1),
    "other corpus": lambda b: b["meta"].update(corpus="x" * 5000),
    "corpus dict": lambda b: b["meta"].update(corpus={}),
    "parts list": lambda b: b.update(parts=[]),
    "parts empty": lambda b: b.update(parts={}),
    "parts elsewhere": lambda b: b.update(parts={"../shared": 1, "shared": 1}),
    "parts text": lambda b: b["parts"].update(shared="x"),
}


@pytest.mark.parametrize("what", MANIFESTS)
def test_a_changed_manifest_is_refused(run: Path, what: str) -> None:
    path = run / STEP
    body = body_of(path)
    MANIFESTS[what](body)
    seal(path, body)
    said = refusal(lambda: go_on(run))
    assert said
    assert "thinwire.json" in said or str(run) in said or "of another model" in said


def first(metadata: dict[str, Any]) -> dict[str, Any]:
    tensor: dict[str, Any] = metadata["tensors"][sorted(metadata["tensors"])[-1]]
    return tensor


def rename(metadata: dict[str, Any], name: str, size: int | None = None) -> None:
    (file,) = metadata["files"].values()
    metadata["files"] = {name: file if size is None else {"bytes": size, "crc32": 0}}
    for tensor in metadata["tensors"].values():
        for chunk in tensor["chunks"]:
            chunk["file"] = name


METADATA: dict[str, Callable[[dict[str, Any]], object]] = {
    "zeros for ever": lambda m: rename(m, "../../../../../../../../../../dev/zero", 0),
    "zeros by their name": lambda m: rename(m, "/dev/zero", 0),
    "one more file": lambda m: m["files"].update({"../../dev/zero": {"bytes": 0, "crc32": 0}}),
    "the directory itself": lambda m: rename(m, "."),
    "the one above": lambda m: rename(m, ".."),
    "no name": lambda m: rename(m, ""),
    "a name with a zero": lambda m: rename(m, "a\0b"),
    "a long name": lambda m: rename(m, "x" * 5000),
    "another file": lambda m: rename(m, "metadata.json"),
    "no files": lambda m: m.update(files={}),
    "files list": lambda m: m.update(files=[]),
    "no tensors": lambda m: m.update(tensors={}),
    "tensors list": lambda m: m.update(tensors=[]),
    "absurd shape": lambda m: first(m).update(shape=[2**40, 2**20]),
    "absurd dimension": lambda m: first(m).update(shape=[2**70]),
    "negative shape": lambda m: first(m).update(shape=[-1]),
    "shape text": lambda m: first(m).update(shape="ab"),
    "shape of floats": lambda m: first(m).update(shape=[1.5]),
    "a million dimensions": lambda m: first(m).update(shape=[1] * 1_000_000),
    "dtype of no tensor": lambda m: first(m).update(dtype="os"),
    "dtype unknown": lambda m: first(m).update(dtype="float7"),
    "dtype number": lambda m: first(m).update(dtype=7),
    "chunk beyond the end": lambda m: first(m)["chunks"][0].update(start=2**40),
    "chunk huge": lambda m: first(m)["chunks"][0].update(bytes=2**60),
    "chunk negative": lambda m: first(m)["chunks"][0].update(start=-5),
    "chunk text": lambda m: first(m)["chunks"][0].update(bytes="5"),
    "chunk moved": lambda m: first(m)["chunks"][0].update(start=1),
    "chunk of other shape": lambda m: first(m)["chunks"][0].update(shape=[1, 1, 1]),
    "chunk elsewhere": lambda m: first(m)["chunks"][0].update(offset=[10**9]),
    "no chunks": lambda m: first(m).update(chunks=[]),
    "chunks none": lambda m: first(m).update(chunks=None),
}


@pytest.mark.parametrize("part", ["shared", "replica-0"])
@pytest.mark.parametrize("what", METADATA)
def test_changed_metadata_is_refused(run: Path, part: str, what: str) -> None:
    path = run / STEP / part / "metadata.json"
    metadata = json.loads(path.read_text())
    METADATA[what](metadata)
    path.write_text(json.dumps(metadata))
    reseal(run / STEP, part)
    assert str(run) in refusal(lambda: checkpoint.load(run, replica=0))


def rewrite(run: Path, part: str, state: dict[str, Any]) -> None:
    folder = run / STEP / part
    shutil.rmtree(folder)
    storage.write_entries(folder, checkpoint.flatten(state))
    reseal(run / STEP, part)


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(node, dict | list):
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in items:
            yield (*path, key)
            yield from places(value, (*path, key))


def parent(state: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        state = state[key]
    return state


def smaller(value: Any) -> Any:
    return value[..., :-1].contiguous() if isinstance(value, torch.Tensor) and value.dim() else "?"


def doubled(value: Any) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if is_float else ["?"]


CHANGES: dict[str, Callable[[Any], Any]] = {
    "smaller": smaller,
    "of another type": doubled,
    "text": lambda value: "\x1b[31mtext\n",
    "nothing": lambda value: None,
    "empty": lambda value: {},
    "a number": lambda value: -1.5,
    "gone": lambda value: None,
}
# Another value of these changes no result: figures of the past, what the run sets anew at every
# step, what is for another number of replicas. A method's own state is its method's to check: it
# may make something of another value, but no traceback.
FREE = {"seconds", "evaluated", "param_groups", "portable", "cuda_rng", "noise", "adversary"}
METHODS_OWN = {"method"}


@pytest.mark.parametrize("part", ["shared", "replica-0"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_state_that_is_none_of_ours_is_refused(run: Path, part: str, change: str) -> None:
    loaded = checkpoint.load(run, replica=0)
    state = loaded.shared if part == "shared" else loaded.private
    chosen = list(places(state))
    draw = random.Random(change)
    tried = 0
    for path in draw.sample(chosen, min(14, len(chosen))):
        words = set(map(str, path))
        holder, key = parent(state, path), path[-1]
        old = holder[key]
        new = CHANGES[change](old)
        if change == "gone":
            del holder[key]
        else:
            holder[key] = new
        rewrite(run, part, state)
        said = refusal(lambda: go_on(run))
        assert said or words & (FREE | METHODS_OWN) or same(old, new), (path, old, new)
        tried += 1
        if change == "gone" and isinstance(holder, list):
            holder.insert(key, old)
        else:
            holder[key] = old
    assert tried
    rewrite(run, part, state)
    if change != "gone":  # a dict whose key was put back has another order
        go_on(run)


def same(old: Any, new: Any) -> bool:
    return type(old) is type(new) and not isinstance(old, torch.Tensor) and old == new


def test_a_document_nested_beyond_use_is_refused(run: Path) -> None:
    for depth in (900, DEEP):
        text = b'{"dict":[["a",' + b'{"list":[' * depth + b"1" + b"]}" * depth + b"]]}"
        shutil.rmtree(run / STEP / "shared")
        document = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        storage.write_entries(run / STEP / "shared", {"document": document})
        reseal(run / STEP, "shared")
        assert refusal(lambda: go_on(run))

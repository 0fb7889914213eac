"""Sources, the split by file, refusals."""

from __future__ import annotations

import json
import shutil
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from thinwire.errors import UsageError
from thinwire.train.data import corpus as corpus_module
from thinwire.train.data.corpus import load_corpus
from thinwire.train.data.tokens import DataConfig


def write_texts(root: Path, count: int = 40) -> Path:
    for index in range(count):
        path = root / f"part{index % 3}" / f"{index}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text {index} " * 20)
    return root


def files(root: Path, **settings: object) -> DataConfig:
    return DataConfig(data=f"files:{root}/**/*.txt", context=16, **settings)  # type: ignore[arg-type]


def documents(tokens: np.ndarray) -> set[bytes]:
    return set(tokens.tobytes().split(b"\0")) - {b""}


def test_stdlib_is_some_ten_megabytes_of_text():
    found = load_corpus(DataConfig())
    size = len(found.train[0]) + len(found.validation[0])
    assert 3e6 < size < 40e6
    assert found.vocab == 256
    assert 0.01 < len(found.validation[0]) / size < 0.15
    text = found.train[0].tobytes() + found.validation[0].tobytes()
    assert b"class OrderedDict(dict):" in text
    assert found.digest == load_corpus(DataConfig()).digest


def test_files_are_split_and_none_is_lost(tmp_path: Path):
    found = load_corpus(files(write_texts(tmp_path), validation=0.2))
    train, validation = documents(found.train[0]), documents(found.validation[0])
    assert not train & validation
    assert len(train | validation) == 40
    assert 2 <= len(validation) <= 16


def test_split_and_digest_do_not_depend_on_the_place(tmp_path: Path):
    here = load_corpus(files(write_texts(tmp_path / "a")))
    shutil.copytree(tmp_path / "a", tmp_path / "elsewhere" / "b")
    there = load_corpus(files(tmp_path / "elsewhere" / "b"))
    assert here.digest == there.digest
    assert np.array_equal(here.validation[0], there.validation[0])


def test_a_file_keeps_its_side_when_others_come(tmp_path: Path):
    before = load_corpus(files(write_texts(tmp_path, 40), validation=0.3))
    after = load_corpus(files(write_texts(tmp_path, 60), validation=0.3))
    assert documents(before.validation[0]) <= documents(after.validation[0])


def test_one_changed_byte_changes_the_digest(tmp_path: Path):
    before = load_corpus(files(write_texts(tmp_path)))
    changed = tmp_path / "part0" / "0.txt"
    changed.write_text(changed.read_text().replace("0", "1", 1))
    assert load_corpus(files(tmp_path)).digest != before.digest


def test_each_side_gets_a_file(tmp_path: Path):
    write_texts(tmp_path, 2)
    for share in (1e-9, 1 - 1e-9):
        found = load_corpus(files(tmp_path, validation=share))
        assert len(documents(found.train[0])) == len(documents(found.validation[0])) == 1


def test_a_single_file_is_cut_near_its_end(tmp_path: Path):
    text = bytes(range(1, 201))
    (tmp_path / "one.txt").write_bytes(text)
    found = load_corpus(DataConfig(data=f"files:{tmp_path}/one.txt", context=16, validation=0.1))
    assert found.train[0].tobytes() == text[:180] + b"\0"
    assert found.validation[0].tobytes() == text[180:] + b"\0"


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_token_files_stay_memory_maps(tmp_path: Path, dtype: type):
    for index in range(3):
        np.save(tmp_path / f"{index}.npy", np.arange(100, dtype=dtype) + index)
    found = load_corpus(DataConfig(data=f"tokens:{tmp_path}/*.npy", vocab=200, context=16))
    arrays = found.train + found.validation
    assert len(arrays) == 3
    assert all(isinstance(array, np.memmap) for array in arrays)
    assert sorted(int(array[0]) for array in arrays) == [0, 1, 2]


def test_raw_token_file_is_cut_without_a_copy(tmp_path: Path):
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "all.bin")
    found = load_corpus(DataConfig(data=f"tokens:{tmp_path}/all.bin", vocab=1000, context=16))
    assert isinstance(found.validation[0], np.memmap)
    assert found.train[0][0] == 0
    assert found.validation[0].tolist() == list(range(950, 1000))


def test_large_token_files_are_identified_by_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(corpus_module, "_WHOLE", 1000)
    monkeypatch.setattr(corpus_module, "_BLOCK", 8)
    config = DataConfig(data=f"tokens:{tmp_path}/all.npy", vocab=1000, context=16)

    def digest(tokens: np.ndarray) -> str:
        np.save(tmp_path / "all.npy", tokens)
        return load_corpus(config).digest

    tokens = np.zeros(100_000, np.uint16)
    first = digest(tokens)
    tokens[-1] = 7  # the end is always sampled
    assert digest(tokens) != first
    assert digest(tokens[:-1]) != first


def test_uint8_tokens_need_no_vocabulary(tmp_path: Path):
    np.save(tmp_path / "all.npy", np.zeros(2000, np.uint8))
    assert load_corpus(DataConfig(data=f"tokens:{tmp_path}/all.npy", context=16)).vocab == 256


class FakeTokenizer:
    """Words as tokens, with the calls of tokenizers.Tokenizer that the corpus makes."""

    def __init__(self, ids: dict[str, int]) -> None:
        self.ids = ids

    @staticmethod
    def from_file(path: str) -> FakeTokenizer:
        return FakeTokenizer(json.loads(Path(path).read_text()))

    def get_vocab(self) -> dict[str, int]:
        return self.ids

    def encode(self, text: str, add_special_tokens: bool) -> types.SimpleNamespace:
        assert not add_special_tokens
        return types.SimpleNamespace(ids=[self.ids[word] for word in text.split()])


def test_tokenizer_gives_ids_vocabulary_and_separator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "tokenizers", types.SimpleNamespace(Tokenizer=FakeTokenizer))
    ids = {"text": 1, "<|endoftext|>": 70_000} | {str(n): 100 + n for n in range(40)}
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(json.dumps(ids))
    found = load_corpus(files(write_texts(tmp_path), tokenizer=str(tokenizer)))
    assert found.vocab == 70_001
    assert found.train[0].dtype == np.uint32
    assert found.train[0][0] == 1
    assert found.train[0][-1] == 70_000
    ends = (found.train[0] == 70_000).sum() + (found.validation[0] == 70_000).sum()
    assert ends == 40


def test_missing_tokenizers_package_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UsageError, match=r"pip install thinwire\[tokenizers\]"):
        load_corpus(files(write_texts(tmp_path), tokenizer="tokenizer.json"))


def refused(config: DataConfig) -> str:
    with pytest.raises(UsageError) as error:
        load_corpus(config)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_bad_sources_are_refused(tmp_path: Path):
    assert "stdlib, files:GLOB, tokens:GLOB or digits" in refused(DataConfig(data="wikipedia"))
    assert "stdlib, files:GLOB, tokens:GLOB or digits" in refused(DataConfig(data="files:"))
    assert "no file matches" in refused(DataConfig(data=f"files:{tmp_path}/*.txt"))
    (tmp_path / "empty.txt").touch()
    assert "empty" in refused(DataConfig(data=f"files:{tmp_path}/*.txt"))
    (tmp_path / "short.txt").write_text("short")
    assert "smaller --context" in refused(DataConfig(data=f"files:{tmp_path}/*.txt"))
    assert "--validation" in refused(DataConfig(validation=0.0))
    assert "--context" in refused(DataConfig(context=0))
    assert "--batch" in refused(DataConfig(batch=0))
    assert "--vocab" in refused(DataConfig(vocab=10))


def test_unreadable_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_texts(tmp_path)

    def denied(self: Path) -> bytes:  # the tests may run as root, who may read anything
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", denied)
    assert "Permission denied" in refused(files(tmp_path))


def test_bad_token_files_are_refused(tmp_path: Path):
    def tokens(name: str, **settings: object) -> DataConfig:
        return DataConfig(data=f"tokens:{tmp_path}/{name}", context=16, **settings)  # type: ignore[arg-type]

    (tmp_path / "text.txt").write_text("text")
    assert ".npy and .bin" in refused(tokens("text.txt"))
    (tmp_path / "garbled.npy").write_bytes(b"not an array")
    assert "garbled.npy" in refused(tokens("garbled.npy"))
    np.save(tmp_path / "floats.npy", np.zeros(10))
    assert "float64" in refused(tokens("floats.npy"))
    np.save(tmp_path / "square.npy", np.zeros((10, 10), np.uint16))
    assert "(10, 10)" in refused(tokens("square.npy"))
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    assert "objects.npy" in refused(tokens("objects.npy"))
    (tmp_path / "odd.bin").write_bytes(b"123")
    assert "odd.bin" in refused(tokens("odd.bin", vocab=9))
    (tmp_path / "empty.bin").touch()
    assert "empty" in refused(tokens("empty.bin", vocab=9))
    np.save(tmp_path / "wide.npy", np.full(100, 300, np.uint16))
    assert "--vocab N or --tokenizer" in refused(tokens("wide.npy"))
    assert "token 300" in refused(tokens("wide.npy", vocab=300))
    assert "at least 1" in refused(tokens("wide.npy", vocab=0))

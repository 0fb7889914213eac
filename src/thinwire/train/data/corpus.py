"""The corpus: text or token files, split by file into a training and a validation side.

A file's side follows from a hash of its path below the corpus' root, so it is the same on every
machine and does not change when other files come or go. Text files are joined with a separator
after each: the byte 0, which text does not contain, or the tokenizer's end-of-text token.
"""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from thinwire.command_line import shown
from thinwire.errors import UsageError
from thinwire.train.available import available
from thinwire.train.data.tokens import DataConfig, Tokens, Windows

# Folders and files of the standard library that are no library text, or that differ between two
# builds of the same Python.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
_SKIPPED_PREFIXES = ("_sysconfigdata", "sitecustomize", "config-")
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
_TOKEN_TYPES = (np.dtype(np.uint8), np.dtype(np.uint16), np.dtype(np.uint32))
_VALIDATION = 0.05  # share, where none is given
# Larger arrays are identified by samples, and their ids are checked in samples.
_WHOLE = 1 << 28  # bytes
_BLOCK = 1 << 20  # tokens
_SAMPLES = 64  # blocks


@dataclass(frozen=True)
class Corpus:
    """Both sides of a corpus; memory-mapped files stay apart, so that they are never copied."""

    train: list[Tokens]
    validation: list[Tokens]
    vocab: int
    digest: str
    """Identifies the content: ranks with different texts have different digests."""


@dataclass(frozen=True)
class _Document:
    name: str  # path below the corpus' root, with forward slashes
    tokens: Tokens


def load_corpus(config: DataConfig) -> Corpus:
    """The corpus that `config.data` names, ready for windows of `config.context` + 1 tokens."""
    if not 0 < _share(config) < 1:
        raise UsageError(f"--validation must be between 0 and 1, got {config.validation}")
    for flag, value in (("context", config.context), ("batch", config.batch)):
        if value < 1:
            raise UsageError(f"--{flag} must be at least 1, got {value}")
    kind, _, pattern = config.data.partition(":")
    if config.data == "stdlib":
        return _text_corpus(config, _stdlib_files())
    if kind == "files" and pattern:
        return _text_corpus(config, _matches(pattern))
    if kind == "tokens" and pattern:
        return _token_corpus(config, _matches(pattern))
    raise UsageError(
        f"--data takes stdlib, files:GLOB, tokens:GLOB or digits, got {shown(config.data)}"
    )


def _text_corpus(config: DataConfig, files: list[tuple[str, Path]]) -> Corpus:
    if config.vocab is not None:
        raise UsageError("--vocab is for tokens:GLOB; text brings its own vocabulary")
    _require_room(config, files)
    encoder = _encoder(config.tokenizer)
    documents = [_Document(name, encoder.encode(_read(path))) for name, path in files]
    train, validation = _split(config, documents)
    sides = [_join(train, encoder.separator)], [_join(validation, encoder.separator)]
    return _corpus(config, *sides, encoder.vocab)


def _token_corpus(config: DataConfig, files: list[tuple[str, Path]]) -> Corpus:
    documents = [_Document(name, _map_tokens(path)) for name, path in files]
    vocab = _token_vocab(config, documents)
    for document in documents:
        _check_ids(document, vocab)
    train, validation = _split(config, documents)
    return _corpus(config, [d.tokens for d in train], [d.tokens for d in validation], vocab)


def _corpus(
    config: DataConfig, train: list[Tokens], validation: list[Tokens], vocab: int
) -> Corpus:
    for side, tokens in (("training", train), ("validation", validation)):
        try:
            Windows(tokens, config.context)
        except UsageError as error:
            raise UsageError(f"the {side} side of --data {config.data} is short: {error}") from None
    return Corpus(train, validation, vocab, _digest(train, validation, vocab))


def _split(
    config: DataConfig, documents: Sequence[_Document]
) -> tuple[list[_Document], list[_Document]]:
    """Training and validation documents, at least one each; a single one is cut near its end."""
    documents = [document for document in documents if len(document.tokens)]
    if not documents:
        raise UsageError(f"--data {config.data} is empty: all its files have no content")
    if len(documents) == 1:
        name, tokens = documents[0].name, documents[0].tokens
        cut = len(tokens) - max(1, round(len(tokens) * _share(config)))
        return [_Document(name, tokens[:cut])], [_Document(name, tokens[cut:])]
    share = _share(config)
    lowest, *_, highest = sorted(documents, key=lambda document: _fraction(document.name))
    validation = [d for d in documents if _fraction(d.name) < share or d is lowest]
    validation = [d for d in validation if d is not highest]
    chosen = {d.name for d in validation}
    return [d for d in documents if d.name not in chosen], validation


def _share(config: DataConfig) -> float:
    return _VALIDATION if config.validation is None else config.validation


def _fraction(name: str) -> float:
    """A hash of the name in [0, 1)."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "big") / 2**48


def _join(documents: Iterable[_Document], separator: Tokens) -> Tokens:
    return np.concatenate([part for d in documents for part in (d.tokens, separator)])


# Finding and reading files


def _stdlib_files() -> list[tuple[str, Path]]:
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [
            f for f in folders if f not in _SKIPPED_FOLDERS and not f.startswith(_SKIPPED_PREFIXES)
        ]
        paths = [Path(folder, name) for name in names if not name.startswith(_SKIPPED_PREFIXES)]
        files += [(p.relative_to(root).as_posix(), p) for p in paths if p.suffix == ".py"]
    if not files:
        raise UsageError(f"--data stdlib found no .py files in {root}; use files:GLOB instead")
    return sorted(files)


def _matches(pattern: str) -> list[tuple[str, Path]]:
    """(name, path) of the files that match, by name; the root is the pattern up to its first *."""
    pattern = os.path.expanduser(pattern)
    fixed = Path(pattern).parent
    while glob.has_magic(str(fixed)):
        fixed = fixed.parent
    try:
        paths = [Path(found) for found in glob.glob(pattern, recursive=True)]
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"--data: cannot look for {shown(pattern)}: {error!s:.100}") from None
    files = [(p.relative_to(fixed).as_posix(), p) for p in paths if p.is_file()]
    if not files:
        raise UsageError(f"--data: no file matches {shown(pattern)} (from {Path.cwd()})")
    return sorted(files)


def _require_room(config: DataConfig, files: list[tuple[str, Path]]) -> None:
    """Text is held in memory: once as it is read, once joined."""
    total, there = sum(path.stat().st_size for _, path in files), available()
    if there is not None and 2 * total > there:
        raise UsageError(
            f"--data {config.data} has {total / 1e9:.3g} GB of text, which takes twice that, and "
            f"this machine has {there / 1e9:.3g} GB of memory free: use fewer files, or tokens:GLOB"
        )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"--data: cannot read {path}: {error.strerror}") from None


def _map_tokens(path: Path) -> Tokens:
    try:
        if path.suffix == ".npy":
            tokens: Tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        elif path.suffix != ".bin":
            raise UsageError(f"--data tokens: takes .npy and .bin files, found {path}")
        elif path.stat().st_size == 0:
            return np.empty(0, np.uint16)  # an empty file cannot be mapped
        else:
            tokens = np.memmap(path, dtype=np.uint16, mode="r")
    except UsageError:
        raise
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"--data: cannot read tokens from {path}: {error}") from None
    if tokens.ndim != 1 or tokens.dtype not in _TOKEN_TYPES:
        raise UsageError(
            f"--data: {path} must be one row of uint8, uint16 or uint32, "
            f"found {tokens.dtype} of shape {tokens.shape}"
        )
    return tokens


# Vocabulary


class _Encoder(Protocol):
    vocab: int
    separator: Tokens

    def encode(self, text: bytes) -> Tokens: ...


class _Bytes:
    """Every byte is a token."""

    vocab = 256
    separator: Tokens = np.zeros(1, np.uint8)

    def encode(self, text: bytes) -> Tokens:
        return np.frombuffer(text, np.uint8)


class _HuggingFace:
    """A tokenizer.json of the tokenizers library."""

    def __init__(self, path: str) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise UsageError(
                "--tokenizer needs the tokenizers package: pip install thinwire[tokenizers]"
            ) from None
        try:
            self._tokenizer: Any = Tokenizer.from_file(path)
        except Exception as error:  # the library raises bare Exception
            raise UsageError(f"--tokenizer: cannot read {path}: {error}") from None
        ids: dict[str, int] = self._tokenizer.get_vocab()
        self.vocab = max(ids.values()) + 1  # ids may have gaps
        self._dtype = np.uint16 if self.vocab <= 1 << 16 else np.uint32
        ends = [ids[token] for token in _END_OF_TEXT if token in ids]
        self.separator = np.array(ends[:1], self._dtype) if ends else self.encode(b"\n")

    def encode(self, text: bytes) -> Tokens:
        encoding = self._tokenizer.encode(text.decode("utf-8", "replace"), add_special_tokens=False)
        return np.array(encoding.ids, self._dtype)


def _encoder(tokenizer: str | None) -> _Encoder:
    return _Bytes() if tokenizer is None else _HuggingFace(tokenizer)


def _token_vocab(config: DataConfig, documents: Sequence[_Document]) -> int:
    if config.vocab is not None and config.vocab < 1:
        raise UsageError(f"--vocab must be at least 1, got {config.vocab}")
    if config.vocab is not None:
        return config.vocab
    if config.tokenizer is not None:
        return _HuggingFace(config.tokenizer).vocab
    if all(document.tokens.dtype == np.uint8 for document in documents):
        return 256
    raise UsageError("--data tokens:GLOB of 2 or 4 byte tokens needs --vocab N or --tokenizer FILE")


def _check_ids(document: _Document, vocab: int) -> None:
    """Refuse ids that the model has no row for, before they end a run in the middle."""
    if vocab > np.iinfo(document.tokens.dtype).max:
        return
    for block in _blocks(document.tokens):
        if (largest := int(block.max(initial=0))) >= vocab:
            raise UsageError(
                f"--data: {document.name} has the token {largest}, but the vocabulary ends at "
                f"{vocab - 1}; give the --vocab or --tokenizer that made the file"
            )


# Identity


def _blocks(tokens: Tokens) -> Iterable[Tokens]:
    """All of a small array, _SAMPLES evenly spaced blocks of a large one (the last included)."""
    starts: npt.NDArray[np.int64] = np.arange(0, len(tokens), _BLOCK)
    if tokens.nbytes > _WHOLE:
        starts = np.linspace(0, len(tokens) - _BLOCK, _SAMPLES).astype(np.int64)
    return (tokens[start : start + _BLOCK] for start in starts)


def _digest(train: list[Tokens], validation: list[Tokens], vocab: int) -> str:
    digest = hashlib.blake2b(f"{vocab}".encode(), digest_size=16)
    for side in (train, validation):
        digest.update(f" side {len(side)}".encode())
        for tokens in side:
            digest.update(f" {tokens.dtype.name} {len(tokens)} ".encode())
            for block in _blocks(tokens):
                digest.update(np.ascontiguousarray(block).data)
    return digest.hexdigest()

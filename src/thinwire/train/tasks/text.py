"""TextTask: predict tokens, the next one or hidden ones."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from thinwire.errors import UsageError
from thinwire.train.config import TrainConfig
from thinwire.train.data.corpus import load_corpus
from thinwire.train.data.order import Pair
from thinwire.train.data.tokens import IGNORED, Batches, validation_batches
from thinwire.train.tasks.models import GPT, Stack, build_model
from thinwire.train.tasks.task import Task


class TextTask(Task):
    unit = "tokens"

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        if config.adversary.adversarial > 0:
            raise UsageError(
                f"--adversarial moves the pixels of images, and --data {config.data.data} is text: "
                "leave it out"
            )
        self._corpus = load_corpus(config.data)
        self.digest = self._corpus.digest
        self.units_per_sample = config.data.context
        masked = config.model.objective == "masked"
        self._mask_vocab = self._corpus.vocab if masked else None

    def build_model(self) -> GPT:
        config = self.config
        model = config.model
        if model.tied == "auto":
            model = replace(model, tied="yes" if config.pipeline.stages == 1 else "no")
        return build_model(model, self._corpus.vocab, config.data.context, config.loop.seed)

    def batches(self, replica: int, replicas: int) -> Batches:
        data, seed = self.config.data, self.config.loop.seed
        return Batches(
            self._corpus.train,
            data.context,
            data.batch,
            replica,
            replicas,
            seed,
            mask_vocab=self._mask_vocab,
        )

    def validation(self, replica: int, replicas: int) -> Iterator[Pair]:
        data = self.config.data
        return validation_batches(
            self._corpus.validation,
            data.context,
            data.batch,
            replica,
            replicas,
            self.config.loop.eval_windows,
            mask_vocab=self._mask_vocab,
        )

    def judge(self, model: Stack, output: Tensor, y: Tensor) -> tuple[list[float], float]:
        return [float(model.loss(output, y))], float((y != IGNORED).sum())

    def blank(self) -> Pair:
        data = self.config.data
        tokens = torch.zeros(data.batch, data.context, dtype=torch.int64)
        return tokens, tokens

"""ImageTask: say which class an image is of."""

from collections.abc import Iterator
from dataclasses import fields

import torch
from torch import Tensor

from thinwire.errors import UsageError
from thinwire.extras.dual_batch_norm import dual_batch_norm, second_parameters
from thinwire.train.config import TrainConfig
from thinwire.train.data.images import ImageBatches, load_digits, validation_images
from thinwire.train.data.order import Pair
from thinwire.train.data.tokens import DataConfig
from thinwire.train.tasks.image_models import ImageModel, build_image_model
from thinwire.train.tasks.models import ModelConfig, Stack
from thinwire.train.tasks.task import Task

_OF_TEXT = (
    "tokenizer",
    "vocab",
    "context",
    "objective",
    "tied",
)  # settings that images have no use for


class ImageTask(Task):
    unit = "images"
    measures = ("val_loss", "val_accuracy")

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        _refuse_text_settings(config)
        _refuse_beside_adversary(config)
        self._images = load_digits(config.data.validation)
        self.digest = self._images.digest
        _refuse_cut_statistics(config, self.build_model())

    def build_model(self) -> ImageModel:
        model = build_image_model(self.config.model, self._images.shape, self.config.loop.seed)
        return dual_batch_norm(model) if self.config.adversary.adversarial > 0 else model

    def training_only(self, model: Stack) -> list[str]:
        return second_parameters(model)

    def batches(self, replica: int, replicas: int) -> ImageBatches:
        batch, seed = self.config.data.batch, self.config.loop.seed
        return ImageBatches(self._images.train, batch, replica, replicas, seed)

    def validation(self, replica: int, replicas: int) -> Iterator[Pair]:
        batch, limit = self.config.data.batch, self.config.loop.eval_windows
        return validation_images(self._images.validation, batch, replica, replicas, limit)

    def judge(self, model: Stack, output: Tensor, y: Tensor) -> tuple[list[float], float]:
        right = (output.argmax(1) == y).float().mean()
        return [float(model.loss(output, y)), float(right)], float(len(y))

    def blank(self) -> Pair:
        shape, batch = self._images.shape, self.config.data.batch
        pixels = torch.zeros(batch, shape.channels, shape.size, shape.size)
        return pixels, torch.zeros(batch, dtype=torch.int64)


def _refuse_cut_statistics(config: TrainConfig, model: Stack) -> None:
    if _spread(config) and any(buffer.is_floating_point() for buffer in model.buffers()):
        raise UsageError(
            f"{_spread(config)}: every rank of a replica would have BatchNorm statistics of its "
            f"own, and {config.model.model} has BatchNorm; train a vit, or leave it out"
        )


def _refuse_beside_adversary(config: TrainConfig) -> None:
    """A pass beside the step must not meet other ranks, nor run what was compiled for one."""
    flag = "--compile" if config.model.compile else _spread(config)
    if config.adversary.adversarial > 0 and flag:
        raise UsageError(
            f"{flag}: perturbed images are made beside the step, from whole weights and by the "
            "plain model; leave it out, or --adversarial"
        )


def _spread(config: TrainConfig) -> str:
    """The flag that spreads a replica over several ranks, if any does."""
    for name, count in (("shards", config.model.shards), ("stages", config.pipeline.stages)):
        if count > 1:
            return f"--{name} {count}"
    return ""


def _refuse_text_settings(config: TrainConfig) -> None:
    for part, kind in ((config.data, DataConfig), (config.model, ModelConfig)):
        for f in fields(kind):
            if f.name in _OF_TEXT and getattr(part, f.name) != f.default:
                raise UsageError(
                    f"--{f.name} is for text; --data {config.data.data} has images: leave it out"
                )

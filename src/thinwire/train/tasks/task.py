"""Task: what a run trains on - the model, its batches, and how it is judged.

The training loop knows no more of text or of images than this. A kind of task has a file of its own
(text_task.py), and tasks.py finds the one that the flags describe.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

from torch import Tensor

from thinwire.train.config import TrainConfig
from thinwire.train.data.order import Batches, Pair
from thinwire.train.tasks.models import Stack, model_settings


class Task(ABC):
    """Made from the settings before any worker starts, so that what is wrong is refused there."""

    unit: ClassVar[str]
    """What progress and throughput are counted in, in the plural: a metric's name."""
    measures: ClassVar[tuple[str, ...]] = ("val_loss",)
    """What an evaluation finds, as the metrics call it."""
    units_per_sample: int = 1
    digest: str
    """Identifies the data: ranks with other data have another digest."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

    @abstractmethod
    def build_model(self) -> Stack:
        """The model with fresh weights, the same on all ranks; `model(x, y)` is the mean loss."""

    @abstractmethod
    def batches(self, replica: int, replicas: int) -> Batches:
        """From the beginning; set `position` to go on elsewhere."""

    @abstractmethod
    def validation(self, replica: int, replicas: int) -> Iterator[Pair]:
        """This replica's share; all shares together are the same for any number of replicas."""

    @abstractmethod
    def judge(self, model: Stack, output: Tensor, y: Tensor) -> tuple[list[float], float]:
        """The means of `measures` over a validation batch of which this is the model's output, and
        how many targets they are over. Of `model` only what needs no weights is used."""

    @abstractmethod
    def blank(self) -> Pair:
        """A micro-batch of the right shape that nothing is learnt from."""

    def training_only(self, model: Stack) -> list[str]:
        """Names in the model's state that the model to export has no use for."""
        return []

    def identity(self, model: Stack) -> dict[str, Any]:
        """What makes a checkpoint one of this task and no other."""
        return {
            "model": model_settings(model, self.config.model.model),
            "data": self.config.data.data,
            "corpus": self.digest,
            "training_only": self.training_only(model),
        }

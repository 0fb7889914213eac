"""The task that the flags describe."""

from thinwire.errors import UsageError
from thinwire.train.config import TrainConfig
from thinwire.train.tasks.image import ImageTask
from thinwire.train.tasks.image_models import IMAGE_PRESETS
from thinwire.train.tasks.task import Task
from thinwire.train.tasks.text import TextTask

IMAGES = ("digits",)


def find_task(config: TrainConfig) -> Task:
    """Loads its data and refuses, naming the flag, what no task can be made of."""
    if config.data.data in IMAGES:
        return ImageTask(config)
    if config.model.model in IMAGE_PRESETS:
        raise UsageError(
            f"--model {config.model.model} reads images, and --data {config.data.data} is text: "
            f"add --data {IMAGES[0]}"
        )
    return TextTask(config)

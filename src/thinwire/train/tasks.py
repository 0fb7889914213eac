"""The task that the flags describe."""

from thinwire.train.config import TrainConfig
from thinwire.train.task import Task
from thinwire.train.text_task import TextTask


def find_task(config: TrainConfig) -> Task:
    """Loads its data and refuses, naming the flag, what no task can be made of."""
    return TextTask(config)

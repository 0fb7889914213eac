"""NoiseMeter: the noise scale of a run, where its method and its batches allow one.

A method that averages gradients exactly shows the gradient of the whole batch: its norm, against
those of single passes, is all that is needed. Under any other method a replica's own passes are
compared with each other, for which a step must have two (--accumulate 2).
"""

from typing import Any

from thinwire.extras import NoiseScale
from thinwire.train.config import TrainConfig
from thinwire.train.methods.replica import Replica
from thinwire.train.tasks.task import Task
from thinwire.wire.wire import Wire

State = dict[str, Any]


class NoiseMeter:
    """Told of every step, before and after the method takes it."""

    def __init__(self, config: TrainConfig, task: Task, replica: Replica, wire: Wire) -> None:
        shards = config.model.shards
        self._replica, self._replicas = replica, wire.size // shards
        # What one backward pass of a replica reads: its shards read a part each.
        one_pass = config.data.batch * task.units_per_sample * shards
        self.batch = one_pass * config.loop.accumulate * self._replicas
        """What a step of the whole run reads."""
        self._noise = NoiseScale(
            replica.model.parameters(), batch=one_pass, unit=task.unit, wire=wire
        )
        self._exact = False

    def begin(self) -> None:
        """Forgets passes that belonged to no step."""
        self._noise.forget_pass()

    def before_step(self) -> None:
        self._exact = self._replica.averages_gradients and self._replicas > 1
        if not self._exact:
            self._noise.step()

    def after_step(self, norm: float) -> None:
        if self._exact:
            self._noise.step(norm, replicas=self._replicas)

    def figures(self) -> State:
        """For the metrics of a step."""
        return {"noise_scale": self._noise.value, "noise_scale_error": self._noise.error}

    def summary(self) -> State:
        """For the end of a run, with what the last steps have added; a collective."""
        self._noise.finish()
        reading = f"{self._noise.reading()}; this run has {self.batch:,}"
        return self.figures() | {"noise_scale_reading": reading}

    def state(self) -> State:
        return self._noise.state_dict()

    def load_state(self, state: State) -> None:
        self._noise.load_state_dict(state)


def find_noise_meter(
    config: TrainConfig, task: Task, replica: Replica, wire: Wire
) -> NoiseMeter | None:
    """The meter that --noise-scale asks for; None where there is nothing to compare."""
    if config.loop.noise_scale == "off" or config.pipeline.stages > 1:
        return None
    if config.loop.accumulate == 1 and not replica.averages_gradients:
        return None
    if config.loop.accumulate == 1 and wire.size == config.model.shards:
        return None
    return NoiseMeter(config, task, replica, wire)

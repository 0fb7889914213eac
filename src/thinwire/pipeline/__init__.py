"""AsyncMesh's pipeline axis: a model in stages, none of which waits for a flush."""

from typing import Any

from thinwire.deprecated import moved
from thinwire.optim.async_nadam import AsyncNAdam
from thinwire.pipeline.async_pipeline import AsyncPipeline, Record
from thinwire.pipeline.cost import Cost, measure
from thinwire.pipeline.cut import Cut
from thinwire.pipeline.micro_batches import micro_batches
from thinwire.pipeline.partition import Stage, balance, parts_of, split, stage_memory
from thinwire.pipeline.schedule import Schedule, lead_for
from thinwire.pipeline.simulated import SimulatedPipeline
from thinwire.pipeline.stage_settings import StageSettings, stage_settings
from thinwire.pipeline.synchronous import TorchPipeline

__all__ = [
    "AsyncNAdam",
    "AsyncPipeline",
    "Cost",
    "Cut",
    "Record",
    "Schedule",
    "SimulatedPipeline",
    "Stage",
    "StageSettings",
    "TorchPipeline",
    "balance",
    "lead_for",
    "measure",
    "micro_batches",
    "parts_of",
    "split",
    "stage_memory",
    "stage_settings",
]


def __getattr__(name: str) -> Any:
    return moved("thinwire.pipeline", name, {"LookAhead": "thinwire.optim.AsyncNAdam"})

"""AsyncMesh's pipeline axis: a model in stages, none of which waits for a flush."""

from thinwire.pipeline.async_pipeline import AsyncPipeline, Record
from thinwire.pipeline.cost import Cost, measure
from thinwire.pipeline.cut import Cut
from thinwire.pipeline.lookahead import LookAhead, StageSettings, stage_settings
from thinwire.pipeline.micro_batches import micro_batches
from thinwire.pipeline.partition import Stage, balance, parts_of, split, stage_memory
from thinwire.pipeline.schedule import Schedule, lead_for
from thinwire.pipeline.simulated import SimulatedPipeline
from thinwire.pipeline.synchronous import TorchPipeline

__all__ = [
    "AsyncPipeline",
    "Cost",
    "Cut",
    "LookAhead",
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

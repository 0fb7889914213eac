"""AsyncMesh's pipeline axis: a model in stages, none of which waits for a flush."""

from thinwire.pipeline.async_pipeline import AsyncPipeline, Record
from thinwire.pipeline.lookahead import LookAhead, StageSettings, stage_settings
from thinwire.pipeline.schedule import Schedule, lead_for
from thinwire.pipeline.simulated import SimulatedPipeline

__all__ = [
    "AsyncPipeline",
    "LookAhead",
    "Record",
    "Schedule",
    "SimulatedPipeline",
    "StageSettings",
    "lead_for",
    "stage_settings",
]

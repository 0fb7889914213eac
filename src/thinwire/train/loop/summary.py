"""The summary of a run: what all workers found, in one dictionary."""

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.train.loop.trainer import Trainer


def summary_of(trainer: "Trainer", stopped_by: str | None) -> dict[str, Any]:
    """A collective: all workers call it, and get the same."""
    own = trainer.totals()
    loss, total = trainer.control.agree([trainer.own_loss(), own["bytes"]], "sum")
    seconds, exposed, hidden, skipped = trainer.control.agree(
        [trainer.seconds, own["exposed"], own["hidden"], own["skipped"]], "max"
    )
    unit, trained = trainer.task.unit, trainer.trained
    return {
        "method": trainer.config.method,
        "workers": trainer.world.size,
        "step": trainer.step,
        "stopped_by": stopped_by,
        "unit": unit,
        unit: trained,
        "seconds": seconds,
        f"{unit}_per_s": trained / seconds,
        "bytes": total,
        f"bytes_per_{unit.removesuffix('s')}": total / trained,
        "exposed": exposed,
        "hidden": hidden,
        "skipped": int(skipped),
        "loss": loss / trainer.readers,
        **{name: trainer.found.get(name, math.nan) for name in trainer.task.measures},
        **(trainer.noise.summary() if trainer.noise is not None else {}),
    }

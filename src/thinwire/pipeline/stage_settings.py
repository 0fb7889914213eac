"""StageSettings: learning rate and momentum of a stage that keeps no versions of its weights.

With `stash=False` each stage has settings of its own, by its lag L_s, the updates between the
weights of a gradient and those it is applied to (`Schedule.lag`):

    lr_s = lr / max(1, L_s)^(1 - min(t / T_c, 1)) ;   momentum_s = 0.9 + 0.09 L_s / (L_0 + 1)

[Note: lag of a stage] The settings were published for one update a micro-batch and no lead, with
K_s = P - 1 - s for L_s and P for L_0 + 1, which are the same there. A lead multiplies L_s by
(1 + lead) and accumulation divides it by k. K_s / P would then be no share of anything: with a lead
it passes 1, and a momentum of 1 or more diverges. L_s / (L_0 + 1) is below 1 for every schedule, so
momentum stays in [0.9, 0.99), and it goes to 0.9 as accumulation makes the lag small.
"""

from dataclasses import dataclass, replace

from thinwire.checks import require_count, require_kind, require_positive, require_share
from thinwire.pipeline.schedule import Schedule


@dataclass(frozen=True)
class StageSettings:
    """What a stage without a stash multiplies its learning rate by, and its momentum (beta_1)."""

    lr_scale: float
    momentum: float

    def __post_init__(self) -> None:
        require_positive("StageSettings", "lr_scale", self.lr_scale)
        require_share("StageSettings", "momentum", self.momentum)


def stage_settings(schedule: Schedule, update: int, *, correct_for: int = 7000) -> StageSettings:
    """Of update `update` (from 0); `correct_for` is T_c, about a seventh to a quarter of a run.

    See [Note: lag of a stage] for schedules with a lead or accumulation.
    """
    require_kind("stage_settings", "schedule", schedule, Schedule, "the Schedule of a stage")
    update = require_count("stage_settings", "update", update, least=0)
    correct_for = require_count("stage_settings", "correct_for", correct_for)
    lag, largest = schedule.lag, replace(schedule, stage=0).lag
    exponent = 1 - min(update / correct_for, 1.0)
    return StageSettings(max(1.0, lag) ** -exponent, 0.9 + 0.09 * lag / (largest + 1))

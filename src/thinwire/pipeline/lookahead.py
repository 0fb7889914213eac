"""LookAhead: NAdam as the optimizer of an asynchronous stage; and the settings without a stash.

A gradient that is K updates old points from where the weights were. Look-ahead computes it at a
point where the momentum will have taken them (AsyncPP, eq. 10):

    d_t = g (w_t - w_{t-1}) ;   w_{t+1} = w_t + d_t - lr (1 - g) grad f(w_{t-K} + d_{t-K})

Stored as *the weights*, x = w + d makes of this

    m = g m + (1 - g) grad f(x_{t-K}) ;   x = x - lr [g m + (1 - g) grad f(x_{t-K})]

which is the numerator of NAdam; the factor (1 - g) on the gradient is what keeps it stable. NAdam
brings momentum in slowly, mu_t = beta_1 (1 - 0.96^(decay t) / 2). The default decay of 0.004 was
used in runs of 30,000 updates, and reaches 0.57 after 1,000 of them; for T updates it is scaled:

    decay = 0.004 * 30,000 / T

Without a stash (`stash=False`) each stage has settings of its own (`stage_settings`), by its lag
L_s, the updates between the weights of a gradient and those it is applied to (`Schedule.lag`):

    lr_s = lr / max(1, L_s)^(1 - min(t / T_c, 1)) ;   momentum_s = 0.9 + 0.09 L_s / (L_0 + 1)

[Note: lag of a stage] The settings were published for one update a micro-batch and no lead, with
K_s = P - 1 - s for L_s and P for L_0 + 1, which are the same there. A lead multiplies L_s by
(1 + lead) and accumulation divides it by k. K_s / P would then be no share of anything: with a lead
it passes 1, and a momentum of 1 or more diverges. L_s / (L_0 + 1) is below 1 for every schedule, so
momentum stays in [0.9, 0.99), and it goes to 0.9 as accumulation makes the lag small.
"""

from dataclasses import dataclass, replace

import torch
from torch.optim.optimizer import ParamsT

from thinwire.checks import require_count, require_kind, require_positive, require_share
from thinwire.optim.checks import require_betas, require_nonnegative, require_params
from thinwire.pipeline.schedule import Schedule

_PUBLISHED_UPDATES = 30_000
_PUBLISHED_DECAY = 0.004


class LookAhead(torch.optim.NAdam):
    """NAdam with decoupled weight decay and its momentum's warm-up scaled to the run.

    Args:
        updates: length of the run, T above.
        betas: the first one is the look-ahead: lower it when the loss oscillates, for pipelines of
            two or three stages and short runs.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 3e-4,
        *,
        updates: int,
        betas: tuple[float, float] = (0.99, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        numbers = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        updates = require_count("LookAhead", "updates", updates)
        require_nonnegative("LookAhead", numbers, *numbers)
        super().__init__(
            require_params("LookAhead", params),
            lr=numbers["lr"],
            eps=numbers["eps"],
            weight_decay=numbers["weight_decay"],
            betas=require_betas("LookAhead", betas),
            momentum_decay=_PUBLISHED_DECAY * _PUBLISHED_UPDATES / updates,
            decoupled_weight_decay=True,
        )


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

"""AsyncNAdam: NAdam as the optimizer of an asynchronous pipeline stage.

A gradient that is K updates old points from where the weights were. Look-ahead computes it at a
point where the momentum will have taken them (AsyncPP, eq. 10):

    d_t = g (w_t - w_{t-1}) ;   w_{t+1} = w_t + d_t - lr (1 - g) grad f(w_{t-K} + d_{t-K})

Stored as *the weights*, x = w + d makes of this

    m = g m + (1 - g) grad f(x_{t-K}) ;   x = x - lr [g m + (1 - g) grad f(x_{t-K})]

which is the numerator of NAdam; the factor (1 - g) on the gradient is what keeps it stable. NAdam
brings momentum in slowly, mu_t = beta_1 (1 - 0.96^(decay t) / 2). The default decay of 0.004 was
used in runs of 30,000 updates, and reaches 0.57 after 1,000 of them; for T updates it is scaled:

    decay = 0.004 * 30,000 / T
"""

from torch.optim import NAdam
from torch.optim.optimizer import ParamsT

from thinwire.checks import require_count
from thinwire.optim.checks import require_betas, require_nonnegative, require_params

_PUBLISHED_UPDATES = 30_000
_PUBLISHED_DECAY = 0.004


class AsyncNAdam(NAdam):
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
        updates = require_count("AsyncNAdam", "updates", updates)
        require_nonnegative("AsyncNAdam", numbers, *numbers)
        super().__init__(
            require_params("AsyncNAdam", params),
            lr=numbers["lr"],
            eps=numbers["eps"],
            weight_decay=numbers["weight_decay"],
            betas=require_betas("AsyncNAdam", betas),
            momentum_decay=_PUBLISHED_DECAY * _PUBLISHED_UPDATES / updates,
            decoupled_weight_decay=True,
        )

"""NoiseScale: how large a batch still pays.

A gradient over B samples is G + noise of variance S / B (S the trace of one sample's covariance):

    E|g_b|² = |G|² + S / b          for a small batch b, and the same for a large one B, so

    |G|² = (B |g_B|² - b |g_b|²) / (B - b) ;   S = (|g_b|² - |g_B|²) / (1/b - 1/B)

are unbiased, and S / |G|² is the batch at which noise and gradient weigh the same: the simple noise
scale. Far below it twice the batch halves the steps; far beyond it more samples change nothing.

b is one backward pass of one rank: hooks on the parameters see its gradient before it is added to
`.grad`, so nothing is copied. B is the whole step: k passes on n ranks where the method averages
gradients exactly, k passes on this rank where it does not (local updates, one bit), for k >= 2. A
factor on all gradients of a step (1/k, say) drops out of the ratio.

[Note: ratio] The two estimates are averaged over the steps, each with an exponential window; their
ratio never is, since the mean of noisy ratios is not the ratio of the means. The variance of both
and their covariance, in the same window, give the ratio's standard error (delta method).

[Note: one number rides along] Both estimates are linear in the squared norms, so ranks only add up
their own: three numbers every few steps, landed a block later. Nobody waits for them.

Paper: An Empirical Model of Large-Batch Training, arXiv 1812.06162.
"""

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from thinwire.flat import local_part
from thinwire.optim.checks import (
    require_count,
    require_group,
    require_kind,
    require_positive,
    require_share,
    require_tensors,
    require_text,
)
from thinwire.wire.flight import Flight
from thinwire.wire.ranks import Group
from thinwire.wire.wire import Wire

State = dict[str, Any]


class NoiseScale:
    """Watches the gradients of a model and estimates its noise scale.

    Call `step()` once a step, when the gradients of all its backward passes are there - averaged
    over the ranks or not - and before they are clipped or cleared.

    Args:
        params: the model's parameters.
        batch: samples (or tokens: the noise scale comes in the same unit) in one backward pass of
            a replica.
        decay: memory of the averages, per step. Raise it when the error is large, lower it to
            follow a noise scale that grows during training.
        every: steps in a block: how often ranks add up their numbers. Raise it on links so slow
            that even that shows.
        unit: what `batch` counts, for `reading()`.
        group: ranks whose estimates are averaged; all by default.
        wire: an existing wire of that group to use instead of one of its own.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        *,
        batch: float,
        decay: float = 0.99,
        every: int = 8,
        unit: str = "tokens",
        group: Group = None,
        wire: Wire | None = None,
    ) -> None:
        self.batch = float(require_positive("NoiseScale", "batch", batch))
        decay = require_share("NoiseScale", "decay", decay)
        self._every = every = require_count("NoiseScale", "every", every)
        self.unit = require_text("NoiseScale", "unit", unit)
        require_group("NoiseScale", "group", group)
        if wire is not None:
            require_kind("NoiseScale", "wire", wire, Wire, "a Wire or None")
        tensors = require_tensors(
            "NoiseScale", "params", params, "tensors, as in model.parameters()"
        )
        self._parameters = [p for p in tensors if p.requires_grad]
        if not self._parameters:
            raise ValueError("NoiseScale(params=...) got no parameter that is trained")
        self.wire = wire or Wire(group, name="noise scale")
        self._pass = _Passes(self._parameters)
        self._averages = Averages(decay**every)
        self._steps = 0
        self._block = [0.0, 0.0, 0.0]  # noise, signal and steps since the last block
        self._flight: Flight | None = None

    @torch.no_grad()
    def step(self, norm: float | None = None, *, replicas: int = 1, scale: float = 1.0) -> None:
        """Takes in the gradients of one step.

        Args:
            norm: of the whole gradient, if it is known already; otherwise computed from `.grad`.
            replicas: over how many that gradient is averaged, exactly. 1 where it is this one's.
            scale: a loss scale (GradScaler's) that is in the gradients, `norm` included.
        """
        squares, passes = self._pass.take()
        if norm is None:
            gradients = [local_part(p.grad) for p in self._parameters if p.grad is not None]
            big = self._pass.shards * _sum_of_squares([_norm(g) for g in gradients])
        else:
            big = norm * norm
        small = passes * squares
        if passes * replicas > 1 and math.isfinite(small) and math.isfinite(big):
            noise, signal = split(small, big, self.batch, self.batch * passes * replicas)
            for at, value in enumerate((noise / scale**2, signal / scale**2, 1.0)):
                self._block[at] += value
        self._steps += 1
        if self._steps % self._every == 0:
            self._end_block()

    def forget_pass(self) -> None:
        """Drops what backward passes since the last step have left: they belong to no step."""
        self._pass.take()

    @property
    def value(self) -> float:
        """The noise scale, in the unit of `batch`; NaN before the first block has landed, infinite
        while the gradient cannot be told from noise."""
        return self._averages.ratio

    @property
    def error(self) -> float:
        """Its standard error."""
        return self._averages.error

    @property
    def noise(self) -> float:
        """S: the variance of the gradient of one sample, summed over all values."""
        return self._averages.means[0]

    @property
    def signal(self) -> float:
        """|G|²: the squared norm of the true gradient."""
        return self._averages.means[1]

    def reading(self) -> str:
        """What it says, in one sentence."""
        if math.isnan(self.value):
            return "noise scale: not measured yet"
        pays = "larger batches (or more replicas) save steps as long as a step has fewer than"
        if self._averages.lost:
            least = _rounded(self._averages.least)
            return (
                f"{pays} {least} {self.unit}, and perhaps with more: this run's gradients are too "
                "noisy to tell"
            )
        value, error = _rounded(self.value), _rounded(self.error)
        return f"{pays} about {value} ± {error} {self.unit} (the noise scale)"

    def finish(self) -> None:
        """Takes in what is under way and what the last, short block has; a collective."""
        self._end_block()
        self._land()

    def close(self) -> None:
        """Takes the hooks off the parameters."""
        self._pass.close()

    def state_dict(self) -> State:
        """The same on all ranks but for `block`; JSON."""
        under_way = self._flight.wait().tolist() if self._flight is not None else None
        return {
            "steps": self._steps,
            "block": list(self._block),
            "under_way": under_way,
            "averages": self._averages.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        self._steps, self._block = state["steps"], list(state["block"])
        self._flight = None
        if state["under_way"] is not None:
            landed = torch.tensor(state["under_way"], dtype=torch.float64)
            self._flight = Flight(landed, self.wire.account)
        self._averages.load_state_dict(state["averages"])

    def _end_block(self) -> None:
        """By step counts, so on all ranks alike."""
        self._land()
        self._flight = self.wire.poll(self._block, "sum")
        self._block = [0.0, 0.0, 0.0]

    def _land(self) -> None:
        flight, self._flight = self._flight, None
        if flight is not None:
            noise, signal, count = flight.wait().tolist()
            if count > 0:
                self._averages.add(noise / count, signal / count)


def split(small: float, big: float, b: float, B: float) -> tuple[float, float]:
    """(S, |G|²) from the squared norms of gradients over b and over B samples."""
    return (small - big) / (1 / b - 1 / B), (B * big - b * small) / (B - b)


class Averages:
    """Exponential means of noise and signal, and the standard error of their ratio."""

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._weight = self._weight_sq = 0.0
        self._sums = [0.0] * 5  # of a, b, a², ab, b²

    def add(self, a: float, b: float) -> None:
        keep = self._decay
        fresh = (a, b, a * a, a * b, b * b)
        self._sums = [keep * old + new for old, new in zip(self._sums, fresh, strict=True)]
        self._weight = keep * self._weight + 1
        self._weight_sq = keep * keep * self._weight_sq + 1

    @property
    def means(self) -> tuple[float, float]:
        if self._weight == 0:
            return math.nan, math.nan
        return self._sums[0] / self._weight, self._sums[1] / self._weight

    @property
    def ratio(self) -> float:
        a, b = self.means
        if math.isnan(a):
            return math.nan
        return max(0.0, a) / b if b > 0 else math.inf

    @property
    def error(self) -> float:
        """See [Note: ratio]; infinite until there are two samples."""
        a, b = self.means
        if not b > 0:
            return math.inf
        aa, ab, bb = self._variances()
        r = a / b
        return math.sqrt(max(0.0, aa - 2 * r * ab + r * r * bb)) / b

    @property
    def lost(self) -> bool:
        """Whether the signal is within two standard errors of nothing."""
        return not self.means[1] > 2 * math.sqrt(self._variances()[2])

    @property
    def least(self) -> float:
        """What the ratio is at least, where the signal is lost."""
        a, b = self.means
        return max(0.0, a) / (max(0.0, b) + 2 * math.sqrt(self._variances()[2]))

    def _variances(self) -> tuple[float, float, float]:
        """Of the mean of a, of both, of the mean of b."""
        share = self._weight_sq / self._weight**2 if self._weight else 1.0
        if share >= 1:
            return math.inf, 0.0, math.inf
        (a, b), w = self.means, self._weight
        factor = share / (1 - share)  # of a mean, from a sample's own variance
        pairs = zip(self._sums[2:], (a * a, a * b, b * b), strict=True)
        aa, ab, bb = (factor * (total / w - square) for total, square in pairs)
        return max(0.0, aa), ab, max(0.0, bb)

    def state_dict(self) -> State:
        return {"weights": [self._weight, self._weight_sq], "sums": list(self._sums)}

    def load_state_dict(self, state: State) -> None:
        self._weight, self._weight_sq = state["weights"]
        self._sums = list(state["sums"])


class _Passes:
    """The squared norms of the gradients of single backward passes, by hooks.

    A hook on a plain parameter is given the pass's own gradient. FSDP2 never shows that of a shard:
    there it is the difference to the gradients before the pass, of which a copy is kept. Squares of
    shards count `shards` times, so that their mean over the ranks is the replica's.
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        meshes = [p.device_mesh.size() for p in parameters if isinstance(p, DTensor)]
        self.shards = max(meshes, default=1)
        self._norms: list[Tensor] = []
        self._hits = [0] * len(parameters)
        self._before: dict[int, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        for index, parameter in enumerate(parameters):
            if isinstance(parameter, DTensor):
                hook = _weakly(self._see_shard, index)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
            else:
                self._handles.append(parameter.register_hook(_weakly(self._see, index)))

    def take(self) -> tuple[float, int]:
        """The sum of the squared norms since the last call, and the number of passes."""
        norms, passes = self._norms, max(self._hits, default=0)
        self._norms, self._hits = [], [0] * len(self._hits)
        self._before.clear()
        return self.shards * _sum_of_squares(norms), passes

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _see(self, index: int, gradient: Tensor) -> None:
        if gradient.is_sparse:
            gradient = gradient.coalesce().values()
        self._hits[index] += 1
        self._norms.append(_norm(gradient))

    def _see_shard(self, index: int, parameter: Tensor) -> None:
        assert parameter.grad is not None
        now = local_part(parameter.grad)
        before = self._before.get(index)
        self._hits[index] += 1
        self._norms.append(_norm(now if before is None else now - before))
        self._before[index] = now.clone()


def _weakly(method: Callable[[int, Tensor], None], index: int) -> Callable[[Tensor], None]:
    """A hook that does not keep its owner alive."""
    owner = weakref.WeakMethod(method)

    def hook(tensor: Tensor) -> None:
        see = owner()
        if see is not None:
            with torch.no_grad():
                see(index, tensor)

    return hook


def _norm(gradient: Tensor) -> Tensor:
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(gradient.detach(), dtype=dtype)
    return norm


def _sum_of_squares(norms: list[Tensor]) -> float:
    """One wait for the device."""
    if not norms:
        return 0.0
    return float(torch.stack([n.to(norms[0].device).double() for n in norms]).square().sum())


def _rounded(value: float) -> str:
    """Two digits are all an estimate is worth: 41234 -> 41,000."""
    if not math.isfinite(value) or value <= 0:
        return f"{value:g}"
    digits = 1 - math.floor(math.log10(value))
    return f"{round(value, digits):,.{max(0, digits)}f}"

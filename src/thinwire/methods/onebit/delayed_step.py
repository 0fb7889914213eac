"""DelayedStep: momentum of the compressed stage that is used one step later (`delayed_step=True`).

The momentum of backward pass t is used by the step after pass t+1: its exchange has a whole step of
compute to hide behind, and nothing waits for the last bucket. Most of what is on its way is known,
m_t = b1 m_(t-1) + (1-b1) g_t, so the weights are kept that far ahead:

    X_(t+1) = X_t - lr m_t / w ;   x = X - lr b1 m / w     gradients are those at x; w = sqrt(v)+eps
    x = x - lr ((1 + b1) m_t - b1 m_(t-1)) / w             when m_t has landed, on all ranks alike

Pass t+1 lands m_t before its own first bucket leaves, whose payload is made from it. finish() takes
the last step and goes back to X. What has landed and was not used yet is saved as such, so that a
resumed run goes on as if it had not been stopped. The norm to clip by is not waited for either: the
payloads are made, in a thread of the wire, when it has arrived.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thinwire.flat import local_part
from thinwire.methods.onebit.clipping import Clipping
from thinwire.methods.onebit.mean_norm import shortening
from thinwire.methods.onebit.moments import MomentBucket
from thinwire.methods.onebit.progress import Progress
from thinwire.methods.onebit.rule import Learned, Rule
from thinwire.methods.overlap.reducer import GradientReducer
from thinwire.methods.session import Session
from thinwire.wire.flight import Flight
from thinwire.wire.scratch import Scratch

_scratch = Scratch()


class DelayedStep:
    """Also there where steps are not delayed: a state may have been saved where they were."""

    def __init__(
        self,
        session: Session,
        reducer: GradientReducer[MomentBucket],
        rule: Rule,
        clipping: Clipping,
        progress: Progress,
        *,
        polls_norm: bool,
    ) -> None:
        self._session, self._reducer, self._rule = session, reducer, rule
        self._clipping, self._progress, self._polls_norm = clipping, progress, polls_norm
        self.forget()

    def forget(self) -> None:
        """As if nothing were under way."""
        self._away = False  # in the air
        self._arrived = False  # landed, and not used yet
        self._leaning = False  # the weights are ahead
        # Gradients of parameters in no bucket yet, by index: they are launched a step later.
        self.held: dict[int, Tensor] | None = None
        self._newcomers: dict[int, Tensor] = {}
        self._squares: Flight | None = None  # sum_i ||g_i||² on its way
        self._learned: list[Learned] = []

    # -- leaving ----------------------------------------------------------------------------------

    def measure(self) -> None:
        """The norm to clip by, without a wait for it where that is possible."""
        if self._polls_norm and self._clipping.clip is not None:
            self.arrive()
            self._squares = self._clipping.poll()
        else:
            self._clipping.measure()

    def preparing(self, bucket: MomentBucket) -> Callable[[], None] | None:
        """What makes a payload when the norm has come; None where the norm is known."""
        if self._squares is None:
            return None
        return partial(self._make_payload, bucket, self._squares, self._clipping.clip)

    @torch.no_grad()
    def _make_payload(self, bucket: MomentBucket, squares: Flight, clip: float | None) -> None:
        """In a thread of the wire."""
        factor = shortening(self._clipping.norms.polled(squares.peek()), clip)
        if factor != 1.0:
            bucket.buffer.mul_(factor)
        if self._progress.frozen(bucket):
            self._rule.payload(bucket)

    def leave(self) -> None:
        """The buckets of this step are in the air: uses those of the step before."""
        self._away, self._newcomers = True, self._unplaced_gradients()
        self.catch_up()

    def _unplaced_gradients(self) -> dict[int, Tensor]:
        """Copies of the gradients that no bucket has room for; hardly ever there are any."""
        parameters, place = self._session.parameters, self._reducer.place
        unplaced = {i: p.grad for i, p in enumerate(parameters) if i not in place}
        return {
            i: self._session.unscaled(local_part(gradient).clone())
            for i, gradient in unplaced.items()
            if gradient is not None
        }

    # -- arriving ---------------------------------------------------------------------------------

    @torch.no_grad()
    def arrive(self) -> None:
        """Lands what left at the step before."""
        if not self._away:
            return
        clipping = self._clipping
        self._away, ours = False, clipping.factor  # of the step that is about to leave
        self.held, clipping.factor = self._newcomers, 1.0
        if self._squares is not None:
            clipping.polled(self._squares)
            self._squares = None
        if self._reducer.land():
            self._progress.count_step(self._reducer.buckets)
            self._arrived = True
            self._learned = [self._look_ahead(bucket) for bucket in self._reducer.buckets]
        else:
            self._session.account.skipped += 1
        self.held, clipping.factor = None, ours

    def _look_ahead(self, bucket: MomentBucket) -> Learned:
        """Learns m, and what the weights move by: by m, and from b1 m before to b1 m now."""
        leaned = bucket.scalar("leaned", 0.0).tolist()
        bucket.ahead.zero_()
        for part, before in bucket.runs(leaned.__getitem__):
            torch.mul(bucket.m[part], -before, out=bucket.ahead[part])
        learned = self._rule.learn(bucket)
        for part, (b1, _) in bucket.runs(bucket.betas.__getitem__):
            bucket.ahead[part].add_(bucket.m[part], alpha=1 + b1)
        for at in bucket.used:
            bucket.scalars["leaned"][at] = bucket.betas[at][0]
        return learned

    @torch.no_grad()
    def catch_up(self) -> None:
        """Takes the step of a momentum that has arrived."""
        if not self._arrived:
            return
        self._arrived, self._leaning = False, True
        buckets = self._reducer.buckets
        learned = self._learned or [Learned() for _ in buckets]  # none: of a state that was loaded
        self._learned = []
        for bucket, known in zip(buckets, learned, strict=True):
            out = _scratch.take(bucket.buffer, "directions")
            self._rule.direct(bucket, bucket.ahead, out)
            self._rule.move(bucket, bucket.views(out), known)

    @torch.no_grad()
    def stand(self) -> None:
        """Takes the last step, and takes back what the weights are ahead."""
        self.arrive()
        if not (self._arrived or self._leaning):
            return
        for bucket in self._reducer.buckets:
            if not self._arrived:
                bucket.ahead.zero_()
            bucket.resting = frozenset()  # tensors that rest go back as well
            leaned = bucket.scalar("leaned", 0.0)
            for part, b1 in bucket.runs(leaned.tolist().__getitem__):
                bucket.ahead[part].sub_(bucket.m[part], alpha=b1)
            leaned.zero_()
        self._arrived = True
        self.catch_up()
        self._leaning = False

    def begin(self) -> None:
        """At the freeze: the weights go ahead by b1 m."""
        for bucket in self._reducer.buckets:
            for part, (b1, _) in bucket.runs(bucket.betas.__getitem__):
                torch.mul(bucket.m[part], b1, out=bucket.ahead[part])
            leaned = [
                0.0 if at in bucket.resting else b1 for at, (b1, _) in enumerate(bucket.betas)
            ]
            bucket.scalar("leaned", 0.0).copy_(torch.tensor(leaned))
        self._arrived = True

    # -- state ------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {"arrived": self._arrived, "leaning": self._leaning}

    def load_state(self, kept: dict[str, Any]) -> None:
        self.forget()
        self._arrived, self._leaning = kept.get("arrived", False), kept.get("leaning", False)

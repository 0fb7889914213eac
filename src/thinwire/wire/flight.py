"""Flight: a transfer in the air. `wait()` lands it and is the only place that blocks."""

import time
from collections.abc import Callable
from concurrent.futures import Future

import torch

from thinwire.checks import require_kind
from thinwire.wire.account import Account


class Flight:
    """What `Wire` returns for every transfer.

    The buffer handed to the wire belongs to the flight until `wait()` has returned; the result is
    that same buffer.
    """

    def __init__(self, buffer: torch.Tensor, account: Account) -> None:
        require_kind("Flight", "buffer", buffer, torch.Tensor, "the tensor that is sent")
        require_kind("Flight", "account", account, Account, "an Account")
        self._buffer = buffer
        self._account = account
        self.launched_at = time.perf_counter()
        self._launched_step = account.steps
        self._arrival: Future[float] | None = None  # the clock when the result was in place
        self._settled = False
        self._release: Callable[[], None] | None = None
        self._finite: bool | None = None
        self.seconds = 0.0
        """Time in the air, once landed."""

    def wait(self) -> torch.Tensor:
        """Blocks until the result is in the buffer, and returns it. May be called again."""
        if not self._settled:
            start = time.perf_counter()
            # A flight that never left (a world of one, an empty payload) was not in the air.
            arrived = self.launched_at if self._arrival is None else self._arrival.result()
            self._outlast_pause(arrived)
            self._settled = True
            self.seconds = max(0.0, arrived - self.launched_at)
            self._account.landed(
                flown=self.seconds,
                waited=0.0 if self._arrival is None else time.perf_counter() - start,
                lag=self.lag,
                launched=None if self._arrival is None else self.launched_at,
            )
            self._arrival = None
            if self._release is not None:
                self._release()
                self._release = None
        return self._buffer

    def peek(self) -> torch.Tensor:
        """`wait()` for a thread of the wire: nobody's compute waits there, so nothing is counted,
        and the flight has yet to be landed by its owner."""
        arrival = self._arrival
        if arrival is not None:
            arrival.result()
        return self._buffer

    @property
    def arrived(self) -> bool:
        """Whether `wait()` would return at once. Ranks may see different answers: never let it
        decide what is sent next."""
        if self._settled or self._arrival is None:
            return True
        if not self._arrival.done() or self._arrival.exception() is not None:
            return self._arrival.done()
        return time.perf_counter() >= self._account.ready_at(self._arrival.result())

    def when_arrived(self, then: Callable[[BaseException | None], None]) -> None:
        """Calls `then`, with the error if there was one, when `wait()` would return at once: at the
        latest on the thread that lands the flight, which must not be held up."""
        arrival = self._arrival
        if arrival is None:
            then(None)
        else:
            arrival.add_done_callback(lambda done: then(done.exception()))

    @property
    def lag(self) -> int:
        """Optimizer steps since the launch."""
        return self._account.steps - self._launched_step

    @property
    def finite(self) -> bool:
        """Whether every value of the landed result is finite.

        A mean is the same bits on every rank, and a NaN or infinity of one replica survives every
        codec, so all ranks get the same answer here without asking each other.
        """
        if not self._settled:
            raise RuntimeError("Flight.finite is known only after wait()")
        if self._finite is None:
            self._finite = all_finite(self._buffer)
        return self._finite

    def _outlast_pause(self, arrived: float) -> None:
        """See account.py's [Note: pauses]; without one there is nothing to wait for."""
        owed = self._account.ready_at(arrived) - time.perf_counter()
        if owed > 0:
            time.sleep(owed)

    def _lands_with(self, arrival: "Future[float]") -> None:
        # The lander has synchronised its stream before it sets the future: once it is done the
        # data are in place for every stream, and no event needs to be waited for.
        self._arrival = arrival

    def _when_settled(self, release: Callable[[], None]) -> None:
        self._release = release


def all_finite(values: torch.Tensor) -> bool:
    """One vectorised pass without a temporary: a NaN is both extremes, an infinity one of them."""
    if values.numel() == 0:
        return True
    return bool(torch.isfinite(torch.stack(torch.aminmax(values))).all())

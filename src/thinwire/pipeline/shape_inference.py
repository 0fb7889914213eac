"""ShapeInference: the stages find out what goes between them, before anything is learnt.

A stage hears from the one before it what it will get, tries its module on zeros of that form, and
tells the next stage what it will give; the last stage tries the loss. What goes wrong anywhere is
raised everywhere. After that no message says what it is.
"""

from typing import Any

import torch
from torch import Tensor

from thinwire.pipeline.channel import TensorSpec
from thinwire.pipeline.stage import StageRunner
from thinwire.text import printable
from thinwire.wire.wire import Wire

Forms = tuple[TensorSpec | None, TensorSpec | None]


class ShapeInference:
    """Of one stage; all stages of the wire ask for the same forms in the same order."""

    def __init__(self, wire: Wire, runner: StageRunner) -> None:
        self._wire, self._runner = wire, runner
        self._stage, self._first, self._last = wire.rank, wire.rank == 0, runner.loss is not None
        self._known: dict[tuple[TensorSpec, bool], Forms] = {}

    def forms(self, x: Tensor, y: Tensor | None) -> Forms:
        """What goes into and out of this stage for such an x, None at the pipeline's ends; found
        once for every form of x. Without a `y` the loss is not tried."""
        key = TensorSpec.of(x), y is not None
        if key not in self._known:
            problem, out_of = "", None
            try:
                into = None if self._first else self._hear()
            except ValueError as error:
                into = None
                problem = f"stage {self._stage - 1} announced {error}"
            if self._first or into is not None:
                problem, out_of = self._try(x, y, into)
            if not self._last:
                header = TensorSpec.blank() if out_of is None else out_of.header()
                self._wire.send(header, self._stage + 1).wait()
            for text in self._wire.gather_bytes(problem.encode()):
                if text:
                    raise ValueError(printable(text.decode(errors="replace")))
            self._known[key] = into, out_of
        return self._known[key]

    def _hear(self) -> TensorSpec | None:
        return TensorSpec.read(self._wire.recv(TensorSpec.blank(), self._stage - 1).wait())

    def _try(
        self, x: Tensor, y: Tensor | None, into: TensorSpec | None
    ) -> tuple[str, TensorSpec | None]:
        """What is wrong with this stage, if anything, and the form of what it gives."""
        device = self._runner.device
        if into is not None:
            x = torch.zeros(into.shape, dtype=into.dtype, device=device)
        try:
            out = self._runner.rehearse(x.to(device))
        except Exception as error:
            return f"stage {self._stage} fails on an input of {TensorSpec.of(x)}: {error}", None
        problem = self._refusal(out)
        if problem:
            return problem, None
        if self._last:
            return "" if y is None else self._try_loss(out, y.to(device)), None
        return "", TensorSpec.of(out)

    def _refusal(self, out: Any) -> str:
        if not isinstance(out, Tensor):
            module = type(self._runner.module).__name__
            return (
                f"stage {self._stage} must give one tensor, but its module {module} gave "
                f"{type(out).__name__}"
            )
        refusal = None if self._last else TensorSpec.of(out).refusal()
        return "" if refusal is None else f"stage {self._stage} gives a tensor {refusal}"

    def _try_loss(self, out: Tensor, y: Tensor) -> str:
        assert self._runner.loss is not None
        try:
            with torch.no_grad():
                loss: Any = self._runner.loss(out, y)
        except Exception as error:
            return f"loss(output {TensorSpec.of(out)}, y {TensorSpec.of(y)}) fails: {error}"
        if isinstance(loss, Tensor) and loss.dim() == 0:
            return ""
        found = TensorSpec.of(loss) if isinstance(loss, Tensor) else type(loss).__name__
        return f"loss(output, y) must give a tensor of no dimension, the mean; got {found}"

"""PyTorch's schedules behind our interface: they train what the oracle trains."""

import pytest
import torch

import thinwire as tw
from tests.pipeline import oracle
from thinwire.pipeline import TorchPipeline

UPDATES, ACCUMULATE = 3, 4


def trained(schedules: list[str]) -> list[tuple[list[torch.Tensor], list[float | None]]]:
    world = tw.init(timeout=20)
    found = []
    for schedule in schedules:
        module = oracle.small_stages(world.size)[world.rank]
        pipe = TorchPipeline(
            module,
            oracle.adamw(module),
            loss=oracle.small_loss,
            schedule=schedule,
            accumulate=ACCUMULATE,
        )
        records = list(pipe.train(oracle.small_batches(UPDATES * ACCUMULATE), UPDATES))
        losses = [None if r.loss is None else r.loss.item() for r in records]
        found.append((oracle.weights(module), losses))
    with pytest.raises(ValueError, match="accumulate >= 2 stages"):
        TorchPipeline(module, oracle.adamw(module), loss=oracle.small_loss, accumulate=1)
    return found


def test_gpipe_and_1f1b(ranks) -> None:
    answers = ranks(2, trained, ["gpipe", "1f1b"])
    parts, losses = oracle.train(
        oracle.small_stages(2),
        oracle.adamw,
        oracle.small_loss,
        oracle.small_batches(UPDATES * ACCUMULATE),
        oracle.synchronous(ACCUMULATE),
        accumulate=ACCUMULATE,
    )
    for stage, part in enumerate(parts):
        for weights, found in answers[stage]:
            for ours, theirs in zip(weights, part.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-6)
            if stage == 1:
                first = sum(losses[:ACCUMULATE]) / ACCUMULATE
                assert found[0] == pytest.approx(first, rel=1e-5)
            else:
                assert found == [None] * UPDATES

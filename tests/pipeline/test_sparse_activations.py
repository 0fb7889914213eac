"""Thresholds between stages: the same as a mask inside of the unsplit model, and few bytes."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests.conftest import Ranks
from tests.pipeline import oracle
from thinwire.pipeline import SimulatedPipeline
from thinwire.pipeline.sparse_activations import end_of
from thinwire.wire.codecs import Int8, Threshold

UPDATES, WIDTH, BATCH = 6, 48, 32  # 1536 values pass a cut: more than a small tensor
EXACT = Threshold(0.1, refresh=1, value_bits=32)


class Mask(nn.Module):
    """The largest tenth, with the gradient of what is left: what a crossing is to be."""

    def forward(self, x: Tensor) -> Tensor:
        keep = round(0.1 * x.numel())
        mask = torch.zeros(x.numel())
        mask[x.detach().abs().view(-1).topk(keep).indices] = 1
        return x * mask.view_as(x)


def stages(count: int) -> list[nn.Module]:
    torch.manual_seed(1)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    shape = (count, 2, BATCH, WIDTH)
    return [(x, y) for x, y in torch.randn(*shape, generator=generator)]


def test_flushed_stages_are_the_unsplit_model_with_masks() -> None:
    parts = stages(3)
    a, b, c = (copy.deepcopy(part) for part in parts)
    whole = nn.Sequential(a, Mask(), b, Mask(), c)
    optimizer = oracle.adamw(whole)
    for x, y in batches(UPDATES):
        oracle.small_loss(whole(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    pipeline = SimulatedPipeline(
        parts,
        [oracle.adamw(part) for part in parts],
        loss=oracle.small_loss,
        schedule="flush",
        codec=EXACT,
        clip=0,
    )
    assert len(list(pipeline.train(batches(UPDATES), UPDATES))) == UPDATES
    expected = [p for part in (a, b, c) for p in part.parameters()]
    ours = [p for part in parts for p in part.parameters()]
    torch.testing.assert_close(ours, expected)


CASES: list[dict[str, Any]] = [
    {"codec": Threshold(0.1)},
    {"codec": Threshold(0.1, value_bits=8), "gradient_codec": Threshold(0.5), "lead": 1},
    {"gradient_codec": Threshold(0.2, value_bits=8)},
]


def trained(cases: list[dict[str, Any]]) -> list[tuple[list[Tensor], int]]:
    world = tw.init(timeout=20)
    found = []
    for settings in cases:
        module = stages(world.size)[world.rank]
        pipe = tw.AsyncPipeline(module, oracle.adamw(module), loss=oracle.small_loss, **settings)
        for half in (batches(UPDATES)[:3], batches(UPDATES)[3:]):  # the queue must be left empty
            assert len(list(pipe.train(half, 3))) == 3
        found.append((oracle.weights(module), pipe.account.bytes))
        pipe.close()
    return found


def test_ranks_agree_with_the_stages_in_one_process(ranks: Ranks) -> None:
    answers = ranks(3, trained, CASES)
    for index, settings in enumerate(CASES):
        parts = stages(3)
        optimizers = [oracle.adamw(part) for part in parts]
        pipeline = SimulatedPipeline(parts, optimizers, loss=oracle.small_loss, **settings)
        for half in (batches(UPDATES)[:3], batches(UPDATES)[3:]):
            assert len(list(pipeline.train(half, 3))) == 3
        for stage, module in enumerate(parts):
            ours = answers[stage][index][0]
            for mine, theirs in zip(ours, module.parameters(), strict=True):
                assert torch.equal(mine, theirs), (settings, stage)
    kept, blocks = round(0.1 * WIDTH * BATCH), -(-WIDTH * BATCH // 256)
    there, back = 4 + blocks + kept + kept // 2, 4 + kept // 2
    assert [a[0][1] for a in answers] == [UPDATES * n for n in (there, there + back, back)]
    assert 2 * 4 * WIDTH * BATCH / (there + back) > 20


def test_a_message_comes_back_by_its_own_way() -> None:
    here, there = end_of(EXACT, None), end_of(EXACT, None)
    sent = [torch.randn(1000, generator=torch.Generator().manual_seed(s)) for s in range(3)]
    for x in sent:  # three under way before the first comes back
        out = torch.empty(1000)
        there.activations.decode(here.activations.encode(x, 1, 1000), 1000, out)  # type: ignore[union-attr]
        kept = x.abs() >= x.abs().topk(100).values[-1]
        torch.testing.assert_close(out, x * kept)
    for x in sent:
        gradient = torch.full((1000,), 3.0)
        out = torch.empty(1000)
        there_gradients, here_gradients = there.gradients, here.gradients
        assert there_gradients is not None
        assert here_gradients is not None
        payload = there_gradients.encode(gradient, 1, 1000)
        assert payload.numel() == 4 + 4 * 100, "no places"
        here_gradients.decode(payload, 1000, out)
        assert torch.equal(out != 0, x.abs() >= x.abs().topk(100).values[-1])


def test_what_does_not_fit_is_refused() -> None:
    module = nn.Linear(2, 2)
    for settings, message in [
        ({"codec": Threshold(0.1), "gradient_codec": Int8()}, "takes None or a Threshold"),
        ({"codec": Threshold(0.1, momentum=0.9)}, "momentum correction is for gradients of weight"),
    ]:
        with pytest.raises(ValueError, match=message):
            tw.AsyncPipeline(module, oracle.adamw(module), loss=oracle.small_loss, **settings)

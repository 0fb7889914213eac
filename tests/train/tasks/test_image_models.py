"""The image models: size, shape, learning, and what is refused."""

import pytest
import torch

from thinwire.errors import UsageError
from thinwire.train.checkpoints.rebuild import model_from_settings
from thinwire.train.tasks.image_models import (
    IMAGE_PRESETS,
    ImageModel,
    ImageShape,
    build_image_model,
)
from thinwire.train.tasks.models import ModelConfig, model_settings

DIGITS = ImageShape(channels=1, size=8, classes=10)
SMALL = ("resnet-0.1m", "vit-0.1m")


def build(name: str, seed: int = 0, **settings: bool) -> ImageModel:
    return build_image_model(ModelConfig(model=name, **settings), DIGITS, seed)


def batch(count: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(count, 1, 8, 8, generator=generator)
    return x, torch.randint(10, (count,), generator=generator)


def vector(model: ImageModel) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("name", IMAGE_PRESETS)
def test_a_name_is_the_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        model = build(name)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == pytest.approx(float(name.split("-")[1][:-1]) * 1e6, rel=0.15)


@pytest.mark.parametrize("name", SMALL)
def test_it_begins_near_a_uniform_guess_and_learns_a_batch_by_heart(name: str) -> None:
    model, (x, y) = build(name), batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 if "resnet" in name else 3e-3)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(2.303, abs=0.3)
    assert losses[-1] < 0.05


@pytest.mark.parametrize("name", SMALL)
def test_a_seed_is_a_model_and_settings_rebuild_it(name: str) -> None:
    before = torch.get_rng_state()
    one, same, other = build(name), build(name), build(name, seed=1)
    assert torch.get_rng_state().equal(before)
    assert vector(one).equal(vector(same))
    assert not vector(one).equal(vector(other))
    rebuilt = model_from_settings(model_settings(one, name))
    rebuilt.load_state_dict(one.state_dict())
    assert rebuilt.eval()(batch()[0]).equal(one.eval()(batch()[0]))


@pytest.mark.parametrize("name", SMALL)
def test_it_is_a_plain_sequence_of_embed_blocks_and_head(name: str) -> None:
    model, (x, _) = build(name).eval(), batch()
    by_hand = model.embed(x)
    for block in model.blocks:
        by_hand = block(by_hand)
    assert model.head(by_hand).equal(model(x))
    assert model(x).shape == (16, 10)


def test_recomputed_activations_give_the_same_gradients_and_are_refused_with_batch_norm() -> None:
    plain, recomputed = build("vit-0.1m"), build("vit-0.1m", checkpoint_activations=True)
    for model in (plain, recomputed):
        model(*batch()).backward()
    for one, other in zip(plain.parameters(), recomputed.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert one.grad.equal(other.grad)
    with pytest.raises(UsageError, match="--checkpoint-activations: resnet-1m has BatchNorm"):
        build("resnet-1m", checkpoint_activations=True)


def test_a_model_of_text_is_refused() -> None:
    with pytest.raises(UsageError, match=r"for images it takes resnet-0\.1m.*got 'gpt-0.3m'"):
        build("gpt-0.3m")

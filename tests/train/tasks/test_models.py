"""What the GPT must compute, its sizes, its initialisation."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from thinwire.errors import UsageError
from thinwire.train.checkpoints.rebuild import model_from_settings
from thinwire.train.tasks.models import (
    GPT,
    PRESETS,
    GPTConfig,
    ModelConfig,
    build_model,
    model_settings,
    token_loss,
)

SMALL = GPTConfig(layers=2, width=32, heads=4, vocab=50, context=16)
UNITS = {"m": 1e6, "b": 1e9}


def small(seed: int = 0, **settings: bool) -> GPT:
    torch.manual_seed(seed)
    return GPT(SMALL, **settings)


def tokens(batch: int = 2, steps: int = 16, seed: int = 1) -> torch.Tensor:
    return torch.randint(50, (batch, steps), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", PRESETS)
def test_a_name_is_the_number_of_parameters(name: str):
    promised = float(name[len("gpt-") : -1]) * UNITS[name[-1]]
    with torch.device("meta"):
        model = GPT(GPTConfig(*PRESETS[name], vocab=256, context=128))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == pytest.approx(promised, rel=0.15)


def test_a_later_token_does_not_change_earlier_logits():
    model, x = small(), tokens()
    changed = x.clone()
    changed[:, 9] = (x[:, 9] + 1) % 50
    before, after = model(x), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert all(not torch.allclose(before[:, t], after[:, t]) for t in range(9, 16))


def test_a_masked_model_sees_both_sides():
    torch.manual_seed(0)
    model, x = GPT(GPTConfig(2, 32, 4, 50, 16, causal=False)), tokens()
    changed = x.clone()
    changed[:, 9] = (x[:, 9] + 1) % 50
    before, after = model(x), model(changed)
    assert all(not torch.allclose(before[:, t], after[:, t]) for t in range(16))


def test_position_matters():
    model = small()
    logits = model(torch.zeros(1, 16, dtype=torch.long))
    assert not torch.allclose(logits[:, 3], logits[:, 4])


def test_initial_loss_is_that_of_a_uniform_guess():
    x, y = tokens(8), tokens(8, seed=2)
    assert small()(x, y).item() == pytest.approx(math.log(50), rel=0.03)


def test_it_overfits_a_tiny_batch():
    model, x, y = small(), tokens(), tokens(seed=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        model(x, y).backward()
        optimizer.step()
    assert model(x, y).item() < 0.1


def test_loss_is_the_plain_mean_over_the_targets_that_count():
    model, x, y = small(), tokens(), tokens(seed=2)
    y[0, :12] = -100
    chances = model(x).log_softmax(-1)
    picked = [chances[b, t, y[b, t]] for b in range(2) for t in range(16) if y[b, t] != -100]
    assert model(x, y).item() == pytest.approx(-torch.stack(picked).mean().item(), rel=1e-5)


def test_loss_is_fp32_under_autocast():
    model, x, y = small(), tokens(), tokens(seed=2)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(x)
        loss = model(x, y)
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(token_loss(logits, y).item(), abs=1e-6)


def test_the_head_is_tied():
    model = small()
    assert model.head.linear.weight is model.embed.tokens.weight
    assert len({p.data_ptr() for p in model.parameters()}) == len(list(model.parameters()))
    model(tokens(), tokens(seed=2)).backward()
    gradient = model.embed.tokens.weight.grad
    assert gradient is not None
    assert gradient[set(range(50)).difference(tokens().flatten().tolist()).pop()].any()


def test_the_model_is_a_plain_sequence():
    model, x = small(), tokens()
    stream = model.embed(x)
    assert stream.shape == (2, 16, 32)
    for block in model.blocks:
        stream = block(stream)
    assert torch.equal(model.head(stream), model(x))


def test_checkpointed_activations_give_identical_gradients():
    plain, checkpointed = small(), small(checkpoint_activations=True)
    for model in (plain, checkpointed):
        model(tokens(), tokens(seed=2)).backward()
    for a, b in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad)


def test_checkpointing_really_recomputes():
    calls = []
    for model in (small(), small(checkpoint_activations=True)):
        count = [0]
        model.blocks[0].attention.register_forward_pre_hook(
            lambda *_, count=count: count.__setitem__(0, count[0] + 1)
        )
        model(tokens(), tokens(seed=2)).backward()
        calls.append(count[0])
    assert calls == [1, 2]


def test_initialisation():
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=8, width=128, heads=4, vocab=256, context=64))
    block = model.blocks[3]
    assert block.attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.embed.tokens.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for residual in (block.attention.out.weight, block.mlp[2].weight):
        assert residual.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert torch.equal(block.mlp_norm.weight, torch.ones(128))
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_a_seed_is_a_model_and_leaves_the_global_state_alone():
    torch.manual_seed(11)
    before = torch.get_rng_state()
    one, same = (build_model(ModelConfig(), 256, 32, seed=5) for _ in range(2))
    other = build_model(ModelConfig(), 256, 32, seed=6)
    assert torch.equal(torch.get_rng_state(), before)
    pairs = zip(one.parameters(), same.parameters(), other.parameters(), strict=True)
    for a, b, c in pairs:
        assert torch.equal(a, b)
        assert a.dim() < 2 or not torch.equal(a, c)


def test_masked_objective_has_a_row_for_the_mask():
    model = build_model(ModelConfig(objective="masked"), 256, 32, seed=0)
    assert model.config.vocab == 257
    assert not model.config.causal
    assert model(torch.full((1, 4), 256)).shape == (1, 4, 257)


def test_compile_is_in_place(monkeypatch: pytest.MonkeyPatch):
    compiled = []
    monkeypatch.setattr(GPT, "compile", lambda self: compiled.append(self))
    model = build_model(ModelConfig(compile=True), 256, 32, seed=0)
    assert compiled == [model]
    assert "embed.tokens.weight" in model.state_dict()


def test_settings_rebuild_the_model():
    model = build_model(ModelConfig(objective="masked"), 256, 32, seed=0)
    settings = model_settings(model, "gpt-0.3m")
    assert settings["name"] == "gpt-0.3m"
    assert model_from_settings(settings).config == model.config
    with pytest.raises(UsageError, match="layers"):
        model_from_settings({"name": "gpt-0.3m"})


def test_bad_input_is_refused():
    with pytest.raises(UsageError, match=r"gpt-0\.3m, gpt-1m.*got 'gpt-5'"):
        build_model(ModelConfig(model="gpt-5"), 256, 32, seed=0)
    with pytest.raises(UsageError, match="heads"):
        GPT(GPTConfig(1, 30, 4, 50, 16))
    with pytest.raises(ValueError, match="at most 16"):
        small()(tokens(steps=17))


def test_an_untied_head_has_a_weight_of_its_own():
    tied, untied = GPT(SMALL), GPT(dataclasses.replace(SMALL, tied=False))
    assert tied.head.linear.weight is tied.embed.tokens.weight
    assert untied.head.linear.weight is not untied.embed.tokens.weight
    more = sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters())
    assert more == SMALL.vocab * SMALL.width
    again = model_from_settings(model_settings(untied, "gpt-small"))
    again.load_state_dict(untied.state_dict())
    assert torch.equal(again(tokens()), untied(tokens()))

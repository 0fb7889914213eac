"""Every program of examples/ runs on real ranks, and translations mean what they say."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw
from tests.conftest import Ranks
from tests.documented import ROOT

EXAMPLES = ROOT / "examples"
UNTRAINED = 3.4  # about the variance of what is to be learnt: the loss of a model that says 0


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def main_of(name: str) -> Any:
    return example(name)["main"]()


def test_every_program_is_run() -> None:
    with_commands = {"recommender", "ten_lines"}  # in test_documents.py
    here = {"ddp_to_thinwire", "fsdp2_inside_a_node", "deepspeed_one_bit", "torchft_diloco"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == with_commands | here


# -- DDP -------------------------------------------------------------------------------------------


def both_loops() -> tuple[float, float, int, int]:
    found = example("ddp_to_thinwire")
    tw.init()
    before, (after, account) = found["with_ddp"](), found["with_thinwire"]()
    return before, after, found["ddp_bytes"](found["new_model"](), 2), account.bytes


def test_a_ddp_loop_and_the_same_with_thinwire(ranks: Ranks) -> None:
    results = ranks(2, both_loops)
    assert results[0][:2] == results[1][:2]  # equal weights in the end, with either
    before, after, all_gradients, sent = results[0]
    assert before < UNTRAINED / 4
    assert after < UNTRAINED / 4
    assert sent < all_gradients / 6


# -- FSDP2 -----------------------------------------------------------------------------------------


def test_fsdp2_inside_a_node(ranks: Ranks) -> None:
    results = ranks(4, main_of, "fsdp2_inside_a_node")
    losses = [result["loss"] for result in results]
    assert losses == [losses[0]] * 4
    assert losses[0] < UNTRAINED / 2
    # 16 bytes of outer state for each parameter of a replica, on its two shards together.
    of_a_replica = results[0]["outer_bytes"] + results[1]["outer_bytes"]
    assert of_a_replica == 16 * results[0]["parameters"]


# -- DeepSpeed -------------------------------------------------------------------------------------

DEEPSPEED = example("deepspeed_one_bit")
translated, NoCounterpart = DEEPSPEED["translated"], DEEPSPEED["NoCounterpart"]


def one_bit(kind: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": params}}


def test_one_bit_adam_s_config() -> None:
    found = translated(DEEPSPEED["SAMPLE"])
    assert found.method == "OneBitAdam"
    assert found.settings == {
        "lr": 2e-3,
        "betas": (0.9, 0.99),
        "weight_decay": 0.01,
        "freeze_at": 60,
        "clip": 1.0,
    }
    assert list(found.loop) == ["train_micro_batch_size_per_gpu"]


def test_one_bit_lamb_s_config() -> None:
    params = {"max_coeff": 0.3, "min_coeff": 0.02, "coeff_beta": 0.8, "factor_max": 3.0}
    found = translated(one_bit("OneBitLamb", lr=0.01, freeze_step=40, **params))
    assert found.settings == {
        "lr": 0.01,
        "freeze_at": 40,
        "coefficient": (0.02, 0.3),
        "coefficient_beta": 0.8,
        "factor": (0.5, 3.0),
    }


def test_zero_one_adam_s_config() -> None:
    params = {"var_freeze_step": 30, "var_update_scaler": 4, "local_step_clipper": 8}
    found = translated(one_bit("ZeroOneAdam", local_step_scaler=20, **params))
    assert found.settings == {
        "freeze_at": 30,
        "double_after": 4,
        "local_double_after": 20,
        "longest": 8,
    }


@pytest.mark.parametrize("kind", ["OneBitAdam", "OneBitLamb", "ZeroOneAdam"])
@pytest.mark.parametrize("as_published", [False, True])
def test_what_is_translated_can_be_built(kind: str, as_published: bool) -> None:
    found = translated(one_bit(kind, lr=1e-3), as_published=as_published)
    optimizer = found.build(nn.Linear(3, 2).parameters())
    assert type(optimizer).__name__ == kind
    assert optimizer.freeze_at == 100_000  # DeepSpeed's default


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (one_bit("OneBitAdam", amsgrad=True), "params.amsgrad"),
        (one_bit("OneBitLamb", eps_inside_sqrt=True), "params.eps_inside_sqrt"),
        (one_bit("OneBitAdam", max_coeff=0.3), "params.max_coeff"),
        (one_bit("ZeroOneAdam", freeze_step=3), "params.freeze_step"),
        (one_bit("OneBitAdam", lr="auto"), "params.lr"),
        (one_bit("Adam"), "optimizer.type 'Adam'"),
        (one_bit("OneBitAdam") | {"zero_optimization": {"stage": 1}}, "zero_optimization.stage 1"),
        (one_bit("OneBitAdam") | {"flops_profiler": {}}, "flops_profiler"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(NoCounterpart) as refused:
        translated(config)
    assert str(refused.value).startswith(named)


def train_sample(kind: str) -> float:
    found = example("deepspeed_one_bit")
    config = found["SAMPLE"] | {"optimizer": found["SAMPLE"]["optimizer"] | {"type": kind}}
    return float(found["train"](found["translated"](config)))


def test_training_with_a_translated_config(ranks: Ranks) -> None:
    losses = ranks(2, train_sample, "OneBitAdam")
    assert losses[0] == losses[1] < UNTRAINED / 4


# -- torchft ---------------------------------------------------------------------------------------


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def outer_of(model: nn.Module, **more: Any) -> torch.optim.SGD:
    settings = {"lr": 0.7, "momentum": 0.9, "nesterov": True} | more
    return torch.optim.SGD(model.parameters(), **settings)


def small_loss(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    x = torch.randn(8, 6, generator=generator)
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def with_diloco(model: nn.Module, steps: int, every: int, **outer: Any) -> None:
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    diloco = example("torchft_diloco")["diloco"]
    optimizer = diloco([model], inner, outer_of(model, **outer), sync_every=every)
    for step in range(steps):
        small_loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def by_hand(model: nn.Module, steps: int, every: int, **more: Any) -> None:
    """torchft's round: the mean of the pseudo-gradients is the gradient of an SGD at the backup."""
    inner, outer = torch.optim.AdamW(model.parameters(), lr=1e-2), outer_of(model, **more)
    backup = [p.detach().clone() for p in model.parameters()]
    for step in range(steps):
        small_loss(model, step).backward()
        inner.step()
        inner.zero_grad()
        if (step + 1) % every:
            continue
        with torch.no_grad():
            for p, kept in zip(model.parameters(), backup, strict=True):
                p.grad = kept - p
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
                p.copy_(kept)
            outer.step()
            outer.zero_grad()
            backup = [p.detach().clone() for p in model.parameters()]


def both_dilocos(outer: dict[str, Any]) -> None:
    tw.init()
    ours, theirs = small_model(), small_model()
    with_diloco(ours, 20, 5, **outer)
    by_hand(theirs, 20, 5, **outer)
    for got, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("outer", [{}, {"nesterov": False, "momentum": 0.5}, {"lr": 0.4}])
def test_torchft_s_diloco_translated_is_its_recursion(ranks: Ranks, outer: dict[str, Any]) -> None:
    ranks(2, both_dilocos, outer)


def test_torchft_s_streaming_diloco_runs(ranks: Ranks) -> None:
    losses = ranks(2, main_of, "torchft_diloco")
    assert losses[0] == losses[1] < UNTRAINED / 2


def test_what_torchft_has_and_we_do_not_is_refused() -> None:
    model, diloco = small_model(), example("torchft_diloco")["diloco"]
    inner = torch.optim.AdamW(model.parameters())
    for outer, more, named in (
        (outer_of(model, nesterov=False, dampening=0.1), {}, "dampening"),
        (outer_of(model, weight_decay=0.1), {}, "weight_decay"),
        (torch.optim.AdamW(model.parameters()), {}, "AdamW"),
        (outer_of(model), {"fragment_update_alpha": 0.5}, "fragment_update_alpha"),
    ):
        with pytest.raises(ValueError, match=named):
            diloco([model], inner, outer, 4, **more)
    separate = [outer_of(model[0]), outer_of(model[2], lr=0.1)]
    with pytest.raises(ValueError, match="different settings"):
        diloco([model[0], model[2]], inner, separate, 4)


def test_torchft_s_local_sgd_translated() -> None:
    model = small_model()
    inner = torch.optim.AdamW(model.parameters())
    optimizer = example("torchft_diloco")["local_sgd"](model, inner, 7)
    assert isinstance(optimizer, tw.LocalSGD)
    assert optimizer.every == 7


def test_programs_say_how_they_are_run() -> None:
    for path in EXAMPLES.glob("*.py"):
        assert f"examples/{path.name}" in Path(path).read_text().split('"""')[1], path.name

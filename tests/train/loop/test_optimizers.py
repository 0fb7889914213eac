"""The inner optimizer by name, and the learning rate over a run."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from thinwire.errors import UsageError
from thinwire.train.loop.optimizers import (
    OptimizerConfig,
    build_optimizer,
    learning_rate,
    try_optimizer,
)


def test_the_learning_rate_rises_and_falls() -> None:
    config = OptimizerConfig(lr=2.0, warmup=3, final_lr=0.25)
    rates = [learning_rate(config, step, 11) for step in range(12)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]  # the peak follows the warm-up
    assert all(a > b for a, b in pairwise(rates[3:]))
    assert rates[7] == pytest.approx(2.0 * (0.25 + 0.75 / 2))  # half-way down the cosine
    assert rates[11] == pytest.approx(0.5)
    assert learning_rate(config, 500, 11) == pytest.approx(0.5)  # and stays there
    assert learning_rate(OptimizerConfig(lr=1.0, warmup=0), 0, 1) == 1.0


def test_matrices_decay_and_norms_do_not() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    optimizer = build_optimizer(OptimizerConfig(weight_decay=0.3), model)
    decays = {p: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert {p.dim(): decay for p, decay in decays.items()} == {2: 0.3, 1: 0.0}
    assert len(decays) == 4


def test_names_are_not_case_sensitive_and_arguments_are_json() -> None:
    config = OptimizerConfig("adamw", optimizer_arg=("betas=[0.5, 0.6]", "amsgrad=True"))
    optimizer = build_optimizer(config, nn.Linear(2, 2))
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.defaults["betas"] == (0.5, 0.6)
    assert optimizer.defaults["amsgrad"] is True
    plain = OptimizerConfig("SGD", optimizer_arg=("weight_decay=0.5", "momentum=0.9"))
    assert build_optimizer(plain, nn.Linear(2, 2)).param_groups[0]["weight_decay"] == 0.5


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (OptimizerConfig("Adamm"), "--optimizer takes one of"),
        (OptimizerConfig("LBFGS"), "--optimizer takes one of"),
        (OptimizerConfig("Optimizer"), "--optimizer takes one of"),
        (OptimizerConfig(optimizer_arg=("momentum=0.9",)), "--optimizer-arg momentum: AdamW takes"),
        (OptimizerConfig(optimizer_arg=("params=1",)), "--optimizer-arg params: AdamW takes"),
        (OptimizerConfig(optimizer_arg=("betas",)), "takes NAME=VALUE, got 'betas'"),
        (OptimizerConfig(optimizer_arg=("betas=[2, 3]",)), "--optimizer AdamW: Invalid beta"),
        (OptimizerConfig(optimizer_arg=("betas=5",)), "--optimizer AdamW"),
        (OptimizerConfig(optimizer_arg=("lr=1",)), "--optimizer AdamW"),
        (OptimizerConfig(lr=-1.0), "--optimizer AdamW: Invalid learning rate"),
        (OptimizerConfig(optimizer_arg=("capturable=true",)), "AdamW cannot step"),
    ],
)
def test_what_cannot_work_is_refused(config: OptimizerConfig, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        try_optimizer(config)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)

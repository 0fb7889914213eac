"""GradientAverage as a torch optimizer like any other: groups, hooks, schedulers, closures."""

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import thinwire as tw
from tests.methods.dense.test_gradient_average import data, loss_of, model, sgd, weights
from thinwire.wire.codecs import Dense


def alone() -> tuple[nn.Module, tw.GradientAverage]:
    net = model()
    return net, tw.GradientAverage(sgd(net.parameters()))


def test_it_is_an_optimizer_over_the_inner_ones_groups() -> None:
    net, optimizer = alone()
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is optimizer.inner.param_groups
    assert "GradientAverage" in repr(optimizer)
    assert "lr: 0.05" in repr(optimizer)
    loss_of(net, *data(0, 0)).backward()
    optimizer.zero_grad()
    assert all(p.grad is None for p in net.parameters())


def test_hooks_run_once_a_step() -> None:
    net, optimizer = alone()
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    for _ in range(2):
        loss_of(net, *data(0, 0)).backward()
        optimizer.step()
    assert calls == ["before", "after"] * 2


def test_a_scheduler_writes_the_inner_learning_rate_also_after_loading() -> None:
    net, optimizer = alone()
    scheduler = LambdaLR(optimizer, lambda step: 0.1**step)
    for expected in (0.05, 0.005):
        assert optimizer.inner.param_groups[0]["lr"] == pytest.approx(expected)
        loss_of(net, *data(0, 0)).backward()
        optimizer.step()
        scheduler.step()
    optimizer.load_state_dict(optimizer.state_dict())
    loss_of(net, *data(0, 0)).backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.inner.param_groups[0]["lr"] == pytest.approx(0.05 * 0.001)


def test_closures_are_called_once_with_gradients_on() -> None:
    net, optimizer = alone()
    seen = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(net, *data(0, 0))
        loss.backward()
        seen.append(loss.item())
        return loss

    with torch.no_grad():
        first = optimizer.step(closure)
    assert [first.item()] == seen
    assert optimizer.step(closure).item() < first.item()


def test_several_groups_keep_their_settings() -> None:
    net = model()
    groups = [
        {"params": net[0].parameters(), "lr": 0.5},  # type: ignore[index]
        {"params": net[2].parameters()},  # type: ignore[index]
    ]
    optimizer = tw.GradientAverage(torch.optim.SGD(groups, lr=0.0))
    before = weights(net)
    loss_of(net, *data(0, 0)).backward()
    optimizer.step()
    changed = [not torch.equal(a, b) for a, b in zip(before, weights(net), strict=True)]
    assert changed == [True, True, False, False]


def test_named_parameters_are_taken() -> None:
    net = model()
    optimizer = tw.GradientAverage(sgd(net.named_parameters()))
    loss_of(net, *data(0, 0)).backward()
    optimizer.step()
    assert optimizer.param_groups[0]["param_names"][0] == "0.weight"


def test_what_cannot_work_is_refused() -> None:
    net, optimizer = alone()
    with pytest.raises(ValueError, match="parameters cannot be added after construction"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(
        ValueError,
        match=r"inner=...\) takes a torch.optim.Optimizer over the parameters, got a list",
    ):
        tw.GradientAverage(list(net.parameters()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot wrap LBFGS"):
        tw.GradientAverage(torch.optim.LBFGS(net.parameters()))
    with pytest.raises(
        ValueError, match=r"codec=...\) takes an object of thinwire.codecs.*parse\(.int8.\)"
    ):
        tw.GradientAverage(sgd(net.parameters()), codec="int8")  # type: ignore[arg-type]


def test_a_parameter_that_was_computed_is_refused() -> None:
    weight = nn.Parameter(torch.ones(3))
    inner = torch.optim.SGD([weight], lr=0.1)
    inner.param_groups[0]["params"].append(weight * 2)
    with pytest.raises(ValueError, match=r"parameter 1 of shape \(3,\) is not a leaf"):
        tw.GradientAverage(inner)


def test_the_default_codec_is_the_parameters_own_width() -> None:
    assert tw.GradientAverage(sgd(model().parameters())).codec == Dense()
    double = tw.GradientAverage(sgd(model().double().parameters()))
    assert double.codec == Dense(torch.float64)

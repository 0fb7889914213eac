"""Two sets of BatchNorm: which one is in use, what it leaves behind, what is refused."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import thinwire as tw
from thinwire.extras.dual_batch_norm import second_parameters, second_set


def network() -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU())
    model = nn.Sequential(inner, nn.Flatten(), nn.Linear(12, 4), nn.BatchNorm1d(4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def images(seed: int = 0) -> torch.Tensor:
    return torch.rand(5, 1, 4, 4, generator=torch.Generator().manual_seed(seed))


def test_the_first_set_is_the_model_as_it_was() -> None:
    plain = network()
    dual = tw.dual_batch_norm(copy.deepcopy(plain))
    for model in (plain, dual):
        model.train()
        model(images())
    assert dual(images(1)).equal(plain(images(1)))
    assert dual.eval()(images(2)).equal(plain.eval()(images(2)))
    state = dual.state_dict()
    extra = second_parameters(dual)
    assert extra == ["0.1.second.weight", "0.1.second.bias", "3.second.weight", "3.second.bias"]
    assert set(state) - set(extra) == set(plain.state_dict())
    assert all(state[name].equal(value) for name, value in plain.state_dict().items())


def test_parameters_and_buffers_are_the_same_objects() -> None:
    model = network()
    before = dict(model.named_parameters()) | dict(model.named_buffers())
    tw.dual_batch_norm(model)
    after = dict(model.named_parameters()) | dict(model.named_buffers())
    assert all(after[name] is tensor for name, tensor in before.items())
    assert len(after) == len(before) + 4


def test_the_second_set_has_gains_of_its_own_and_leaves_no_trace() -> None:
    model = tw.dual_batch_norm(network())
    alone = network()
    with torch.no_grad():
        model[3].second.weight.mul_(2)
        alone[3].weight.mul_(2)
    statistics = {name: b.clone() for name, b in model.named_buffers()}
    with second_set():
        assert model(images()).equal(alone(images()))
        assert model.eval()(images()).equal(alone(images()))  # by the batch in either mode
        model.train()
    assert all(b.equal(statistics[name]) for name, b in model.named_buffers())
    model(images()).sum().backward()
    assert model[3].second.weight.grad is None
    model(images())
    assert not model[3].running_mean.equal(statistics["3.running_mean"])


def test_the_switch_is_for_one_thread() -> None:
    model = tw.dual_batch_norm(network())
    with torch.no_grad():
        model[3].second.weight.zero_()
        model[3].second.bias.zero_()
    with ThreadPoolExecutor(1) as pool, second_set():
        assert not model(images()).any()
        assert pool.submit(model, images()).result().any()
    assert model(images()).any()


def test_a_module_in_two_places_stays_one_and_a_second_call_changes_nothing() -> None:
    norm = nn.BatchNorm1d(4)
    model = nn.ModuleList([nn.Sequential(norm), nn.Sequential(norm)])
    tw.dual_batch_norm(model)
    assert model[0][0] is model[1][0]
    before = list(model.modules())
    assert list(tw.dual_batch_norm(model).modules()) == before


@pytest.mark.parametrize(
    ("norm", "said"),
    [
        (nn.SyncBatchNorm(4), "is a SyncBatchNorm"),
        (nn.LazyBatchNorm2d(), "does not know its size"),
    ],
)
def test_what_cannot_have_two_sets_is_refused(norm: nn.Module, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tw.dual_batch_norm(nn.Sequential(norm))

"""Parameters of every kind: complex, float64, of several widths, and given other memory."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import thinwire as tw
from tests.methods.local import local_oracle as oracle
from tests.methods.local.local_oracle import Settings
from thinwire.flat import Unchanged
from thinwire.wire.codecs import Codec, Dense, ErrorFeedback, Feedback, Int4, Int8, OneBit, TopK

NUMEL, LR, REPLICAS, STEPS = 40, 0.05, 3, 23

CASES: dict[str, tuple[dict[str, Any], Settings]] = {
    "LocalSGD": ({"every": 5}, Settings(every=5)),
    "SlowMo": ({"every": 4}, Settings(every=4, momentum=0.5)),
    "StreamingDiLoCo": (
        {"every": 6, "fragments": 1, "delay": 2, "codec": Dense(torch.float64)},
        Settings(every=6, delay=2, merge=0.5, lr=0.4, momentum=0.9, nesterov=True),
    ),
    "CO2": (
        {"every": 4},
        Settings(every=4, delay="round", momentum=0.2, penalty="gap", clip=2.0),
    ),
    "Overlapped": ({"every": 4}, Settings(every=4, delay="round", own_weight=1.0, momentum=0.5)),
}
ALL = [*CASES, "SparseAverage"]


def build(kind: str, parameters: list[nn.Parameter], **more: Any) -> Any:
    inner = torch.optim.SGD(parameters, lr=LR)
    if kind == "SparseAverage":
        return tw.SparseAverage(inner, **{"fraction": 0.5, "delay": 3, **more})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(tw, kind)(inner, **{**CASES[kind][0], **more})


# -- complex --------------------------------------------------------------------------------------


def as_complex(flat: Tensor) -> Tensor:
    return torch.view_as_complex(flat.reshape(-1, 2).contiguous())


def both_forms(kind: str, dtype: torch.dtype) -> tuple[float, float, float]:
    """The same weights as complex numbers and as pairs of real ones: one trajectory."""
    tw.init()
    start = oracle.start_point(NUMEL).to(dtype)
    gradient = oracle.quadratic(REPLICAS, NUMEL)
    real = nn.Parameter(start.reshape(-1, 2).clone())
    whole = nn.Parameter(as_complex(start.clone()))
    runs = [(real, build(kind, [real])), (whole, build(kind, [whole]))]
    for parameter, optimizer in runs:
        for step in range(1, STEPS + 1):
            g = gradient(optimizer.wire.rank, step, torch.zeros(NUMEL)).to(dtype)
            g += 0.5 * real_of(parameter)
            conjugate = as_complex(g).conj().resolve_conj().conj()  # by a flag, as autograd may
            parameter.grad = g.reshape(-1, 2) if parameter is real else conjugate
            optimizer.step()
    with runs[0][1].consensus(), runs[1][1].consensus():
        apart_inside = apart(real, whole)
    saved = copy.deepcopy(runs[1][1].state_dict())
    again = nn.Parameter(whole.detach().clone())
    resumed = build(kind, [again])
    resumed.load_state_dict(saved)
    for _, optimizer in (*runs, (again, resumed)):
        optimizer.finish()
    assert torch.equal(whole, again)
    moved = as_complex(real_of(whole) - start).imag.abs().min()
    return float(moved), apart_inside, apart(real, whole)


def apart(real: Tensor, whole: Tensor) -> float:
    """A complex sum rounds otherwise than two real ones."""
    return float((real_of(real) - real_of(whole)).abs().max())


def real_of(parameter: Tensor) -> Tensor:
    value = parameter.detach()
    return (torch.view_as_real(value) if value.is_complex() else value).reshape(-1)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_complex_parameter_is_two_real_ones(ranks, kind: str, dtype: torch.dtype) -> None:
    for moved, inside, after in ranks(REPLICAS, both_forms, kind, dtype):
        assert moved > 1e-3, "imaginary parts train"
        limit = 1e-5 if dtype == torch.float32 else 1e-12
        assert inside < limit
        assert after < limit


def complex_shards() -> tuple[Tensor, list[Tensor]]:
    """A DTensor of complex numbers, in two shards, between two replicas."""
    tw.init()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    start = as_complex(oracle.start_point(NUMEL)).reshape(10, 2)
    weight = nn.Parameter(distribute_tensor(start.clone(), mesh["shard"], [Shard(0)]))
    inner = torch.optim.SGD([weight], lr=LR)
    optimizer = tw.LocalSGD(inner, every=1, group=mesh["replica"])
    own = distribute_tensor(start * (1 + optimizer.wire.rank), mesh["shard"], [Shard(0)])
    weight.grad = own
    optimizer.step()
    whole: Any = weight.full_tensor()  # type: ignore[attr-defined]
    return start, [whole.detach()]


def test_shards_of_a_complex_parameter(ranks) -> None:
    for start, (got,) in ranks(4, complex_shards):
        torch.testing.assert_close(got, start * (1 - LR * 1.5))


# -- float64 --------------------------------------------------------------------------------------


def doubles(kind: str) -> tuple[Tensor, Tensor, list[torch.dtype]]:
    """float64 weights, and what consensus() makes of them."""
    tw.init()
    weights = nn.Parameter(oracle.start_point(NUMEL).double() + 1e-9)
    optimizer = build(kind, [weights])
    gradient = oracle.quadratic(REPLICAS, NUMEL)
    for step in range(1, STEPS + 1):
        g = gradient(optimizer.wire.rank, step, torch.zeros(NUMEL)).double()
        weights.grad = g + 0.5 * weights.detach()
        optimizer.step()
    own = weights.detach().clone()
    with optimizer.consensus():
        inside = weights.detach().clone()
    held = [f.anchor.dtype for f in getattr(optimizer, "fragments", [])]
    return own, inside, held


@pytest.mark.parametrize("kind", ALL)
def test_float64_is_never_rounded(ranks, kind: str) -> None:
    answers = ranks(REPLICAS, doubles, kind)
    mean = torch.stack([own for own, _, _ in answers]).mean(0)
    for own, inside, held in answers:
        torch.testing.assert_close(inside, mean, rtol=1e-14, atol=1e-15)
        assert not torch.equal(own, own.float().double()), "every digit is kept"
        assert held == [torch.float64] * len(held)
    if kind in CASES:
        gradient = oracle.quadratic(REPLICAS, NUMEL)

        def exact(replica: int, step: int, weights: Tensor) -> Tensor:
            return gradient(replica, step, torch.zeros(NUMEL)).double() + 0.5 * weights

        start = oracle.start_point(NUMEL).double() + 1e-9
        expected, _ = oracle.run(start, exact, REPLICAS, STEPS, LR, CASES[kind][1])
        for (own, _, _), wanted in zip(answers, expected, strict=True):
            torch.testing.assert_close(own, wanted, rtol=1e-12, atol=1e-13)


def mixed() -> tuple[list[tuple[int, torch.dtype]], int, int, Tensor, bool]:
    """A float32 model with one float64 scalar."""
    tw.init()
    sent = []
    for scalar in (torch.float32, torch.float64):
        weights = nn.Parameter(torch.ones(4096))
        temperature = nn.Parameter(torch.ones((), dtype=scalar) / 3)
        optimizer = build("LocalSGD", [weights, temperature], every=4)
        for _ in range(8):
            weights.grad = torch.ones(4096)
            temperature.grad = torch.full((), 1e-9, dtype=scalar)
            optimizer.step()
        sent.append(optimizer.account.bytes)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    held = [(f.numel, f.anchor.dtype) for f in optimizer.fragments]
    optimizer.finish()
    digests = optimizer.wire.gather_bytes(tw.wire.agreement.digest([weights, temperature]))
    return held, *sent, temperature.detach(), len(set(digests)) == 1


def test_one_float64_scalar_does_not_double_what_a_model_sends(ranks) -> None:
    for held, single, double, temperature, equal in ranks(2, mixed):
        assert held == [(4096, torch.float32), (1, torch.float64)]
        assert double < 1.01 * single
        assert equal
        moved = 1 / 3 - float(temperature)
        assert moved == pytest.approx(8 * LR * 1e-9, rel=1e-6)


def coded_doubles(codec: Codec | Feedback) -> Tensor:
    tw.init()
    weights = nn.Parameter(oracle.start_point(600).double())
    optimizer = build("LocalSGD", [weights], codec=codec)
    for step in range(1, 101):
        generator = torch.Generator().manual_seed(10 * step + optimizer.wire.rank)
        noise = 0.05 * torch.randn(600, generator=generator, dtype=torch.float64)
        weights.grad = weights.detach() + noise
        optimizer.step()
    optimizer.finish()
    return weights.detach().clone()


@pytest.mark.parametrize(
    "codec",
    [
        Int8(),
        ErrorFeedback(Int8()),
        ErrorFeedback(Int4()),
        ErrorFeedback(OneBit()),
        ErrorFeedback(TopK(256, 64)),
        ErrorFeedback(TopK(256, 64, value_bits=32, gather=False)),
        tw.codecs.Threshold(0.2),
        Dense(torch.bfloat16),
        Dense(),
    ],
    ids=repr,
)
def test_every_codec_carries_float64(ranks, codec: Codec | Feedback) -> None:
    first, *others = ranks(REPLICAS, coded_doubles, codec)
    assert first.dtype == torch.float64
    assert all(torch.equal(first, other) for other in others)
    assert float(first.norm()) < 0.3 * float(oracle.start_point(600).norm())


def buffers_case() -> tuple[Tensor, Tensor]:
    tw.init()
    weights = nn.Parameter(torch.ones(3))
    single, complex_ = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.complex64)
    inner = torch.optim.SGD([weights], lr=LR)
    optimizer = tw.LocalSGD(inner, every=2, buffers=[single, complex_])
    single += 1 / 3 + optimizer.wire.rank * 1e-12
    complex_ += complex(0, optimizer.wire.rank)
    for _ in range(2):
        weights.grad = torch.zeros(3)
        optimizer.step()
    return single, complex_


def test_buffers_keep_their_digits_and_imaginary_parts(ranks) -> None:
    for single, complex_ in ranks(2, buffers_case):
        wanted = torch.full((2,), 1 / 3 + 5e-13, dtype=torch.float64)
        torch.testing.assert_close(single, wanted, rtol=1e-15, atol=0)
        assert complex_.tolist() == [0.5j, 0.5j]


# -- other memory ---------------------------------------------------------------------------------


def swapped(kind: str, swap: str) -> bool:
    """Parameters get other memory in mid-run: the trajectory is that of a run that kept it."""
    tw.init()
    results = []
    for how in ("none", swap):
        model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 1))
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.linspace(-0.3, 0.3, p.numel()).view(p.shape))
        optimizer = build(kind, list(model.parameters()))
        for step in range(20):
            generator = torch.Generator().manual_seed(10 * step + optimizer.wire.rank)
            model(torch.randn(4, 2, 3, 3, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 6:
                move(model, how)
        optimizer.finish()
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(float(p.norm()) < 10 for p in results[0]), "it must not diverge"
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(*results, strict=True))


def move(model: nn.Module, how: str) -> None:
    if how == "data":
        for p in model.parameters():
            p.data = p.data.clone()
    elif how == "ema":  # an average is put in place, looked at and taken out again
        own = [p.data for p in model.parameters()]
        for p in model.parameters():
            p.data = torch.zeros_like(p.data)
        for p, data in zip(model.parameters(), own, strict=True):
            p.data = data.clone()
    elif how == "to":
        model.to(memory_format=torch.channels_last)
        model.double().float()


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("swap", ["data", "ema", "to"])
def test_parameters_with_other_memory_are_still_exchanged(ranks, kind: str, swap: str) -> None:
    assert ranks(2, swapped, kind, swap) == [True, True]


CHANGES = {
    "half": lambda model: model.half(),
    "shape": lambda model: setattr(model.weight, "data", torch.zeros(1, 2)),
}


@pytest.mark.parametrize("kind", ["CO2", "SparseAverage"])
@pytest.mark.parametrize(("change", "now"), [("half", "float16"), ("shape", r"\(1, 2\)")])
def test_a_changed_parameter_is_refused_by_name(kind: str, change: str, now: str) -> None:
    model = nn.Linear(3, 2)
    optimizer = build(kind, list(model.parameters()))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    CHANGES[change](model)
    wanted = rf"parameter 0 was float32 of shape \(2, 3\) on cpu .* is .*{now}"
    for use in (optimizer.step, optimizer.finish, optimizer.consensus().__enter__):
        with pytest.raises(ValueError, match=wanted):
            use()


def test_a_parameter_on_another_device_is_refused_by_name() -> None:
    parameters = [torch.zeros(2), torch.zeros(3)]
    unchanged = Unchanged("CO2", parameters)
    unchanged.require()
    parameters[1] = parameters[1].to("meta")
    with pytest.raises(ValueError, match=r"CO2: parameter 1 was .* on cpu .* on meta"):
        unchanged.require()

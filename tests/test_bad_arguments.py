"""Every public constructor and function refuses what it cannot honour: in one line that names it.

Generated from signatures. What an annotation does not allow is tried for every parameter, one at a
time beside good values for the others: `GOOD` has those, and whatever is public must be in it.
Which numbers are within bounds no annotation says: those that are have their place in `FINE`, and
must be taken. All of it on one rank, where nothing is sent: what is wrong must be found at once.
"""

import inspect
import math
import re
import types
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.pipeline import Cost, Schedule
from thinwire.wire.codecs import Codec, Int8

HUGE = 2**63
LONGEST = 10**400  # no float

# -- what is public --------------------------------------------------------------------------------


def public() -> dict[str, Callable[..., Any]]:
    """Whatever a user can call, by the name they call it; abstract classes cannot be."""
    found: dict[str, Any] = {}
    for name in tw.__all__:
        thing = getattr(tw, name)
        if isinstance(thing, types.ModuleType):
            found |= {f"{name}.{inner}": getattr(thing, inner) for inner in names_of(thing)}
        else:
            found[name] = thing
    once = {id(thing): name for name, thing in reversed(found.items())}
    return {
        name: thing
        for name, thing in found.items()
        if callable(thing)
        and not inspect.isabstract(thing)
        and once[id(thing)] == name
        and not (isinstance(thing, type) and issubclass(thing, Exception))
    }


def names_of(module: types.ModuleType) -> list[str]:
    own = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__]
    return getattr(module, "__all__", [n for n in own if not n.startswith("_")])


PUBLIC = public()
SHARED = ("codec", "buffers", "offload", "group")  # what presets hand on to LocalUpdates


def parameters(name: str) -> dict[str, inspect.Parameter]:
    own = dict(inspect.signature(PUBLIC[name]).parameters)
    if own.pop("shared", None) is not None:
        handed_on = inspect.signature(tw.LocalUpdates).parameters
        own |= {key: handed_on[key] for key in SHARED if key not in own}
    return {key: p for key, p in own.items() if not key.startswith("_")}


# -- good values -----------------------------------------------------------------------------------


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def weights() -> dict[str, Any]:
    return {"params": list(model().parameters()), "lr": 0.1}


def inner() -> dict[str, Any]:
    return {"inner": torch.optim.SGD(model().parameters(), lr=0.1)}


def trained(**more: Any) -> dict[str, Any]:
    net = model()
    return {"module": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1)} | more


def mse(output: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, y)


def simulated() -> dict[str, Any]:
    nets = [model(), nn.Linear(2, 2)]
    steppers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    return {"modules": nets, "optimizers": steppers, "loss": mse}


def adversary() -> dict[str, Any]:
    net = model()
    return {"model": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1), "epsilon": 0.1}


def cost() -> Cost:
    return Cost(1.0, 4, 4, 4)


def parts() -> list[tuple[str, nn.Module]]:
    return [("a", nn.Linear(4, 4)), ("b", nn.Linear(4, 4))]


def four() -> dict[str, Any]:
    return {"size": 4}


GOOD: dict[str, Callable[[], dict[str, Any]]] = {
    "CO2": inner,
    "DSGD": weights,
    "Account": dict,
    "AsyncPipeline": lambda: trained(loss=mse),
    "ConcurrentAdversarial": adversary,
    "Cut": dict,
    "DecentLaM": weights,
    "DesLoc": inner,
    "DiLoCo": inner,
    "DmSGD": weights,
    "Eager": inner,
    "Flight": lambda: {"buffer": torch.zeros(3), "account": tw.Account()},
    "GradientAverage": inner,
    "Lamb": weights,
    "Lars": weights,
    "LocalSGD": inner,
    "LocalUpdates": lambda: inner() | {"every": 4},
    "AsyncNAdam": lambda: weights() | {"updates": 10},
    "NoiseScale": lambda: {"params": list(model().parameters()), "batch": 8},
    "OneBitAdam": weights,
    "OneBitLamb": weights,
    "Outer": dict,
    "Overlapped": inner,
    "SlowMo": inner,
    "SparseAverage": inner,
    "SparseLoCo": inner,
    "StreamingDiLoCo": inner,
    "Wire": dict,
    "WireOptimizer": lambda: {"params": [torch.zeros(3)], "defaults": {}, "name": "mine"},
    "World": lambda: {
        "rank": 0,
        "size": 2,
        "device": torch.device("cpu"),
        "timeout": 60.0,
        "heartbeat": None,
    },
    "ZeroOneAdam": weights,
    "codecs.Dense": dict,
    "codecs.ErrorFeedback": lambda: {"codec": Int8()},
    "codecs.Int4": dict,
    "codecs.Int8": dict,
    "codecs.OneBit": dict,
    "codecs.Threshold": dict,
    "codecs.TopK": dict,
    "codecs.parse": lambda: {"name": "int8"},
    "dual_batch_norm": lambda: {"model": model()},
    "hooks.GradientHook": lambda: {
        "module": DistributedDataParallel(model()),
        "codec": Int8(),
        "dense_steps": 3,
    },
    "hooks.one_bit": lambda: {"module": DistributedDataParallel(model())},
    "init": dict,
    "shutdown": dict,
    "pipeline.Cost": lambda: {"seconds": 1.0, "weights": 4, "activations": 4, "input": 4},
    "pipeline.Record": lambda: {"update": 3, "loss": torch.zeros(()), "norm": 1.0},
    "pipeline.Schedule": lambda: {"name": "1f1b", "stage": 1, "stages": 3},
    "pipeline.SimulatedPipeline": simulated,
    "pipeline.Stage": lambda: {"parts": parts()},
    "pipeline.StageSettings": lambda: {"lr_scale": 1.0, "momentum": 0.9},
    "pipeline.TorchPipeline": lambda: trained(loss=mse),
    "pipeline.balance": lambda: {"costs": [cost(), cost()], "stages": 2},
    "pipeline.lead_for": lambda: {"compute": 1.0, "transfer": 0.5},
    "pipeline.measure": lambda: {"parts": parts(), "sample": torch.zeros(2, 4), "repeats": 1},
    "pipeline.micro_batches": lambda: {
        "batches": [(torch.zeros(4, 2), torch.zeros(4, 2))],
        "count": 2,
    },
    "pipeline.parts_of": lambda: {"model": model()},
    "pipeline.split": lambda: {"model": model(), "stages": 2},
    "pipeline.stage_memory": lambda: {"schedule": Schedule("1f1b", 0, 2), "cost": cost()},
    "pipeline.stage_settings": lambda: {"schedule": Schedule("1f1b", 0, 2), "update": 3},
    "topology.Topology": lambda: {
        "name": "mine",
        "matrix": torch.full((2, 2), 0.5, dtype=torch.float64),
    },
    "topology.complete": four,
    "topology.exponential": four,
    "topology.from_edges": lambda: {"size": 3, "edges": [(0, 1), (1, 2)]},
    "topology.from_matrix": lambda: {"matrix": [[0.5, 0.5], [0.5, 0.5]]},
    "topology.parse": lambda: {"text": "ring", "size": 4},
    "topology.ring": four,
    "topology.torus": four,
}

# -- bounds that no annotation tells ---------------------------------------------------------------

SOME, ANY = (0, HUGE), (-1, 0, HUGE)  # numbers >= 0, and whole ones of any sign and size
FINE: dict[str, tuple[float, ...]] = {
    # of a parameter wherever it is
    "lr": SOME,
    "eps": SOME,
    "weight_decay": SOME,
    "momentum": (0,),
    "outer_lr": (HUGE,),
    "outer_momentum": (0,),
    "bucket_mb": (HUGE,),
    "floor": (0,),
    "delay": (0,),
    "own_weight": (0,),
    "first_moments": (0,),
    "second_moments": (0,),
    "merge": (0,),
    "look_ahead": SOME,
    "lead": (0,),
    "StreamingDiLoCo.delay": (),  # has a merge, which needs a delay
    "seed": ANY,
    # of one owner's
    "CO2.penalty": (HUGE,),
    "Outer.penalty": (HUGE,),
    "Outer.lr": (HUGE,),
    "CO2.clip": (HUGE,),
    "Outer.clip": (HUGE,),
    "OneBitAdam.clip": (HUGE,),
    "OneBitLamb.clip": (HUGE,),
    "ZeroOneAdam.clip": (HUGE,),
    "DSGD.clip": (HUGE,),
    "DmSGD.clip": (HUGE,),
    "DecentLaM.clip": (HUGE,),
    "AsyncPipeline.clip": SOME,
    "pipeline.SimulatedPipeline.clip": SOME,
    "pipeline.TorchPipeline.clip": SOME,
    "ConcurrentAdversarial.epsilon": (HUGE,),
    "ConcurrentAdversarial.weight": SOME,
    "Lars.trust": (HUGE,),
    "NoiseScale.batch": (HUGE,),
    "NoiseScale.decay": (0,),
    "OneBitLamb.coefficient_beta": (0,),
    "OneBitLamb.factor_threshold": (0,),
    "codecs.ErrorFeedback.decay": (0,),
    "Account.bytes": (0,),
    "Account.transfers": (0,),
    "Account.exposed": SOME,
    "Account.hidden": SOME,
    "Account.lag": (0,),
    "Account.skipped": (0,),
    "Account.steps": (0,),
    "World.rank": (0,),
    "pipeline.Cost.seconds": SOME,
    "pipeline.Cost.weights": (0,),
    "pipeline.Cost.activations": (0,),
    "pipeline.Cost.input": (0,),
    "pipeline.Record.update": (0,),
    "pipeline.Schedule.stage": (0,),
    "pipeline.balance.memory": (HUGE,),
    "pipeline.StageSettings.lr_scale": (HUGE,),
    "pipeline.lead_for.compute": (HUGE,),
    "pipeline.lead_for.transfer": SOME,
    "pipeline.stage_settings.update": (0,),
}

# Texts, lists and objects of the right type and the wrong content, by parameter.
PAIRS: list[Any] = [(0.9,), (0.9, 0.99, 0.999), ("a", "b"), (math.nan, 0.9), (True, False), (1j, 1)]
EXTRA: dict[str, Callable[[], list[Any]]] = {
    "params": lambda: [
        [],
        iter([]),
        [1.0, 2.0],
        ["a"],
        [None],
        {torch.zeros(2)},
        [{"lr": 0.1}],
        [{"params": None}],
        [{"params": [1.0]}],
        [{"params": []}],
        [("name", 1.0)],
        model().state_dict(),
    ],
    "buffers": lambda: [[1.0], [None], ["a"], nn.BatchNorm1d(3).named_buffers(), {"a": 1}],
    "betas": lambda: [*PAIRS, (0.9, 1.0), (-0.1, 0.9)],
    "coefficient": lambda: [*PAIRS, (2.0, 1.0), (-1.0, 1.0)],
    "phi": lambda: [*PAIRS, (2.0, 1.0)],
    "factor": lambda: [*PAIRS, (2.0, 1.0)],
    "bounds": lambda: [*PAIRS, (1.0, 0.0), (0.5, 0.5)],
    "ema": lambda: [*PAIRS, (0.0, 0.5), (0.5, 1.5)],
    "topology": lambda: ["star", "", "edges:0-9", "torus:x", tw.topology.ring(3)],
    "backend": lambda: ["pigeon", "", "cpu:pigeon"],
    "fragments": lambda: [[], [[]], [[1.0]], [torch.zeros(3)], ["a"], [None]],
    "autocast": lambda: [torch.int32, torch.float32],
    "dtype": lambda: [torch.int32, torch.bool],
    "modules": lambda: [[], [1.0], [None], [model()], [model, model]],
    "optimizers": lambda: [[], [1.0], [None], simulated()["optimizers"]],
    "optimizer": lambda: [torch.optim.SGD],
    "inner": lambda: [torch.optim.SGD, model().parameters()],
    "costs": lambda: [[], [1.0], [None], [cost(), None]],
    "parts": lambda: [[], [1.0], [None], [model()], [("a", 1.0)], [(1, model())], ["ab"]],
    "at": lambda: [[], [0], [3], [1.5], [True], [1, 2], ["a"]],
    "sizes": lambda: [[1.5], [-1], [True], ["a"], [None]],
    "edges": lambda: [[1.5], [(0,)], [(0, 9)], [(0, 1.5)], [("0", "1")], [(True, False)], ["01"]],
    "matrix": lambda: [[], [1.0], [["a"]], [[1.0], [1.0, 2.0]], torch.eye(2, 3), [[math.nan]]],
    "batches": lambda: [[1.5], [(torch.zeros(2),)], [(torch.zeros(3), torch.zeros(3))], [None]],
    "value_bits": lambda: [3, 5, 64],
    "block": lambda: [4, 12],
    "chunk": lambda: [8, 300],
    "k": lambda: [5000],
    "codec": lambda: [Int8, "int8", "int8+ef", Codec, tw.codecs.ErrorFeedback],
    "gradient_codec": lambda: [Int8, "int8", tw.codecs.ErrorFeedback(Int8())],
    "dense": lambda: [Int8, "bf16", tw.codecs.ErrorFeedback(Int8())],
    "group": lambda: [dist.GroupMember.NON_GROUP_MEMBER, [0, 1], (0,)],
    "inside": lambda: [dist.GroupMember.NON_GROUP_MEMBER, [0, 1]],
    "rows": lambda: [3, 8],
}
MODELS: dict[str, Callable[[], list[Any]]] = {
    "pipeline.split.model": lambda: [[], [1.0], [("a", 1.0)], nn.Linear(2, 2), "ab"],
    "pipeline.parts_of.model": lambda: [[], [1.0], [("a", 1.0)], nn.Linear(2, 2), "ab"],
    "dual_batch_norm.model": lambda: [nn.BatchNorm1d(3), nn.Sequential(nn.SyncBatchNorm(3))],
    "ConcurrentAdversarial.model": lambda: [nn.ReLU(), nn.Sequential(nn.BatchNorm1d(3))],
    "codecs.parse.name": lambda: ["int3", "", "int8+fe", "threshold:2", "threshold:x"],
    "topology.parse.text": lambda: ["star", "", "torus:x", "edges:0-9"],
    "codecs.ErrorFeedback.codec": lambda: [None, tw.codecs.Threshold()],
}

# Errors that call a parameter or its owner by the word the user of a command line knows it by.
ALIASES = {
    "codecs.parse": "(codecs.parse|codec)",
    "codecs.parse.name": "(name|codec)",
    "topology.parse": "(topology|from_edges)",
    "topology.parse.text": "(text|topology|edges)",
}

# -- what annotations allow ------------------------------------------------------------------------


def leaves(annotation: Any, owner: Any) -> list[Any]:
    """The members of a union, aliases resolved."""
    if isinstance(annotation, str):
        module = inspect.getmodule(owner)
        annotation = eval(annotation, {**vars(typing), **vars(module)})  # our own source
    if isinstance(annotation, typing.TypeVar):
        annotation = annotation.__bound__
    if get_origin(annotation) in (Union, types.UnionType):
        return [leaf for member in get_args(annotation) for leaf in leaves(member, owner)]
    return [annotation]


@dataclass(frozen=True)
class Specimen:
    """A value, and which leaves of an annotation it suits."""

    value: Any
    suits: Callable[[Any], bool] = lambda leaf: False


def kind(*kinds: Any) -> Callable[[Any], bool]:
    return lambda leaf: leaf in kinds or get_origin(leaf) in kinds


def literal(value: Any) -> Callable[[Any], bool]:
    return lambda leaf: get_origin(leaf) is Literal and value in get_args(leaf)


def of_class(value: Any) -> Callable[[Any], bool]:
    return lambda leaf: isinstance(leaf, type) and isinstance(value, leaf)


@cache
def specimens() -> list[Specimen]:
    net = model()  # may be called, as nn.CrossEntropyLoss() is
    objects = [Int8(), torch.zeros(3), torch.float32, torch.device("cpu"), tw.Account()]
    objects += [cost(), tw.Outer(), torch.optim.SGD(model().parameters(), lr=0.1)]
    return [
        Specimen(None, kind(type(None))),
        Specimen(True, kind(bool)),
        Specimen(1, kind(int, float)),
        Specimen(0.5, kind(float)),
        *(Specimen(value) for value in (math.nan, math.inf, -math.inf, 1j, LONGEST, b"b")),
        *(Specimen(value) for value in (object(), Int8, np.array([1.0, 2.0]))),
        Specimen({"a": 1}, kind(dict, Mapping)),
        Specimen("x", kind(str)),
        Specimen("1", kind(str)),
        Specimen("int8", kind(str)),
        Specimen("auto", lambda leaf: leaf is str or literal("auto")(leaf)),
        Specimen(lambda *_: None, kind(Callable)),
        Specimen(net, lambda leaf: kind(Callable)(leaf) or of_class(net)(leaf)),
        *(Specimen(value, of_class(value)) for value in objects),
    ]


def bad_values(name: str, key: str, annotation: Any) -> list[Any]:
    allowed = leaves(annotation, PUBLIC[name])
    if Any in allowed:  # what anybody's update returns: Record.norm
        return []
    wrong = [s.value for s in specimens() if not any(s.suits(leaf) for leaf in allowed)]
    if int in allowed or float in allowed:
        wrong += [v for v in ANY if v not in fine(name, key)]
    if key == "seed":
        wrong = [v for v in wrong if v is not LONGEST]
    return wrong + EXTRA.get(key, list)() + MODELS.get(f"{name}.{key}", list)()


def fine(name: str, key: str) -> tuple[float, ...]:
    return FINE.get(f"{name}.{key}", FINE.get(key, ()))


# -- the tests -------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """One rank with a process group, as DDP and torch's pipelines need it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    tw.shutdown()


def complaint(name: str, good: Mapping[str, Any], key: str, value: Any) -> str | None:
    """What is wrong with how the value was met; None if it was refused as it should be."""
    what = f"{name}({key}={value!r:.60})"
    try:
        call(name, {**good, key: value})
    except (ValueError, TypeError) as error:
        text = str(error)
        named = ALIASES.get(f"{name}.{key}", key), ALIASES.get(name, name.rpartition(".")[2])
        if "\n" in text or not all(
            re.search(rf"(?<![A-Za-z0-9]){n}(?![A-Za-z0-9])", text) for n in named
        ):
            return f"{what}: {type(error).__name__}: {text}"
    except Exception as error:
        return f"{what}: {type(error).__name__}: {error}"
    else:
        return f"{what}: accepted"
    return None


def call(name: str, given: Mapping[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = PUBLIC[name](**given)
        if isinstance(result, Iterator):
            list(result)


def test_whatever_is_public_has_good_values() -> None:
    assert sorted(GOOD) == sorted(PUBLIC), "a new name needs good values; a gone one none"
    known = {f"{name}.{key}" for name in PUBLIC for key in parameters(name)}
    of_one = {key for table in (FINE, MODELS, ALIASES) for key in table if "." in key}
    assert of_one - set(GOOD) <= known, "bounds of a parameter that is gone"
    wherever = {*EXTRA, *(key for key in FINE if "." not in key)}
    assert wherever <= {path.rpartition(".")[2] for path in known}
    for name, values in GOOD.items():
        missing = values().keys() - parameters(name).keys()
        assert not missing, f"{name} has no {missing}"


CALLED = [name for name in GOOD if name != "shutdown"]


@pytest.mark.parametrize("name", CALLED)
def test_good_values_and_those_within_bounds_are_taken(name: str) -> None:
    call(name, GOOD[name]())
    for key in parameters(name):
        for value in fine(name, key):
            call(name, GOOD[name]() | {key: value})


@pytest.mark.parametrize("name", CALLED)
def test_bad_values_are_refused_in_a_line_that_names_them(name: str) -> None:
    good = GOOD[name]()  # what is refused leaves them as they are
    found = [
        said
        for key, parameter in parameters(name).items()
        for value in bad_values(name, key, parameter.annotation)
        if (said := complaint(name, good, key, value)) is not None
    ]
    assert not found, f"{len(found)} of {name}:\n" + "\n".join(found)


@pytest.mark.parametrize("name", CALLED)
def test_scalars_of_numpy_are_taken_as_numbers(name: str) -> None:
    good = GOOD[name]()
    for key, parameter in parameters(name).items():
        value = good.get(key, parameter.default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        allowed = leaves(parameter.annotation, PUBLIC[name])
        if Any not in allowed:
            scalar = np.int64(value) if isinstance(value, int) else np.float32(value)
            call(name, GOOD[name]() | {key: scalar})


@pytest.mark.parametrize(
    "name", [name for name in CALLED if {"params", "lr"} <= {*parameters(name)}]
)
def test_a_tensor_of_one_value_is_a_learning_rate_as_in_torch(name: str) -> None:
    lr = torch.tensor(0.1)
    made = PUBLIC[name](**GOOD[name]() | {"lr": lr})
    assert made.param_groups[0]["lr"] is lr
    for bad in (torch.tensor(-0.1), torch.tensor(math.nan), torch.tensor(1j)):
        assert complaint(name, GOOD[name](), "lr", bad) is None

"""What the golden file holds: every method with the settings that change its arithmetic.

A case is trained for some tens of steps on real ranks and ends in a digest: of the weights, and of
the tensors in the optimizer's state_dict, by content and not by name, so that a state may be laid
out anew without changing it. `resume` trains the same case with a save and a load in its middle:
both must have the digest of the run without.
"""

import copy
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import thinwire as tw
from thinwire.wire.codecs import Dense, ErrorFeedback, Int4, Int8, OneBit, Threshold, TopK

STEPS = 26


@dataclass(frozen=True)
class Case:
    """`build` makes the optimizer from the parameters and, where it needs one, the mesh."""

    build: Callable[..., Any]
    ranks: int = 2
    mesh: str = ""
    """shard: FSDP2 over pairs of ranks. node: pairs of ranks are the nodes."""


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.05)


def wrapping(method: str, **settings: Any) -> Callable[..., Any]:
    """A method around AdamW; codecs are made anew for every optimizer."""

    def build(parameters: Any, group: Any = None) -> Any:
        return getattr(tw, method)(adamw(parameters), group=group, **copy.deepcopy(settings))

    return build


def owning(method: str, **settings: Any) -> Callable[..., Any]:
    def build(parameters: Any, group: Any = None, inside: Any = None) -> Any:
        more = {} if inside is None else {"inside": inside}
        return getattr(tw, method)(parameters, lr=1e-2, group=group, **more, **settings)

    return build


FROZEN: dict[str, Any] = {"freeze_at": 8, "weight_decay": 0.05, "bucket_mb": 0.0005}
SHORT: dict[str, Any] = FROZEN | {"double_after": 2, "local_double_after": 4, "longest": 4}
PUBLISHED: dict[str, Any] = {"bias_correction": False, "floor": 0.0}

CASES: dict[str, Case] = {
    "local-sgd": Case(wrapping("LocalSGD", every=4)),
    "slowmo": Case(wrapping("SlowMo", every=4), 3),
    "diloco": Case(wrapping("DiLoCo", every=4)),
    "diloco int8": Case(wrapping("DiLoCo", every=4, codec=Int8())),
    "streaming": Case(wrapping("StreamingDiLoCo", every=6, fragments=3, delay=1)),
    "co2": Case(wrapping("CO2", every=4), 3),
    "co2 bf16": Case(wrapping("CO2", every=4, codec=Dense(torch.bfloat16))),
    "co2 int4+ef": Case(wrapping("CO2", every=4, codec=ErrorFeedback(Int4())), 3),
    "overlapped": Case(wrapping("Overlapped", every=4), 3),
    "overlapped int8": Case(wrapping("Overlapped", every=4, codec=Int8())),
    "overlapped int4+ef": Case(wrapping("Overlapped", every=4, codec=ErrorFeedback(Int4())), 3),
    "overlapped offload": Case(wrapping("Overlapped", every=4, offload=True)),
    "overlapped fsdp": Case(wrapping("Overlapped", every=4), 4, "shard"),
    "co2 fsdp": Case(wrapping("CO2", every=4), 4, "shard"),
    "eager": Case(wrapping("Eager", every=4), 3),
    "sparseloco": Case(wrapping("SparseLoCo", every=4), 3),
    "average": Case(wrapping("GradientAverage", bucket_mb=0.0005), 3),
    "average late": Case(wrapping("GradientAverage", overlap=False), 3),
    "average bf16": Case(wrapping("GradientAverage", codec=Dense(torch.bfloat16))),
    "average int8": Case(wrapping("GradientAverage", codec=Int8()), 3),
    "average int4+ef": Case(wrapping("GradientAverage", codec=ErrorFeedback(Int4())), 3),
    "average onebit+ef": Case(wrapping("GradientAverage", codec=ErrorFeedback(OneBit())), 3),
    "average topk+ef": Case(wrapping("GradientAverage", codec=ErrorFeedback(TopK())), 3),
    "average threshold": Case(wrapping("GradientAverage", codec=Threshold(0.1)), 3),
    "average threshold, momentum": Case(
        wrapping("GradientAverage", codec=Threshold(0.1, momentum=0.9))
    ),
    "average fsdp": Case(wrapping("GradientAverage"), 4, "shard"),
    "one-bit-adam": Case(owning("OneBitAdam", **FROZEN), 3),
    "one-bit-adam clip": Case(owning("OneBitAdam", **FROZEN, clip=0.3), 3),
    "one-bit-adam late": Case(owning("OneBitAdam", **FROZEN, delayed_step=True), 3),
    "one-bit-adam late, clip": Case(owning("OneBitAdam", **FROZEN, delayed_step=True, clip=0.3)),
    "one-bit-adam shard_state": Case(owning("OneBitAdam", **FROZEN, shard_state=True), 3),
    "one-bit-adam inside": Case(owning("OneBitAdam", **FROZEN), 4, "node"),
    "one-bit-adam inside, clip": Case(owning("OneBitAdam", **FROZEN, clip=0.3), 4, "node"),
    "one-bit-adam inside, late": Case(owning("OneBitAdam", **FROZEN, delayed_step=True), 4, "node"),
    "one-bit-adam fsdp": Case(owning("OneBitAdam", **FROZEN, clip=0.3), 4, "shard"),
    "one-bit-adam int8 warm-up": Case(owning("OneBitAdam", **FROZEN, dense=Int8())),
    "one-bit-adam published": Case(
        owning("OneBitAdam", **FROZEN, **PUBLISHED, whiten=False, forget=False)
    ),
    "one-bit-lamb": Case(owning("OneBitLamb", **FROZEN), 3),
    "one-bit-lamb clip": Case(owning("OneBitLamb", **FROZEN, clip=0.3)),
    "one-bit-lamb late": Case(owning("OneBitLamb", **FROZEN, delayed_step=True), 3),
    "one-bit-lamb shard_state": Case(owning("OneBitLamb", **FROZEN, shard_state=True), 3),
    "one-bit-lamb inside": Case(owning("OneBitLamb", **FROZEN), 4, "node"),
    "one-bit-lamb fsdp": Case(owning("OneBitLamb", **FROZEN), 4, "shard"),
    "one-bit-lamb published": Case(owning("OneBitLamb", **FROZEN, **PUBLISHED, debias=False)),
    "zero-one-adam": Case(owning("ZeroOneAdam", **SHORT), 3),
    "zero-one-adam clip": Case(owning("ZeroOneAdam", **SHORT, clip=0.3)),
    "zero-one-adam fsdp": Case(owning("ZeroOneAdam", **SHORT), 4, "shard"),
    "dsgd": Case(owning("DSGD", weight_decay=0.05), 4),
    "dmsgd": Case(owning("DmSGD", weight_decay=0.05), 4),
    "decentlam": Case(owning("DecentLaM", weight_decay=0.05), 4),
    "decentlam int8": Case(owning("DecentLaM", codec=Int8(), topology="exponential"), 4),
    "decentlam clip": Case(owning("DecentLaM", clip=0.3, topology="complete"), 3),
    "sparse-average": Case(wrapping("SparseAverage", fraction=0.1, delay=3), 3),
    "sparse-average delta": Case(
        wrapping("SparseAverage", fraction=0.1, delay=3, correction="delta")
    ),
    "sparse-average overwrite": Case(
        wrapping("SparseAverage", fraction=0.1, delay=3, correction="overwrite")
    ),
    "sparse-average fsdp": Case(wrapping("SparseAverage", fraction=0.1, delay=3), 4, "shard"),
}
RESUMED = [
    "diloco",
    "streaming",
    "co2 int4+ef",
    "overlapped",
    "overlapped int4+ef",
    "sparseloco",
    "average int4+ef",
    "average threshold",
    "one-bit-adam",
    "one-bit-adam late",
    "one-bit-adam shard_state",
    "one-bit-adam inside",
    "one-bit-lamb",
    "one-bit-lamb late",
    "zero-one-adam",
    "decentlam int8",
    "sparse-average",
]


class Net(nn.Module):
    """Layers of several sizes, a norm, and a tied pair."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(6, 24), nn.LayerNorm(24)
        self.second, self.last = nn.Linear(24, 24), nn.Linear(24, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(torch.tanh(self.first(x)))
        out: Tensor = self.last(h + torch.tanh(self.second(h)))
        return out


def run(name: str, resume_at: int = 0) -> str:
    """On each rank: the digest of this rank's weights and state; with a save and a load before step
    `resume_at`, where that is not 0."""
    case = CASES[name]
    world = tw.init()
    net, optimizer = made(case)
    for step in range(STEPS):
        if resume_at and step == resume_at:
            weights = {k: v.clone() for k, v in net.state_dict().items()}
            saved = copy.deepcopy(optimizer.state_dict())
            net, optimizer = made(case)
            net.load_state_dict(weights)
            optimizer.load_state_dict(saved)
        generator = torch.Generator().manual_seed(1000 * step + world.rank)
        x = torch.randn(8, 6, generator=generator)
        (net(x) - x[:, :2].cumsum(1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = hashed(optimizer.state_dict())
    optimizer.finish()
    return f"{hashed([p.detach() for p in net.parameters()])} {state}"


def made(case: Case) -> tuple[nn.Module, Any]:
    net = Net()
    if not case.mesh:
        return net, case.build(net.parameters())
    names = {"shard": ("replica", "shard"), "node": ("node", "rank")}[case.mesh]
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=names)
    if case.mesh == "node":
        return net, case.build(net.parameters(), group=mesh["node"], inside=mesh["rank"])
    for layer in (net.first, net.second, net.last):
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(net, mesh=mesh["shard"])
    return net, case.build(net.parameters(), group=mesh["replica"])


def hashed(tree: Any) -> str:
    """Of all tensors of more than one value, whatever they are called and in whatever order."""
    digests = sorted(
        hashlib.sha256(f"{t.dtype} {t.numel()}".encode() + raw(t)).hexdigest()
        for t in tensors(tree)
        if t.numel() > 1
    )
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:16]


def tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree.to_local() if hasattr(tree, "to_local") else tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from tensors(value)


def raw(tensor: Tensor) -> bytes:
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""

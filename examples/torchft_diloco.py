"""torchft's LocalSGD and DiLoCo: their constructor arguments translated to thinwire.

    torchrun --nproc-per-node 2 examples/torchft_diloco.py

`local_sgd` and `diloco` take the arguments of torchft's classes, without the manager, and return
the optimizer that does the same here. They refuse what has no counterpart. torchft wraps the loop
in a context manager; here you call the returned optimizer instead of the inner one.

What you give up is torchft's fault tolerance: a run of thinwire ends when a rank is lost and is
resumed from a checkpoint. There is no lighthouse and no manager to start.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import thinwire as tw

CPU = torch.device("cpu")


def local_sgd(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    sync_every: int,
) -> tw.LocalUpdates:
    """torchft.local_sgd.LocalSGD(manager, model, optimizer, sync_every)."""
    return tw.LocalSGD(optimizer, every=sync_every, buffers=model.buffers())


def diloco(
    model_fragments: Sequence[nn.Module],
    inner_optimizer: torch.optim.Optimizer,
    outer_optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    sync_every: int,
    *,
    backup_device: torch.device | None = None,
    pin_memory: bool = True,
    use_bucketization: bool = False,
    bucket_cap_mb: int | None = None,
    should_quantize: bool = False,
    fragment_sync_delay: int = 0,
    fragment_update_alpha: float = 0.0,
) -> tw.LocalUpdates:
    """torchft.local_sgd.DiLoCo(manager, model_fragments, ...).

    sync_every             every; a multiple of the number of fragments in both
    outer_optimizer        outer: lr, momentum and nesterov of a torch.optim.SGD
    fragment_sync_delay    delay. torchft sends a fragment so many steps before the end of its turn,
                           thinwire at its end: means arrive that much later in the round
    fragment_update_alpha  merge: the weight of the local value when the mean arrives
    should_quantize        codec=Int8(): 8 bits with a scale for each block of 256 values
    backup_device          offload, if it is a CPU
    pin_memory, use_bucketization, bucket_cap_mb
                           not needed: outer state is pinned, a fragment travels in one piece
    """
    if fragment_update_alpha and not fragment_sync_delay:
        raise ValueError(
            "fragment_update_alpha needs a fragment_sync_delay: without a delay all of a round's "
            "progress is in the mean, and thinwire merges nothing"
        )
    if fragment_update_alpha == 1:
        raise ValueError("fragment_update_alpha=1 keeps the local weights: nothing would be learnt")
    fragments = [list(fragment.parameters()) for fragment in model_fragments]
    return tw.LocalUpdates(
        inner_optimizer,
        every=sync_every,
        fragments=fragments,
        delay=fragment_sync_delay,
        merge=fragment_update_alpha,
        outer=outer_settings(outer_optimizer),
        codec=tw.codecs.Int8() if should_quantize else None,
        buffers=[b for fragment in model_fragments for b in fragment.buffers()],
        offload=(backup_device or CPU).type == "cpu",
    )


def outer_settings(
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
) -> tw.Outer:
    """What one SGD, or one for each fragment, is set to; all fragments share it here."""
    listed = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    found: list[dict[str, Any]] = []
    for optimizer in listed:
        if type(optimizer) is not torch.optim.SGD:
            raise ValueError(f"outer_optimizer: {type(optimizer).__name__} is not torch.optim.SGD")
        for group in optimizer.param_groups:
            for key in ("dampening", "weight_decay", "maximize"):
                if group[key]:
                    raise ValueError(f"outer_optimizer: {key}={group[key]} has no counterpart")
            found.append({key: group[key] for key in ("lr", "momentum", "nesterov")})
    if any(settings != found[0] for settings in found):
        raise ValueError("outer_optimizer: fragments have different settings; thinwire has one set")
    return tw.Outer(**found[0])


# -- a program -------------------------------------------------------------------------------------


def batches(seed: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.randn(32, 64, generator=generator)
        yield x, x[:, :8].sin().sum(1, keepdim=True)


def main() -> float:
    world = tw.init()
    torch.manual_seed(0)  # the same weights on every replica
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    # was: with DiLoCo(manager, [model[0], model[2]], inner, outer, sync_every=20, ...):
    optimizer = diloco(
        [model[0], model[2]],
        inner,
        outer,
        sync_every=20,
        fragment_sync_delay=2,
        fragment_update_alpha=0.5,
        should_quantize=True,
    )
    for x, y in batches(seed=world.rank, count=200):
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()  # was: inner.step()
        optimizer.zero_grad()
    optimizer.finish()
    with torch.no_grad():
        losses = [(model(x) - y).square().mean() for x, y in batches(seed=-1, count=20)]
    if world.rank == 0:
        print(f"held-out loss {torch.stack(losses).mean():.3f}\n{optimizer.account}")
    tw.shutdown()
    return float(torch.stack(losses).mean())


if __name__ == "__main__":
    main()

"""The README's ten lines as a program.

torchrun --nproc-per-node 2 examples/ten_lines.py
thinwire lab --hosts 2 --rate 10mbit -- python examples/ten_lines.py
python examples/ten_lines.py                                            a world of one
"""

from collections.abc import Iterator

import torch
from torch import Tensor

import thinwire as tw


def batches(seed: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """A regression with a planted rule; another seed, other data."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.randn(32, 64, generator=generator)
        yield x, x[:, :8].sin().sum(1, keepdim=True)


def main() -> None:
    world = tw.init()
    torch.manual_seed(0)  # the same weights on every replica
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    optimizer = tw.Overlapped(torch.optim.AdamW(model.parameters(), lr=1e-3), every=24)
    for x, y in batches(seed=world.rank, count=600):
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.finish()
    with torch.no_grad(), optimizer.consensus():
        held_out = [(model(x) - y).square().mean() for x, y in batches(seed=-1, count=20)]
    if world.rank == 0:
        print(f"{world.size} replicas, held-out loss {torch.stack(held_out).mean():.3f}")
        print(optimizer.account)
    tw.shutdown()


if __name__ == "__main__":
    main()

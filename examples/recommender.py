"""A recommender whose embedding tables are spread over the workers, with and without thresholds.

    torchrun --nproc-per-node 2 examples/recommender.py
    thinwire lab --hosts 4 --rate 100mbit -- python examples/recommender.py     # in the lab
    python examples/recommender.py                                              # alone: one worker

Model parallel where it is large, data parallel where it is small: every worker holds a share of the
tables and looks up rows for everybody's samples; the rows cross a `tw.Cut` to whoever has the
sample, and their gradients come back. The dense part is on all workers, and its gradients are
averaged by `tw.GradientAverage`.

The clicks are made up by a planted rule, so that it is known how well they can be predicted. Prints
the AUC on samples never trained on, and the bytes that crossed the cut, first with everything sent
(density 1, 32 bits), then with DCT. Last line, on worker 0: one JSON object.
"""

import argparse
import json

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import thinwire as tw

TABLES, ROWS, WIDTH, NUMBERS = 12, 1000, 32, 8  # categorical features of 1000 values, dense ones
TASTES = 4  # dimensions of the planted rule


class Clicks:
    """Samples of a planted rule: who likes what depends on pairs of features."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(17)
        self.tastes = torch.randn(TABLES, ROWS, TASTES, generator=generator)
        self.slope = torch.randn(NUMBERS, generator=generator)
        # How often each row occurs: a few often, most seldom.
        self.popularity = 1.0 / torch.arange(1, ROWS + 1).float()

    def draw(self, count: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(ids (B, tables), numbers (B, 8), clicks (B,), the rule's own score (B,))."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.multinomial(
            self.popularity, count * TABLES, replacement=True, generator=generator
        ).view(count, TABLES)
        numbers = torch.randn(count, NUMBERS, generator=generator)
        tastes = self.tastes[torch.arange(TABLES), ids]  # (B, tables, tastes)
        pairs = (tastes[:, 0::2] * tastes[:, 1::2]).sum((1, 2)) / (TABLES * TASTES / 2) ** 0.5
        score = 2.0 * pairs + numbers @ self.slope / NUMBERS**0.5 - 1.0
        clicks = torch.rand(count, generator=generator) < score.sigmoid()
        return ids, numbers, clicks.float(), score


class Recommender(nn.Module):
    """Tables this worker holds; the cut; and the dense part, the same on all workers."""

    def __init__(self, cut: tw.Cut) -> None:
        super().__init__()
        self.cut = cut
        size, rank = cut.wire.size, cut.wire.rank
        if TABLES % size:
            raise SystemExit(f"{TABLES} tables do not spread over {size} workers evenly")
        self.share = TABLES // size  # tables of a worker; those of worker i are i*share and on
        torch.manual_seed(0)
        whole = torch.randn(TABLES, ROWS, WIDTH) * 0.1
        self.tables = nn.Parameter(whole[rank * self.share :][: self.share].clone())
        self.bottom = nn.Sequential(nn.Linear(NUMBERS, 32), nn.ReLU(), nn.Linear(32, WIDTH))
        features = (TABLES + 1) * TABLES // 2 + WIDTH
        self.top = nn.Sequential(nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, 1))

    def dense_parameters(self) -> list[nn.Parameter]:
        return [*self.bottom.parameters(), *self.top.parameters()]

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        """ids (B, tables) and numbers of this worker's samples -> scores (B,)."""
        count, size = ids.shape[0], self.cut.wire.size
        asked = ids.view(count, size, self.share).transpose(0, 1).reshape(size, -1)
        asked = self.cut_ids(asked.to(torch.int32)).long().view(size, count, self.share)
        rows = self.tables[torch.arange(self.share), asked]  # (n, B, share, D): for each worker
        mine = self.cut(rows)  # (n, B, share, D): from each worker, for our samples
        looked_up = mine.permute(1, 0, 2, 3).reshape(count, TABLES, WIDTH)
        dense = self.bottom(numbers)
        vectors = torch.cat([looked_up, dense.unsqueeze(1)], dim=1)  # (B, tables + 1, D)
        above = torch.triu_indices(TABLES + 1, TABLES + 1, 1)
        pairs = (vectors @ vectors.transpose(1, 2))[:, above[0], above[1]]
        scores: Tensor = self.top(torch.cat([pairs, dense], dim=1)).squeeze(1)
        return scores

    def cut_ids(self, asked: Tensor) -> Tensor:
        """Which rows each worker wants of whom; integers, sent as they are."""
        return self.id_wire.all_to_all(asked.contiguous()).wait()

    @property
    def id_wire(self) -> tw.Wire:
        if not hasattr(self, "_id_wire"):
            self._id_wire = tw.Wire(name="ids")  # an account of its own
        return self._id_wire


def train(clicks: Clicks, cut: tw.Cut, steps: int, batch: int) -> dict[str, float]:
    model = Recommender(cut)
    size, rank = cut.wire.size, cut.wire.rank
    dense = tw.GradientAverage(torch.optim.Adam(model.dense_parameters(), lr=3e-3))
    tables = torch.optim.Adagrad([model.tables], lr=0.05)  # each worker's own: nothing to average
    for step in range(steps):
        ids, numbers, target, _ = clicks.draw(batch, 1 + step * size + rank)
        loss = F.binary_cross_entropy_with_logits(model(ids, numbers), target)
        loss.backward()
        dense.step()
        tables.step()
        dense.zero_grad()
        tables.zero_grad()
    crossed, asked = cut.account.bytes, model.id_wire.account.bytes
    scores, targets, rule = evaluate(model, clicks, rank)
    return {
        "auc": auc(scores, targets),
        "auc_of_the_rule": auc(rule, targets),
        "cut_bytes": crossed,
        "id_bytes": asked,
        "dense_part_bytes": dense.account.bytes,
    }


@torch.no_grad()
def evaluate(model: Recommender, clicks: Clicks, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """All workers score the same test samples; in eval mode everything crosses the cut exactly."""
    model.eval()
    found = []
    for part in range(8):
        ids, numbers, target, score = clicks.draw(2500, 10_000_000 + part)
        found.append((model(ids, numbers), target, score))
    scores, targets, rule = (torch.cat(columns) for columns in zip(*found, strict=True))
    return scores, targets, rule


def auc(scores: Tensor, targets: Tensor) -> float:
    """How often a click is scored above a non-click, ties half."""
    _, inverse, counts = scores.unique(return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2.0)[inverse]
    positive = targets > 0
    hits, misses = int(positive.sum()), int((~positive).sum())
    return float((ranks[positive].sum() - hits * (hits + 1) / 2) / (hits * misses))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=256, help="samples of a worker and step")
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--value-bits", type=int, default=8)
    parser.add_argument("--gradient-density", type=float, default=1.0)
    flags = parser.parse_args()
    torch.set_num_threads(1)
    world = tw.init()
    clicks = Clicks()
    cuts = {
        "everything": {"density": 1.0, "value_bits": 32},
        "DCT": {
            "density": flags.density,
            "value_bits": flags.value_bits,
            "gradient_density": flags.gradient_density,
        },
    }
    results = {name: train(clicks, tw.Cut(**cuts[name]), flags.steps, flags.batch) for name in cuts}
    if world.rank == 0:
        report(results, flags.steps)
    tw.shutdown()


def report(results: dict[str, dict[str, float]], steps: int) -> None:
    print(f"{'at the cut':12}{'AUC':>8}{'cut, B/step':>14}{'ids, B/step':>14}")
    for name, found in results.items():
        per_step = [found[key] / steps for key in ("cut_bytes", "id_bytes")]
        print(f"{name:12}{found['auc']:8.4f}{per_step[0]:14,.0f}{per_step[1]:14,.0f}")
    full, thin = results["everything"], results["DCT"]
    print(f"{'the rule':12}{full['auc_of_the_rule']:8.4f}   (the best there is)")
    summary = {
        "auc": {name: round(found["auc"], 5) for name, found in results.items()},
        "auc_of_the_rule": round(full["auc_of_the_rule"], 5),
        "auc_ratio": round(thin["auc"] / full["auc"], 5),
        "bytes_ratio": round(full["cut_bytes"] / max(1, thin["cut_bytes"]), 2),
        "cut_bytes": {name: found["cut_bytes"] for name, found in results.items()},
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()

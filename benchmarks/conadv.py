"""What concurrent adversarial training does for accuracy at a batch 32 times the base.

    python benchmarks/conadv.py             5 seeds after tuning on others: two hours on one core
    python benchmarks/conadv.py --quick     1 seed, 6 epochs, two learning rates: under a minute

One process, resnet-0.1m on scikit-learn's digits: half of the 1797 images to train on, the other
half to test. Base batch 16, large batch 512, equal epochs for all (so 32 times fewer steps), a
warm-up of a sixth of the run and a cosine to 0, weight decay 5e-4, momentum 0.9.

Every contender's learning rate is the best of the same number of tries on the same two seeds, which
are not those of the result, judged by a fifth of the training images that it was not trained on.
The test images are looked at only in the end. The size of the perturbation is not tuned: one of the
16 grey levels of the images. `adversarial` is the same loss with the perturbation made by the
weights of the step itself, one pass after the other: what staleness costs.

Prints a line for each run, a table, and as its last line one JSON object:
{"accuracy": {contender: {"lr", "mean", "deviation", "seeds"}}, "gain": conadv+lars - lars, ...}.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import thinwire as tw
from thinwire.train.image_models import build_image_model
from thinwire.train.images import ImageBatches, ImageSet, load_digits, split
from thinwire.train.models import ModelConfig
from thinwire.train.optimizers import OptimizerConfig, build_optimizer, learning_rate

BASE, LARGE, EPSILON = 16, 512, 1 / 16
DECAY, MODEL = 5e-4, "resnet-0.1m"
TUNING_SEEDS, SEEDS = (100, 101), (0, 1, 2, 3, 4)


@dataclass(frozen=True)
class Contender:
    name: str
    optimizer: str
    batch: int
    rates: tuple[float, ...]
    adversary: str = ""  # "", "stale" or "fresh"
    epsilon: float = EPSILON


def contenders() -> list[Contender]:
    lars, sgd, lamb = _grid(0.5), _grid(0.0125), _grid(0.0025)
    return [
        Contender("sgd, base batch", "SGD", BASE, sgd),
        Contender("sgd", "SGD", LARGE, _grid(0.1)),
        Contender("lamb", "Lamb", LARGE, lamb),
        Contender("lars", "Lars", LARGE, lars),
        Contender("conadv+lars", "Lars", LARGE, lars, "stale"),
        Contender("adversarial+lars", "Lars", LARGE, lars, "fresh"),
    ]


def _grid(least: float, count: int = 6) -> tuple[float, ...]:
    return tuple(least * 2**power for power in range(count))


def train(contender: Contender, images: ImageSet, lr: float, seed: int, epochs: int) -> float:
    """Trains on one side of the images; the accuracy on the other."""
    model = build_image_model(ModelConfig(MODEL), images.shape, seed)
    if contender.adversary:
        tw.dual_batch_norm(model)
    steps = round(epochs * len(images.train) / contender.batch)
    arguments = {"SGD": ("momentum=0.9",), "Lars": ("trust=0.02",), "Lamb": ()}
    settings = OptimizerConfig(
        contender.optimizer,
        lr=lr,
        weight_decay=DECAY,
        optimizer_arg=arguments[contender.optimizer],
        warmup=steps // 6,
        final_lr=0.0,
    )
    optimizer = build_optimizer(settings, model)
    loss, batches = _loss(contender, model, optimizer, _read(images, contender.batch, seed, steps))
    for step, (x, y) in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step, steps)
        value = loss(x, y)
        if not math.isfinite(float(value.detach())):
            return 0.0
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        right = model(images.validation.pixels).argmax(1) == images.validation.labels
    return float(right.float().mean())


Loss = Callable[[Tensor, Tensor], Tensor]
Batches = Iterator[tuple[Tensor, Tensor]]


def _loss(
    contender: Contender, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: Batches
) -> tuple[Loss, Batches]:
    if not contender.adversary:
        return model, batches
    adversary = tw.ConcurrentAdversarial(
        model, optimizer, epsilon=contender.epsilon, bounds=(0.0, 1.0), overlap=False
    )
    # A batch that was not announced is perturbed on the spot, by the weights as they are.
    stale = contender.adversary == "stale"
    return adversary.loss, adversary.ahead(batches) if stale else batches


def _read(images: ImageSet, batch: int, seed: int, steps: int) -> Batches:
    reader = ImageBatches(images.train, batch, 0, 1, seed)
    return (reader.next() for _ in range(steps))


def tune(contender: Contender, images: ImageSet, epochs: int, quick: bool) -> float:
    """The learning rate that does best on images of the training side."""
    held_out = split(images.train, 0.2)
    found = {}
    for lr in contender.rates[2:4] if quick else contender.rates:
        seeds = TUNING_SEEDS[:1] if quick else TUNING_SEEDS
        scores = [_run(contender, held_out, lr, seed, epochs, "tuning") for seed in seeds]
        found[lr] = statistics.mean(scores)
    return max(found, key=lambda lr: found[lr])


def _run(
    contender: Contender, images: ImageSet, lr: float, seed: int, epochs: int, stage: str
) -> float:
    start = time.perf_counter()
    accuracy = train(contender, images, lr, seed, epochs)
    seconds = time.perf_counter() - start
    print(
        f"{stage:7} {contender.name:18} lr {lr:<7g} seed {seed:<4} {accuracy:.4f}  {seconds:.0f} s",
        file=sys.stderr,
        flush=True,
    )
    return accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--epochs", type=int, help="30; 6 with --quick")
    given = parser.parse_args()
    quick = given.quick
    epochs = given.epochs or (6 if quick else 30)
    torch.set_num_threads(1)
    images = load_digits(0.5)
    entries = contenders()[3:5] if quick else contenders()
    table = {}
    for contender in entries:
        lr = tune(contender, images, epochs, quick)
        scores = [
            _run(contender, images, lr, seed, epochs, "result")
            for seed in (SEEDS[:1] if quick else SEEDS)
        ]
        table[contender.name] = figures(lr, scores)
        if contender.name == "conadv+lars" and not quick:
            table |= other_sizes(contender, images, lr, epochs)
    report(table, epochs, quick)


def other_sizes(
    contender: Contender, images: ImageSet, lr: float, epochs: int
) -> dict[str, dict[str, object]]:
    """How much hangs on the size of the perturbation, at the learning rate that was found."""
    found = {}
    for levels in (0.5, 2, 4):
        name = f"conadv+lars, {levels:g} levels"
        other = Contender(name, "Lars", LARGE, (), "stale", levels * EPSILON)
        scores = [_run(other, images, lr, seed, epochs, "result") for seed in SEEDS]
        found[name] = figures(lr, scores)
    return found


def figures(lr: float, scores: list[float]) -> dict[str, object]:
    return {
        "lr": lr,
        "mean": round(statistics.mean(scores), 4),
        "deviation": round(statistics.stdev(scores), 4) if len(scores) > 1 else None,
        "seeds": [round(score, 4) for score in scores],
    }


def report(table: dict[str, dict], epochs: int, quick: bool) -> None:
    print(f"{'':26}{'lr':>9}{'accuracy':>10}{'±':>8}   seeds ({epochs} epochs)")
    for name, row in table.items():
        spread = "" if row["deviation"] is None else f"{row['deviation']:.4f}"
        seeds = " ".join(f"{score:.4f}" for score in row["seeds"])
        print(f"{name:26}{row['lr']:>9g}{row['mean']:>10.4f}{spread:>8}   {seeds}")
    ours, theirs = table["conadv+lars"]["seeds"], table["lars"]["seeds"]
    gains = [a - b for a, b in zip(ours, theirs, strict=True)]
    gain = {"mean": round(statistics.mean(gains), 4), "seeds": [round(g, 4) for g in gains]}
    if len(gains) > 1:  # of the mean of paired differences
        gain["error"] = round(statistics.stdev(gains) / math.sqrt(len(gains)), 4)
    print(json.dumps({"accuracy": table, "gain": gain, "epochs": epochs, "quick": quick}))


if __name__ == "__main__":
    main()

"""What concurrent adversarial training does for accuracy at a batch 32 times the base.

    python -m benchmarks.quality.conadv            5 seeds, ten minutes of one core
    python -m benchmarks.quality.conadv --quick    1 seed, 3 epochs, two learning rates
    python -m benchmarks.quality.conadv --pilot    what the number of epochs was chosen by

Set OMP_NUM_THREADS=1 for it.

One process, resnet-0.1m on scikit-learn's digits: half of the 1797 images to train on, the other
half to test. Base batch 16, large batch 512, equal epochs for all (so 32 times fewer steps), a
warm-up of a sixth of the run and a cosine to 0, weight decay 5e-4, momentum 0.9. In the end every
recipe's BatchNorm statistics are measured anew on all training images: after a few dozen steps
the running ones still hold what they began with.

Every recipe's learning rate is the best of six on the same two seeds, which are not those of
the result, judged by a fifth of the training images that it was not trained on. The test images are
looked at only in the end. The size of the perturbation is not tuned: one of the 16 grey levels of
the images. The number of epochs and the grids were chosen with --pilot, which runs recipes
without an adversary alone and looks at no test image.

A step with an adversary has three passes (forward and backward) where one without has one. So there
is also LARS with three times the epochs: as many passes. `adversarial+lars` is the same loss as
conadv's with the perturbation made by the weights of the step itself, one pass after the other:
what staleness costs. It and the other sizes of perturbation run at conadv+lars' learning rate.

Prints a line for each run, a table, and as its last line one JSON object: {"accuracy": {recipe:
{"lr", "mean", "deviation", "seeds", "passes", "cpu_s"}}, "gain": {"over lars": ...}, ...}. cpu_s is
the processor's time of one run of the result.
"""

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import thinwire as tw
from benchmarks.harness.arguments import Size, Table, end, parser
from thinwire.train.data.images import ImageBatches, ImageSet, load_digits, split
from thinwire.train.loop.optimizers import OptimizerConfig, build_optimizer, learning_rate
from thinwire.train.tasks.image_models import build_image_model
from thinwire.train.tasks.models import ModelConfig

BASE, LARGE, EPSILON = 16, 512, 1 / 16
DECAY, MODEL, EPOCHS = 5e-4, "resnet-0.1m", 10
TUNING_SEEDS, SEEDS = (100, 101), (0, 1, 2, 3, 4)
PASSES = 3  # of a step with an adversary: clean, perturbed, and the making of the next one
ARGUMENTS = {"SGD": ("momentum=0.9",), "Lars": ("trust=0.02",), "Lamb": ()}


@dataclass(frozen=True)
class ImageRecipe:
    """How a model of images is trained."""

    name: str
    optimizer: str
    batch: int
    rates: tuple[float, ...]  # one: it is not tuned
    adversary: str = ""  # "", "stale" or "fresh"
    epsilon: float = EPSILON
    longer: int = 1  # times the epochs

    def steps(self, images: ImageSet, epochs: int) -> int:
        return round(self.longer * epochs * len(images.train) / self.batch)

    def passes(self, images: ImageSet, epochs: int) -> float:
        """Forward and backward, in whole large batches' worth of images."""
        each = PASSES if self.adversary else 1
        return round(each * self.steps(images, epochs) * self.batch / LARGE, 1)


def _grid(least: float, count: int = 6) -> tuple[float, ...]:
    return tuple(least * 2**power for power in range(count))


CONADV = ImageRecipe("conadv+lars", "Lars", LARGE, _grid(0.25), "stale")
LARS = ImageRecipe("lars", "Lars", LARGE, _grid(0.25))
LAMB = ImageRecipe("lamb", "Lamb", LARGE, _grid(0.01))
SGD = ImageRecipe("sgd, base batch", "SGD", BASE, _grid(0.00625))
LONGER = replace(LARS, name=f"lars, {PASSES}x epochs", longer=PASSES)


def variants(lr: float) -> list[ImageRecipe]:
    """Of conadv+lars, at the learning rate that was found for it."""
    one = replace(CONADV, rates=(lr,))
    sizes = [
        replace(one, name=f"conadv+lars, {levels:g} levels", epsilon=levels * EPSILON)
        for levels in (0.5, 2)
    ]
    return [replace(one, name="adversarial+lars", adversary="fresh"), *sizes]


def train(recipe: ImageRecipe, images: ImageSet, lr: float, seed: int, epochs: int) -> float:
    """Trains on one side of the images; the accuracy on the other."""
    model = build_image_model(ModelConfig(MODEL), images.shape, seed)
    if recipe.adversary:
        tw.dual_batch_norm(model)
    steps = recipe.steps(images, epochs)
    settings = OptimizerConfig(
        recipe.optimizer,
        lr=lr,
        weight_decay=DECAY,
        optimizer_arg=ARGUMENTS[recipe.optimizer],
        warmup=steps // 6,
        final_lr=0.0,
    )
    optimizer = build_optimizer(settings, model)
    loss, batches = _loss(recipe, model, optimizer, _read(images, recipe.batch, seed, steps))
    for step, (x, y) in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step, steps)
        value = loss(x, y)
        if not math.isfinite(float(value.detach())):
            return 0.0
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
    measure_statistics(model, images.train.pixels)
    model.eval()
    with torch.no_grad():
        right = model(images.validation.pixels).argmax(1) == images.validation.labels
    return float(right.float().mean())


@torch.no_grad()
def measure_statistics(model: torch.nn.Module, pixels: Tensor) -> None:
    """Gives the BatchNorms the mean and variance of all training images."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.reset_running_stats()
            module.momentum = None  # the plain mean over the passes: there is one
    model.train()
    model(pixels)


Loss = Callable[[Tensor, Tensor], Tensor]
Pairs = Iterator[tuple[Tensor, Tensor]]


def _loss(
    recipe: ImageRecipe, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: Pairs
) -> tuple[Loss, Pairs]:
    if not recipe.adversary:
        return model, batches
    adversary = tw.ConcurrentAdversarial(
        model, optimizer, epsilon=recipe.epsilon, bounds=(0.0, 1.0), overlap=False
    )
    # A batch that was not announced is perturbed on the spot, by the weights as they are.
    stale = recipe.adversary == "stale"
    return adversary.loss, adversary.ahead(batches) if stale else batches


def _read(images: ImageSet, batch: int, seed: int, steps: int) -> Pairs:
    reader = ImageBatches(images.train, batch, 0, 1, seed)
    return (reader.next() for _ in range(steps))


def tune(recipe: ImageRecipe, images: ImageSet, epochs: int, size: Size) -> float:
    """The learning rate that does best on images of the training side."""
    if len(recipe.rates) == 1:
        return recipe.rates[0]
    held_out, found = split(images.train, 0.2), {}
    seeds = TUNING_SEEDS if size is Size.FULL else TUNING_SEEDS[:1]
    for lr in size.of(full=recipe.rates, quick=recipe.rates[2:4], tiny=recipe.rates[2:3]):
        scores = [run(recipe, held_out, lr, seed, epochs, "tuning")[0] for seed in seeds]
        found[lr] = statistics.mean(scores)
    return max(found, key=lambda lr: found[lr])


def run(
    recipe: ImageRecipe, images: ImageSet, lr: float, seed: int, epochs: int, stage: str
) -> tuple[float, float]:
    """The accuracy, and the seconds of the processor that it took."""
    start = time.process_time()
    accuracy = train(recipe, images, lr, seed, epochs)
    seconds = time.process_time() - start
    head = f"{stage:7} {recipe.name:24} lr {lr:<7g} seed {seed:<4}"
    print(f"{head} {accuracy:.4f}  {seconds:.1f} s", file=sys.stderr, flush=True)
    return accuracy, seconds


def result(recipe: ImageRecipe, images: ImageSet, epochs: int, size: Size) -> dict[str, Any]:
    lr = tune(recipe, images, epochs, size)
    seeds = SEEDS if size is Size.FULL else SEEDS[:1]
    runs = [run(recipe, images, lr, seed, epochs, "result") for seed in seeds]
    scores = [accuracy for accuracy, _ in runs]
    return {
        "lr": lr,
        "mean": round(statistics.mean(scores), 4),
        "deviation": round(statistics.stdev(scores), 4) if len(scores) > 1 else None,
        "seeds": [round(score, 4) for score in scores],
        "passes": recipe.passes(images, epochs),
        "cpu_s": round(statistics.median(seconds for _, seconds in runs), 1),
    }


def pilot(images: ImageSet) -> dict[str, float]:
    """Accuracy on held-out training images by epochs and learning rate, without an adversary."""
    held_out = split(images.train, 0.2)
    return {
        f"{recipe.name}, {epochs} epochs, lr {lr:g}": run(
            recipe, held_out, lr, TUNING_SEEDS[0], epochs, f"{epochs}"
        )[0]
        for epochs in (5, 10, 15)
        for recipe in (LARS, LAMB)
        for lr in recipe.rates[::2]
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--pilot", action="store_true")
    arguments.add_argument("--epochs", type=int, help=f"{EPOCHS}; 3 with --quick, 1 with --tiny")
    given = arguments.parse_args()
    size: Size = given.size
    epochs = given.epochs or size.of(full=EPOCHS, quick=3, tiny=1)
    torch.set_num_threads(1)
    images = load_digits(0.5)
    if given.pilot:
        end({"pilot": pilot(images)}, size)
        return
    found = {}
    for recipe in [LARS, CONADV, LAMB, LONGER, SGD] if size is Size.FULL else [LARS, CONADV]:
        found[recipe.name] = result(recipe, images, epochs, size)
    if size is Size.FULL:
        for recipe in variants(found[CONADV.name]["lr"]):
            found[recipe.name] = result(recipe, images, epochs, size)
    report(found, epochs, size)


def report(found: dict[str, dict[str, Any]], epochs: int, size: Size) -> None:
    table = Table("", "lr", "accuracy", "±", "passes", "cpu s", "seeds", first=26)
    for name, row in found.items():
        spread = "" if row["deviation"] is None else f"{row['deviation']:.4f}"
        work = f"{row['passes']:g}", f"{row['cpu_s']:.1f}"
        seeds = " ".join(f"{score:.4f}" for score in row["seeds"])
        table.row(name, f"{row['lr']:g}", f"{row['mean']:.4f}", spread, *work, f"   {seeds}")
    gain = {
        f"over {name}": gains(found[CONADV.name]["seeds"], row["seeds"])
        for name, row in found.items()
        if name != CONADV.name
    }
    end({"accuracy": found, "gain": gain, "epochs": epochs}, size)


def gains(ours: list[float], theirs: list[float]) -> dict[str, Any]:
    """Of conadv+lars, seed by seed; `error` is the standard error of the mean."""
    each = [a - b for a, b in zip(ours, theirs, strict=True)]
    found = {"mean": round(statistics.mean(each), 4), "seeds": [round(gain, 4) for gain in each]}
    if len(each) > 1:
        found["error"] = round(statistics.stdev(each) / math.sqrt(len(each)), 4)
    return found


if __name__ == "__main__":
    main()

"""Small models of images: a residual network with BatchNorm, and a vision transformer.

    ResNet   x (B, C, H, W) -> 3x3 convolution -> three stages of residual blocks, each of half the
             size and twice the width of the one before -> mean over the places -> classes
                 x = relu(x + norm(conv(relu(norm(conv(x))))))
    ViT      x (B, C, H, W) -> patches (B, T, D) with learned positions -> the blocks of GPT, every
             patch seeing every other -> mean over the patches -> classes

Both are `embed`, `blocks`, `head`, as GPT is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.errors import UsageError
from thinwire.train.tasks.models import Block, ModelConfig, Stack, fresh


@dataclass(frozen=True)
class ImageShape:
    """What comes in, and the number of classes that go out."""

    channels: int
    size: int  # height and width
    classes: int


@dataclass(frozen=True)
class ResNetConfig:
    depth: int  # blocks in each of the three stages
    width: int  # channels of the first
    channels: int
    size: int
    classes: int


@dataclass(frozen=True)
class ViTConfig:
    layers: int
    width: int
    heads: int
    patch: int
    channels: int
    size: int
    classes: int
    causal = False  # what Block asks for


# name -> (depth, width); the name is the number of parameters with one channel and 10 classes
RESNETS: dict[str, tuple[int, int]] = {
    "resnet-0.1m": (1, 18),
    "resnet-0.3m": (3, 16),
    "resnet-1m": (3, 32),
}
# name -> (layers, width, heads)
VITS: dict[str, tuple[int, int, int]] = {
    "vit-0.1m": (2, 64, 4),
    "vit-0.3m": (6, 64, 4),
    "vit-1m": (5, 128, 4),
}
IMAGE_PRESETS = (*RESNETS, *VITS)
PATCH = 2  # pixels along a side


class ResidualBlock(nn.Module):
    """(B, C, H, W) -> (B, width, H / stride, W / stride)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels != width:
            self.shortcut = nn.Conv2d(channels, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.shortcut(x) + self.norm2(self.conv2(inner)))


class ClassHead(nn.Module):
    """The mean over places (dimensions `over`), then classes."""

    def __init__(self, norm: nn.Module, width: int, classes: int, over: tuple[int, ...]) -> None:
        super().__init__()
        self.norm, self.over = norm, over
        self.linear = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.norm(x).mean(self.over))
        return logits


class ImageModel(Stack):
    """`model(images)` gives logits (B, classes), `model(images, labels)` the mean loss."""

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return class_loss(output, targets)


class ResNet(ImageModel):
    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        width, blocks = config.width, []
        self.embed = nn.Sequential(
            nn.Conv2d(config.channels, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        )
        for stage in range(3):
            for index in range(config.depth):
                wide = config.width << stage
                blocks.append(ResidualBlock(width, wide, 2 if stage and not index else 1))
                width = wide
        self.blocks = nn.ModuleList(blocks)
        self.head = ClassHead(nn.Identity(), width, config.classes, over=(2, 3))
        self._initialise()

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class Patches(nn.Module):
    """(B, C, H, W) -> (B, T, D), T patches."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        patches = (config.size // config.patch) ** 2
        self.linear = nn.Conv2d(config.channels, config.width, config.patch, config.patch)
        self.positions = nn.Parameter(torch.empty(patches, config.width))

    def forward(self, x: Tensor) -> Tensor:
        tokens: Tensor = self.linear(x).flatten(2).transpose(1, 2)
        return tokens + self.positions


class ViT(ImageModel):
    def __init__(self, config: ViTConfig, *, checkpoint_activations: bool = False) -> None:
        super().__init__()
        if config.size % config.patch:
            raise UsageError(
                f"images of {config.size} pixels do not divide into patches of {config.patch}"
            )
        self.config = config
        self.checkpoint_activations = checkpoint_activations
        self.embed = Patches(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        norm = nn.LayerNorm(config.width, bias=False)
        self.head = ClassHead(norm, config.width, config.classes, over=(1,))
        self._initialise()

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif name == "embed.positions":
                nn.init.normal_(parameter, std=0.2)  # as large as what a patch adds to it
            elif name == "head.linear.weight":
                nn.init.normal_(parameter, std=0.02)  # a uniform guess
            elif parameter.dim() >= 2:
                residual = name.endswith(("attention.out.weight", "mlp.2.weight"))
                scale = 1 / math.sqrt(2 * self.config.layers) if residual else 1.0
                nn.init.normal_(parameter, std=scale * parameter[0].numel() ** -0.5)


def class_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy, in fp32 under autocast too."""
    with torch.autocast(logits.device.type, enabled=False):
        return F.cross_entropy(logits.float(), labels)


def build_image_model(config: ModelConfig, shape: ImageShape, seed: int) -> ImageModel:
    """The model of `config` for images of `shape`; the same seed gives the same weights."""
    sizes = (shape.channels, shape.size, shape.classes)
    recompute = config.checkpoint_activations
    make: Callable[[], ImageModel]
    if config.model in RESNETS:
        if recompute:
            raise UsageError(
                f"--checkpoint-activations: {config.model} has BatchNorm, which would count every "
                "batch twice; leave it out, or train a vit"
            )
        resnet = ResNetConfig(*RESNETS[config.model], *sizes)
        make = lambda: ResNet(resnet)  # noqa: E731
    elif config.model in VITS:
        vit = ViTConfig(*VITS[config.model], PATCH, *sizes)
        make = lambda: ViT(vit, checkpoint_activations=recompute)  # noqa: E731
    else:
        raise UsageError(
            f"--model: for images it takes {', '.join(IMAGE_PRESETS)}; got {config.model!r}"
        )
    return fresh(make, seed, compiled=config.compile)

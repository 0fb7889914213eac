"""The GPT that `thinwire train` trains, and its sizes by name.

Pre-norm blocks on a residual stream x of shape (B, T, D):

    x = x + attention(norm(x))        softmax(q kᵀ / sqrt(D / heads)) v, causal or over both sides
    x = x + mlp(norm(x))              D -> 4 D -> D, GELU

No biases; positions are learned; the head's weight is the token embedding's, unless `tied` is off.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from thinwire.errors import UsageError


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a GPT. `vocab` counts the rows of the embedding (a mask token included)."""

    layers: int
    width: int
    heads: int
    vocab: int
    context: int
    causal: bool = True
    tied: bool = True
    """Whether the head's weight is the token embedding's."""


class BlockShape(Protocol):
    """What a block needs to know."""

    @property
    def width(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def causal(self) -> bool: ...


# name -> (layers, width, heads); the name is the number of parameters with 256 tokens, context 128
PRESETS: dict[str, tuple[int, int, int]] = {
    "gpt-0.3m": (6, 64, 4),
    "gpt-1m": (5, 128, 4),
    "gpt-3m": (4, 256, 4),
    "gpt-10m": (6, 384, 6),
    "gpt-25m": (8, 512, 8),
    "gpt-85m": (12, 768, 12),
    "gpt-300m": (24, 1024, 16),
    "gpt-1b": (20, 2048, 16),
}


@dataclass
class ModelConfig:
    """Which model, and how it is run."""

    model: str = "gpt-0.3m"
    """For text gpt-0.3m, gpt-1m, gpt-3m, gpt-10m, gpt-25m, gpt-85m, gpt-300m or gpt-1b, for images
    resnet-0.1m, resnet-0.3m, resnet-1m, vit-0.1m, vit-0.3m or vit-1m: the number of parameters."""

    objective: Literal["causal", "masked"] = "causal"
    """causal: predict the next token (GPT). masked: predict hidden tokens from both sides."""

    tied: Literal["auto", "yes", "no"] = "auto"
    """Whether the head uses the token embedding's weight. auto: it does, except with --stages, for
    no parameter can be in two of them."""

    compile: bool = False
    """torch.compile the model: faster steps after a first one that takes a minute or so."""

    checkpoint_activations: bool = False
    """Recompute each block's activations in the backward pass: far less memory, a third more
    compute, the same gradients."""

    shards: int = 1
    """Ranks that share one replica, each holding a part of the weights and of all state (FSDP2).
    Raise it when a replica does not fit one device; keep the shards inside a machine."""


class Embed(nn.Module):
    """Tokens (B, T) -> (B, T, D)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)

    def forward(self, tokens: Tensor) -> Tensor:
        steps, context = tokens.shape[1], self.positions.num_embeddings
        if steps > context:
            raise ValueError(f"sequences of at most {context} tokens, got {steps}")
        places = torch.arange(steps, device=tokens.device)
        x: Tensor = self.tokens(tokens) + self.positions(places)
        return x


class Attention(nn.Module):
    def __init__(self, config: BlockShape) -> None:
        super().__init__()
        self.heads = config.heads
        self.causal = config.causal
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, steps, width = x.shape
        split = self.qkv(x).view(batch, steps, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)  # each (B, heads, T, D / heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = self.out(mixed.transpose(1, 2).reshape(batch, steps, width))
        return x


class Block(nn.Module):
    """(B, T, D) -> (B, T, D)."""

    def __init__(self, config: BlockShape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, bias=False)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width, bias=False),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        x = x + self.mlp(self.mlp_norm(x))
        return x


class Head(nn.Module):
    """(B, T, D) -> logits (B, T, vocab)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.linear = nn.Linear(config.width, config.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(self.norm(x))
        return logits


class Stack(nn.Module):
    """`embed`, then `blocks`, then `head`, each a module that maps one tensor to the next.

    `model(x)` gives the head's output, `model(x, targets)` the mean loss.
    """

    config: Any  # a dataclass, from which the model can be built again
    embed: nn.Module
    blocks: nn.ModuleList
    head: nn.Module
    checkpoint_activations = False

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            if self.checkpoint_activations and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        output: Tensor = self.head(x)
        return output if targets is None else self.loss(output, targets)

    def parts(self) -> list[tuple[str, nn.Module]]:
        """(name, module) in order, for whoever cuts the model into stages."""
        blocks = [(f"blocks.{index}", block) for index, block in enumerate(self.blocks)]
        return [("embed", self.embed), *blocks, ("head", self.head)]

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must implement loss")


AnyStack = TypeVar("AnyStack", bound=Stack)


class GPT(Stack):
    """`model(tokens)` gives logits (B, T, vocab), `model(tokens, targets)` the mean loss."""

    def __init__(self, config: GPTConfig, *, checkpoint_activations: bool = False) -> None:
        super().__init__()
        if config.width % config.heads:
            raise UsageError(f"width {config.width} does not divide into {config.heads} heads")
        self.config = config
        self.checkpoint_activations = checkpoint_activations
        self.embed = Embed(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.head = Head(config)
        if config.tied:
            self.head.linear.weight = self.embed.tokens.weight
        self._initialise()

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue  # norms start at one
            # Each block adds twice to the residual stream: this keeps its variance from growing.
            residual = name.endswith(("attention.out.weight", "mlp.2.weight"))
            scale = 1 / math.sqrt(2 * self.config.layers) if residual else 1.0
            nn.init.normal_(parameter, std=0.02 * scale)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return token_loss(output, targets)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over the targets that are not -100, in fp32 under autocast too."""
    with torch.autocast(logits.device.type, enabled=False):
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100)


def build_model(config: ModelConfig, vocab: int, context: int, seed: int) -> GPT:
    """The model of `config` for `vocab` tokens; the same seed gives the same weights anywhere.

    The masked objective adds one row to the vocabulary, for the mask.
    """
    if config.model not in PRESETS:
        raise UsageError(f"--model takes {', '.join(PRESETS)}; got {config.model!r}")
    layers, width, heads = PRESETS[config.model]
    masked = config.objective == "masked"
    rows = vocab + masked
    shape = GPTConfig(
        layers, width, heads, rows, context, causal=not masked, tied=config.tied != "no"
    )
    recompute = config.checkpoint_activations
    return fresh(
        lambda: GPT(shape, checkpoint_activations=recompute), seed, compiled=config.compile
    )


def fresh(make: Callable[[], AnyStack], seed: int, *, compiled: bool = False) -> AnyStack:
    """What `make` gives, its weights drawn from the seed; the global random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = make()
    if compiled:
        model.compile()  # in place: parameter names stay as they are
    return model


def model_settings(model: Stack, name: str) -> dict[str, Any]:
    """What a checkpoint keeps of a model, enough to build it again."""
    return {"name": name, **asdict(model.config)}

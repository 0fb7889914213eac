"""DeepSpeed's one-bit optimizers: a JSON config translated to thinwire.

    torchrun --nproc-per-node 2 examples/deepspeed_one_bit.py
    torchrun --nproc-per-node 2 examples/deepspeed_one_bit.py --config ds_config.json

`translated` reads the config of DeepSpeed's OneBitAdam, OneBitLamb or ZeroOneAdam. It returns the
name of our optimizer, its settings, and the keys that your own loop has to follow now that there is
no engine. It refuses by name what has no counterpart. The program prints the translation and trains
a small model with it.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import thinwire as tw

SAMPLE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 32,
    "gradient_clipping": 1.0,
    "optimizer": {
        "type": "OneBitAdam",
        "params": {
            "lr": 2e-3,
            "betas": [0.9, 0.99],
            "weight_decay": 0.01,
            "freeze_step": 60,
            "cuda_aware": False,
            "comm_backend_name": "nccl",
        },
    },
}

_ADAM = {"lr": "lr", "betas": "betas", "eps": "eps", "weight_decay": "weight_decay"}
_ADAM |= {"bias_correction": "bias_correction"}
_LAMB = {"coeff_beta": "coefficient_beta", "factor_threshold": "factor_threshold"}
_ZERO_ONE = {"var_update_scaler": "double_after", "local_step_scaler": "local_double_after"}
_ZERO_ONE |= {"local_step_clipper": "longest"}
# Type of the optimizer -> its parameters and their names here.
PARAMETERS: dict[str, dict[str, str]] = {
    "OneBitAdam": _ADAM | {"freeze_step": "freeze_at"},
    "OneBitLamb": _ADAM | _LAMB | {"freeze_step": "freeze_at"},
    "ZeroOneAdam": _ADAM | _ZERO_ONE | {"var_freeze_step": "freeze_at"},
}
# Where a config leaves them out. (32678 is DeepSpeed's number.)
DEFAULTS: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"freeze_step": 100_000},
    "OneBitLamb": {"freeze_step": 100_000},
    "ZeroOneAdam": {"var_freeze_step": 100_000, "local_step_scaler": 32_678},
}
# Pairs of LAMB's parameters -> one of ours, with DeepSpeed's defaults.
BOUNDS = {
    ("min_coeff", "max_coeff"): ("coefficient", (0.01, 10.0)),
    ("factor_min", "factor_max"): ("factor", (0.5, 4.0)),
}
# thinwire uses the process group's own backend.
NOT_NEEDED = {"cuda_aware", "comm_backend_name"}
NO_COUNTERPART = {
    "amsgrad": "there is no AMSGrad variant",
    "eps_inside_sqrt": "eps is added after the square root",
}
# Keys of the config that the engine followed, and your loop follows from now on.
LOOP = {
    "train_batch_size": "the batches your loader gives",
    "train_micro_batch_size_per_gpu": "the batches your loader gives",
    "gradient_accumulation_steps": "`with optimizer.accumulating():` around all but the last pass",
    "scheduler": "a torch.optim.lr_scheduler, which works on the optimizer as on any other",
    "fp16": "torch.amp.autocast and GradScaler, with overlap=False",
    "bf16": "torch.amp.autocast, or bfloat16 weights; moments are float32",
    "steps_per_print": "your own printing",
    "wall_clock_breakdown": "`optimizer.account`",
}
# The released code's arithmetic: no bias correction, one scale for each tensor (LAMB: for all).
PUBLISHED: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"whiten": False, "forget": False, "bucket_mb": 1e-9},
    "OneBitLamb": {"debias": False, "bucket_mb": 1e9},
    "ZeroOneAdam": {"bucket_mb": 1e-9},
}


class NoCounterpart(ValueError):
    """A key of the config that cannot be translated; the message names it."""


@dataclass
class Translation:
    method: str
    settings: dict[str, Any]
    loop: dict[str, str] = field(default_factory=dict)
    """Keys that the engine followed -> what follows them in a loop of your own."""

    def build(self, parameters: Any) -> tw.WireOptimizer:
        optimizer: tw.WireOptimizer = getattr(tw, self.method)(parameters, **self.settings)
        return optimizer

    def __str__(self) -> str:
        settings = ", ".join(f"{key}={value!r}" for key, value in self.settings.items())
        lines = [f"tw.{self.method}(model.parameters(), {settings})"]
        return "\n".join(lines + [f"  {key}: {what}" for key, what in self.loop.items()])


def translated(config: dict[str, Any], *, as_published: bool = False) -> Translation:
    """The optimizer that the config means.

    `as_published` adds the settings that give the arithmetic of DeepSpeed's code. Without it our
    defaults stay, which learnt better here: docs/methods/one-bit.md.
    """
    known = {"optimizer", "gradient_clipping", "zero_optimization", *LOOP}
    for key in config:
        if key not in known:
            raise NoCounterpart(f"{key}: thinwire has no counterpart; remove it from the config")
    stage = config.get("zero_optimization", {}).get("stage", 0)
    if stage:
        raise NoCounterpart(
            f"zero_optimization.stage {stage}: use shard_state=True, which spreads the moments "
            "over the ranks, or FSDP2 inside a replica"
        )
    optimizer = config.get("optimizer", {})
    names = {name.lower(): name for name in PARAMETERS}
    method = names.get(str(optimizer.get("type", "")).lower())
    if method is None:
        raise NoCounterpart(
            f"optimizer.type {optimizer.get('type')!r}: one of {', '.join(PARAMETERS)} is expected"
        )
    settings = _settings(method, optimizer.get("params", {}))
    if config.get("gradient_clipping"):
        settings["clip"] = _number("gradient_clipping", config["gradient_clipping"])
    if as_published:
        settings |= {"bias_correction": False, "floor": 0.0, **PUBLISHED[method]}
    return Translation(method, settings, {key: LOOP[key] for key in config if key in LOOP})


def _settings(method: str, given: dict[str, Any]) -> dict[str, Any]:
    params, settings = DEFAULTS[method] | given, {}
    paired = {name for pair in BOUNDS for name in pair} if method == "OneBitLamb" else set()
    for name, value in params.items():
        if name in PARAMETERS[method]:
            value = tuple(value) if name == "betas" else _number(f"params.{name}", value)
            settings[PARAMETERS[method][name]] = value
        elif name == "max_grad_norm":
            if value:
                settings["clip"] = _number("params.max_grad_norm", value)
        elif name in NO_COUNTERPART and value:
            raise NoCounterpart(f"params.{name}: {NO_COUNTERPART[name]}")
        elif name not in paired | NOT_NEEDED | set(NO_COUNTERPART):
            raise NoCounterpart(f"params.{name}: {method} has no such parameter")
    for (low, high), (ours, usual) in BOUNDS.items():
        if method == "OneBitLamb" and (low in params or high in params):
            settings[ours] = (params.get(low, usual[0]), params.get(high, usual[1]))
    return settings


def _number(name: str, value: Any) -> Any:
    if isinstance(value, str):  # "auto", which other programs fill in
        raise NoCounterpart(f"{name} is {value!r}: write the number that you want")
    return value


# -- a program -------------------------------------------------------------------------------------


def batches(seed: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.randn(32, 64, generator=generator)
        yield x, x[:, :8].sin().sum(1, keepdim=True)


def train(translation: Translation, steps: int = 200) -> float:
    world = tw.init()
    torch.manual_seed(0)  # the same weights on every replica
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = translation.build(model.parameters())  # was: deepspeed.initialize(...)
    for x, y in batches(seed=world.rank, count=steps):
        loss = (model(x) - y).square().mean()
        loss.backward()  # was: engine.backward(loss)
        optimizer.step()  # was: engine.step()
        optimizer.zero_grad()
    optimizer.finish()
    with torch.no_grad():
        losses = [(model(x) - y).square().mean() for x, y in batches(seed=-1, count=20)]
    if world.rank == 0:
        print(f"held-out loss {torch.stack(losses).mean():.3f}\n{optimizer.account}")
    tw.shutdown()
    return float(torch.stack(losses).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", type=Path, help="DeepSpeed's JSON file")
    parser.add_argument("--as-published", action="store_true")
    flags = parser.parse_args()
    config = SAMPLE if flags.config is None else json.loads(flags.config.read_text())
    translation = translated(config, as_published=flags.as_published)
    if tw.init().rank == 0:
        print(translation)
    train(translation)


if __name__ == "__main__":
    main()

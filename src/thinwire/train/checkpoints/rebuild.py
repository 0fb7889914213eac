"""A model from what a checkpoint or an exported file says of it."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from thinwire.errors import UsageError
from thinwire.train.tasks.image_models import ResNet, ResNetConfig, ViT, ViTConfig
from thinwire.train.tasks.models import GPT, GPTConfig, Stack

# The first word of a model's name -> how it is built
_FAMILIES: dict[str, tuple[type, Callable[[Any], Stack]]] = {
    "gpt": (GPTConfig, GPT),
    "resnet": (ResNetConfig, ResNet),
    "vit": (ViTConfig, ViT),
}


def model_from_settings(settings: Mapping[str, Any]) -> Stack:
    """The model that `model_settings` described, with fresh weights. What an older version did not
    write has its default."""
    try:
        shape, build = _FAMILIES[str(settings.get("name", "gpt")).partition("-")[0]]
        names = {field.name for field in fields(shape)}
        return build(shape(**{key: value for key, value in settings.items() if key in names}))
    except (KeyError, TypeError) as error:
        raise UsageError(f"these are not the settings of a thinwire model: {error}") from None

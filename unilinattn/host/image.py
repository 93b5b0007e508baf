"""Images as inputs: the pixels that an image processor or a transform makes of them."""

import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unilinattn.call.offloaded import device_of
from unilinattn.errors import InputError
from unilinattn.host.inputs import pixels
from unilinattn.optional import import_extra
from unilinattn.registry import ImageTokens, image_tokens_of

ACCEPTED = "a PIL image, a uint8 array (height, width, 3), or a list of them"


def is_image(inputs: Any) -> bool:
    """Tell whether inputs are an image or a sequence that holds one: a PIL image or an array with three axes."""
    return any(
        _is_pil(image) or (isinstance(image, np.ndarray) and image.ndim == 3)
        for image in (inputs if isinstance(inputs, (list, tuple)) else [inputs])
    )


def processed(inputs: Any, processor: Any, model: nn.Module | None = None) -> dict[str, Tensor] | Tensor:
    """Return a model's inputs for images: the tensors of an image processor, or the pixels of a transform.

    They are on the device of `model` and have its dtype, if it is given. A model that does not know the name of the
    processor's only tensor is given the tensor by itself.

    Args:
        inputs: a PIL image, which is converted to RGB, a uint8 array (height, width, 3), or a list of them.
        processor: an image processor of transformers, or a callable from a PIL image to a tensor (channel, height,
            width), such as timm's `create_transform` returns.

    Raises `InputError` for other inputs, without a processor, and if the processor returns no tensors or tensors of
    different sizes.
    """
    if not callable(processor):
        named = "no processor" if processor is None else f"{type(processor).__name__} as processor"
        raise InputError(
            f"the input is an image, with {named}; pass processor=AutoImageProcessor.from_pretrained(path), or timm's "
            "create_transform(**resolve_model_data_config(model))."
        )
    images = [_as_pil(each) for each in (inputs if isinstance(inputs, (list, tuple)) else [inputs])]
    if not images:
        raise InputError(f"the inputs are an empty list; give {ACCEPTED}.")
    rows = [_tensors(processor, image) for image in images]
    shapes = [{name: tuple(value.shape[1:]) for name, value in row.items()} for row in rows]
    if different := [number for number, shape in enumerate(shapes) if shape != shapes[0]]:
        number = different[0]
        raise InputError(
            f"the processor returns {_sizes(shapes[0])} for image 0 and {_sizes(shapes[number])} for image "
            f"{number}; use one that resizes to one size, or give one image at a time."
        )
    tensors = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    if model is not None:
        device = device_of(model)
        dtype = next((weight.dtype for weight in model.parameters() if weight.is_floating_point()), torch.float32)
        moved = {name: value.to(device) for name, value in tensors.items()}
        tensors = {name: value.to(dtype) if value.is_floating_point() else value for name, value in moved.items()}
        parameters = inspect.signature(model.forward).parameters
        open_ended = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        if len(tensors) == 1 and not open_ended and not tensors.keys() & parameters.keys():
            # Models outside of transformers have other names for the pixels.
            return next(iter(tensors.values()))
    return tensors.get("", tensors)


def image_tokens(model: nn.Module, arguments: Mapping[str, Any], lengths: Collection[int]) -> ImageTokens | None:
    """Return the places of the tokens of a model's images, None if they are unknown.

    `arguments`: the model's arguments. `lengths`: the numbers of tokens of its layers.
    """
    images = pixels(arguments)
    entries = [(module, image_tokens_of(type(module))) for module in model.modules()]
    sources = [(module, locate) for module, locate in entries if locate is not None]
    if images is None or len(sources) != 1:
        return None
    ((module, locate),) = sources
    tokens = locate(module, images.shape[2], images.shape[3])
    # A model with further tokens, or that merges patches, has another length.
    fits = tokens is not None and set(lengths) == {max((*tokens.patches, *tokens.cls)) + 1}
    return tokens if fits else None


def _tensors(processor: Callable[..., Any], image: Any) -> dict[str, Tensor]:
    """Return the tensors of one image with a batch axis of 1; those of a transform have no name."""
    # transformers' image processors are callable as well, and have this method.
    if hasattr(processor, "preprocess"):
        made = processor(images=image, return_tensors="pt")
        tensors = {name: value for name, value in made.items() if isinstance(value, Tensor)}
        if tensors:
            return tensors
    else:
        made = processor(image)
        if isinstance(made, Tensor) and made.ndim == 3 and made.is_floating_point():
            return {"": made[None]}
    what = f"a {made.dtype} tensor of shape {tuple(made.shape)}" if isinstance(made, Tensor) else type(made).__name__
    raise InputError(
        f"the processor {type(processor).__name__} returned {what}; a transform returns a floating-point tensor "
        "(channel, height, width), and an image processor of transformers a mapping of tensors."
    )


def _as_pil(image: Any) -> Any:
    if _is_pil(image):
        return image.convert("RGB")
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3:
        if not image.size:
            raise InputError(f"the image has shape {image.shape}, no pixels; give {ACCEPTED}.")
        return import_extra("PIL.Image", "vision").fromarray(image)
    what = type(image).__name__
    if isinstance(image, (np.ndarray, Tensor)):
        what = f"{image.dtype} {what} of shape {tuple(image.shape)}"
    hint = " Pixels that are processed already need no processor." if isinstance(image, (Tensor, Mapping)) else ""
    raise InputError(f"the image is a {what}; give {ACCEPTED}.{hint}")


def _is_pil(value: Any) -> bool:
    # An image exists only if its package is imported.
    package = sys.modules.get("PIL.Image")
    return package is not None and isinstance(value, package.Image)


def _sizes(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(" x ".join(map(str, shape)) for shape in shapes.values())

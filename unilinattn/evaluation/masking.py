"""Remove tokens or image patches from a model's input: replace them by zeros, a mean, a blur or given values."""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from unilinattn.errors import InputError, OptionError, nearest
from unilinattn.evaluation.metrics import tensor_text
from unilinattn.host.inputs import input_embedding, token_ids, vocabulary_size

Masking = Literal["zero", "mean", "blur", "token", "reference"]
"""The values that replace a removed token or patch."""

EMBEDS = "inputs_embeds"
"""Name of the hosts' argument with the embeddings of the tokens, in place of their ids."""

BLUR = 10 / 224
"""Standard deviation of the blur as a share of the shorter side: 10 of 224 pixels (Fong and Vedaldi 2017, 4.1)."""


@dataclass(frozen=True)
class Removal:
    """A model's arguments, and the values that replace removed units: tokens, or patches of an image.

    Attributes:
        arguments: the model's arguments by name.
        name: the argument that holds the units.
        values: its tensor: ids (batch, token), embeddings (batch, token, channel) or pixels (batch, channel, height,
            width).
        baseline: the values that replace removed units, of the same shape.
    """

    arguments: Mapping[str, Any]
    name: str
    values: Tensor
    baseline: Tensor

    def __call__(self, removed: Bool[Tensor, "..."]) -> dict[str, Any]:
        """Return the arguments with the units that are True replaced.

        `removed` is (batch, *unit), or (run, batch, *unit) for several runs, which follow each other in one batch.
        """
        mask, axes = removed, self.values.ndim
        if axes == 4:
            height, width = (self.values.shape[axis] // removed.shape[axis - 4] for axis in (2, 3))
            mask = removed.repeat_interleave(height, -2).repeat_interleave(width, -1).unsqueeze(-3)
        elif axes == 3:
            mask = removed[..., None]
        replaced = torch.where(mask, self.baseline, self.values)
        return {**self.arguments, self.name: replaced.flatten(0, -axes)}


def removal(
    model: nn.Module,
    arguments: Mapping[str, Any],
    units: tuple[int, ...],
    masking: Masking,
    mask_token_id: int | None = None,
    reference: Tensor | None = None,
) -> Removal:
    """Return the `Removal` of tokens (`units` is (batch, token)) or of patches (`units` is (batch, row, column)).

    See `PerturbationTest` for the maskings and the errors.
    """
    if masking not in get_args(Masking):
        raise OptionError(f"unknown masking {masking!r}{nearest(masking, get_args(Masking))}")
    if (mask_token_id is not None) != (masking == "token"):
        raise OptionError(
            f"masking={masking!r} came with mask_token_id={mask_token_id}; masking='token' takes the id of a mask "
            "token, and the other maskings take none."
        )
    if reference is not None and masking != "reference":
        raise OptionError(f"masking={masking!r} came with a reference; masking='reference' takes one.")
    if len(units) == 3:
        return _patches(arguments, units, masking, reference)
    if masking == "blur":
        raise OptionError(
            "masking='blur' is for images; tokens have the maskings 'zero', 'mean', 'token' and 'reference'."
        )
    ids, embeds = token_ids(arguments), arguments.get(EMBEDS)
    tokens = embeds if ids is None else ids
    if not isinstance(tokens, Tensor):
        raise InputError(
            f"relevance of shape {units} scores tokens, and the inputs ({', '.join(arguments)}) have no token ids; "
            "scores of image patches have the shape (batch, row, column)."
        )
    if units != tuple(tokens.shape[:2]):
        raise InputError(
            f"relevance of shape {units} does not fit inputs of {tokens.shape[0]} sequences with {tokens.shape[1]} "
            "tokens; give one score for each token, padding included."
        )
    if masking == "reference":
        return Removal(arguments, _name_of(arguments, tokens), tokens, _reference(reference, tokens))
    if masking != "token":
        return _embeddings(model, arguments, ids, masking)
    if ids is None:
        raise InputError("masking='token' replaces token ids, and the inputs have embeddings; give the ids.")
    size = vocabulary_size(model)
    if not isinstance(mask_token_id, int) or not 0 <= mask_token_id < (size or mask_token_id + 1):
        raise OptionError(
            f"mask_token_id={mask_token_id!r}; " + (f"the model knows ids 0 to {size - 1}." if size else "give an id.")
        )
    return Removal(arguments, _name_of(arguments, ids), ids, torch.full_like(ids, mask_token_id))


def real_tokens(arguments: Mapping[str, Any], shape: tuple[int, ...]) -> Bool[Tensor, "batch token"]:
    """Return the mask of real tokens: the `attention_mask` if it has one entry for each token, else all."""
    mask = arguments.get("attention_mask")
    if isinstance(mask, Tensor) and tuple(mask.shape) == shape:
        return mask != 0
    return torch.ones(shape, dtype=torch.bool, device="cpu")


def _embeddings(model: nn.Module, inputs: Mapping[str, Any], ids: Tensor | None, masking: Masking) -> Removal:
    arguments = dict(inputs)
    if ids is not None:
        embedding, parameters = input_embedding(model), inspect.signature(model.forward).parameters
        passes_on = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        if embedding is None or not (EMBEDS in parameters or passes_on):
            raise InputError(
                f"masking={masking!r} replaces the embeddings of tokens, and {type(model).__name__} takes no {EMBEDS}; "
                "use masking='token' with a mask_token_id."
            )
        del arguments[_name_of(inputs, ids)]
        arguments[EMBEDS] = embedding(ids)
    values = arguments[EMBEDS]
    if masking == "zero":
        return Removal(arguments, EMBEDS, values, torch.zeros_like(values))
    real = real_tokens(inputs, tuple(values.shape[:2])).to(values.device)[..., None]
    wide = torch.where(real, values, 0).to(torch.promote_types(values.dtype, torch.float32))
    mean = wide.sum(1, keepdim=True) / real.sum(1, keepdim=True).clamp(min=1)
    return Removal(arguments, EMBEDS, values, mean.to(values.dtype).expand_as(values))


def _reference(reference: Tensor | None, values: Tensor) -> Tensor:
    """Return the values that replace removed units; raise `InputError` if they do not fit the input."""
    if (
        isinstance(reference, Tensor)
        and reference.shape == values.shape
        and reference.is_floating_point() == values.is_floating_point()
        and not bool(reference.isnan().any())
    ):
        return reference.to(values)
    raise InputError(
        "masking='reference' replaces removed units by those of another input, of the same kind and shape and "
        f"without NaN: the input is {tensor_text(values)}, the reference {tensor_text(reference)}. Give it as "
        "`reference` of the sample or of the test."
    )


def _patches(
    arguments: Mapping[str, Any], units: tuple[int, ...], masking: Masking, reference: Tensor | None
) -> Removal:
    images = {
        name: value
        for name, value in arguments.items()
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 4
    }
    if len(images) != 1:
        raise InputError(
            f"relevance of shape {units} scores patches, and the inputs have {len(images)} image tensors (batch, "
            "channel, height, width); give one, or scores of tokens, (batch, token)."
        )
    ((name, pixels),) = images.items()
    batch, _, height, width = pixels.shape
    if units[0] != batch or height % units[1] or width % units[2]:
        raise InputError(
            f"relevance of shape {units} does not divide {batch} images of {height} x {width} pixels into patches; "
            "give (batch, row, column), or scale the map to the pixels, as by torch.nn.functional.interpolate."
        )
    if masking == "token":
        raise OptionError(
            "masking='token' is for tokens; images have the maskings 'zero', 'mean', 'blur' and 'reference'."
        )
    if masking == "reference":
        baseline = _reference(reference, pixels)
    elif masking == "blur":
        baseline = gaussian_blur(pixels, BLUR * min(height, width))
    elif masking == "mean":
        baseline = pixels.mean((2, 3), keepdim=True).expand_as(pixels)
    else:
        baseline = torch.zeros_like(pixels)
    return Removal(arguments, name, pixels, baseline)


def gaussian_blur(
    pixels: Float[Tensor, "batch channel height width"], sigma: float
) -> Float[Tensor, "batch channel height width"]:
    """Return images convolved with a Gaussian of standard deviation `sigma` in pixels, cut off at 3 `sigma`.

    Pixels beyond the border are those of the border.
    """
    radius = math.ceil(3 * sigma)
    offset = torch.arange(-radius, radius + 1, dtype=pixels.dtype, device=pixels.device)
    weight = torch.exp(-(offset**2) / (2 * sigma**2))
    weight = weight / weight.sum()
    flat = functional.pad(pixels.flatten(0, 1)[:, None], (radius,) * 4, mode="replicate")
    rows = functional.conv2d(flat, weight[None, None, :, None])
    return functional.conv2d(rows, weight[None, None, None, :]).view_as(pixels)


def _name_of(arguments: Mapping[str, Any], value: Tensor) -> str:
    return next(name for name, other in arguments.items() if other is value)

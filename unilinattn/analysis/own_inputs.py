"""The texts or images on which models are compared: traces, targets, and the units of a deletion curve."""

import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from unilinattn.errors import InputError, UncoveredError
from unilinattn.evaluation.readers import image_files, open_image
from unilinattn.host.image import is_image
from unilinattn.host.inputs import pixels
from unilinattn.host.labels import token_text
from unilinattn.host.logits import has_logits, logits_of
from unilinattn.host.text import encoded
from unilinattn.methods.targets import position_of
from unilinattn.tracing.trace import Target, Trace, trace

Units = tuple[Float[Tensor, "batch *unit"], Bool[Tensor, "batch *unit"]]
"""Scores of the tokens or patches of one input, and whether each may be removed."""


@dataclass(frozen=True)
class Texts:
    """Texts, of which the model's prediction after the last token is explained. A reader is a model's tokenizer."""

    names: tuple[str, ...]
    unit: ClassVar[str] = "text"

    def __post_init__(self) -> None:
        if not self.names:
            raise InputError("there are no texts; give one or more.")
        for number, text in enumerate(self.names):
            if not isinstance(text, str) or not text.strip():
                got = "empty" if isinstance(text, str) else f"a {type(text).__name__}"
                raise InputError(f"text {number} is {got}; give a text of two tokens or more.")

    def traced(self, number: int, model: str, host: nn.Module, reader: Any) -> Trace:
        """Trace a text; raise `InputError` for fewer than two tokens and for a text that does not fit the model."""
        text = self.names[number]
        try:
            count = encoded(text, reader).arguments["input_ids"].shape[1]
            if count < 2:
                raise InputError("it has 1 token; two or more are needed, the last of which is explained.")
            return trace(host, text, tokenizer=reader)
        except InputError as error:
            raise InputError(f"text {number} with {model!r}: {error}") from error

    def alignment(self, found: Trace, model: str, reader: Any) -> tuple[Hashable, Sequence[int] | None]:
        """Return the texts of the tokens, and no order: positions are those of the sequence.

        Two models read the same parts of a text at the same positions if these texts are equal.
        """
        assert found.ids is not None
        return tuple(token_text(reader, token) for token in found.ids[0].tolist()), None

    def target(self, found: Trace) -> Target | None:
        """Return the last position."""
        return -1

    def units(self, found: Trace, scores: Float[Tensor, "batch key"]) -> Units:
        """Return the scores of the tokens, of which the last stays."""
        candidates = torch.ones(scores.shape, dtype=torch.bool, device=scores.device)
        candidates[:, -1] = False
        return scores, candidates


@dataclass(frozen=True)
class Images:
    """Images, of which the predicted class is explained. A reader is a model's processor.

    Attributes:
        sources: the paths of files, or images as `trace` takes them.
        names: a name for each.
    """

    sources: tuple[Any, ...]
    names: tuple[str, ...]
    unit: ClassVar[str] = "image"

    @classmethod
    def of(cls, images: Any) -> "Images":
        """Return the images of a folder, or those given.

        Raises `InputError` for a folder without images, for a file that is no image, and for other values.
        """
        if isinstance(images, str | os.PathLike):
            files = image_files(images)
            for path in files:
                # All files are read before the first model runs.
                open_image(path)
            return cls(tuple(files), tuple(path.name for path in files))
        given = tuple(images) if isinstance(images, list | tuple) else (images,)
        if not given:
            raise InputError("there are no images; give one or more, or the path of a folder.")
        for number, image in enumerate(given):
            if not is_image(image):
                raise InputError(
                    f"image {number} is a {type(image).__name__}; give PIL images, uint8 arrays (height, width, 3), or "
                    "the path of a folder of images."
                )
        return cls(given, tuple(f"image {number}" for number in range(len(given))))

    def traced(self, number: int, model: str, host: nn.Module, reader: Any) -> Trace:
        """Trace an image; raise `InputError` for one that does not fit the model and for a model without classes."""
        source = self.sources[number]
        try:
            image = open_image(source) if isinstance(source, Path) else source
            found = trace(host, image, processor=reader)
            if not has_logits(found.output) or logits_of(found.output, found.model).ndim != 2:
                raise InputError(f"{found.model} returns no logits of classes, whose prediction could be explained.")
        except InputError as error:
            raise InputError(f"{self.names[number]} with {model!r}: {error}") from error
        return found

    def alignment(self, found: Trace, model: str, reader: Any) -> tuple[Hashable, Sequence[int] | None]:
        """Return the grid of patches and the number of class tokens, and the class tokens followed by the patches."""
        tokens = found.image_tokens
        if tokens is None:
            return model, None
        return (tokens.grid, len(tokens.cls)), (*tokens.cls, *tokens.patches)

    def target(self, found: Trace) -> Target | None:
        """Return the token that the class logits read, None if they read several."""
        try:
            return position_of(found, "cls")
        except InputError:
            return None

    def units(self, found: Trace, scores: Float[Tensor, "batch key"]) -> Units:
        """Return the scores of the patches; raise `UncoveredError` if they are unknown."""
        if (tokens := found.image_tokens) is None:
            raise UncoveredError(
                f"the patches of {found.model} are unknown; register them by `registry.register_image_tokens`."
            )
        patches = scores[:, list(tokens.patches)].unflatten(1, tokens.grid)
        return patches, torch.ones(patches.shape, dtype=torch.bool, device=scores.device)


Samples = Texts | Images


def patch_text(found: Trace) -> str:
    """Return the patches and class tokens of a trace as a text, empty for other inputs and unknown patches."""
    if (tokens := found.image_tokens) is None:
        return ""
    rows, columns = tokens.grid
    count = len(tokens.cls)
    return f"{rows} x {columns} patches, {count} class token{'s' if count != 1 else ''}"


def predicted(found: Trace) -> str:
    """Return the label and the probability of the class that a model predicts."""
    shares = logits_of(found.output, found.model)[0].softmax(-1)
    index = int(shares.argmax())
    labels = getattr(getattr(found.host, "config", None), "id2label", None) or {}
    return f"{labels.get(index, f'class {index}')} ({float(shares[index]):.0%})"


def picture_read(found: Trace, processor: Any) -> np.ndarray:
    """Return the image that a model read, resized and cropped by its processor, as uint8 (height, width, channel).

    The processor's normalisation is undone if it is known; the values are stretched from 0 to 255 otherwise.
    """
    values = pixels(found.arguments)
    assert values is not None
    image = values[0].detach().float().cpu().permute(1, 2, 0)
    mean, deviation = (getattr(processor, name, None) for name in ("image_mean", "image_std"))
    if mean and deviation and getattr(processor, "do_normalize", False):
        image = image * torch.tensor(deviation) + torch.tensor(mean)
    else:
        image = (image - image.min()) / (image.max() - image.min()).clamp(min=1e-12)
    scaled: np.ndarray = (image.clamp(0, 1) * 255).round().to(torch.uint8).numpy()
    return scaled

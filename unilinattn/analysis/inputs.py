"""The inputs of `compare_models`: models with their tokenizers or processors, texts and images."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from unilinattn.errors import InputError, OptionError
from unilinattn.evaluation.readers import image_files, open_image, with_patches
from unilinattn.evaluation.samples import Sample
from unilinattn.host.image import is_image, processed
from unilinattn.host.inputs import pixels
from unilinattn.host.probabilities import log_probabilities, logit_kind
from unilinattn.tracing.trace import Trace


def model_pairs(models: Any, reader: str, shared: Any) -> dict[str, tuple[nn.Module, Any]]:
    """Return the models with their readers, tokenizers or processors."""
    if not isinstance(models, Mapping) or not models:
        raise InputError(f'models is empty or no mapping; give {{"mamba": (model, {reader}), ...}}.')
    pairs = {}
    for name, entry in models.items():
        pair = (entry, shared) if isinstance(entry, nn.Module) and shared is not None else entry
        if not isinstance(pair, tuple) or len(pair) != 2:
            more = ", or also processor=..." if reader == "processor" else ""
            raise InputError(f"models[{name!r}] is a {type(entry).__name__}; give a pair (model, {reader}){more}.")
        pairs[name] = pair
    if shared is not None and reader == "tokenizer":
        raise OptionError("processor is for images; texts have the tokenizers of `models`. Leave it out.")
    return pairs


def named_texts(texts: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the texts as names and as sources."""
    names = (texts,) if isinstance(texts, str) else tuple(texts)
    if not names:
        raise InputError("there are no texts; give one or more.")
    for number, text in enumerate(names):
        if not isinstance(text, str) or not text.strip():
            got = "empty" if isinstance(text, str) else f"a {type(text).__name__}"
            raise InputError(f"text {number} is {got}; give a text of two tokens or more.")
    return names, names


def named_images(images: Any) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Return names and pictures of the images of a folder, or of those given."""
    if isinstance(images, str | os.PathLike):
        files = image_files(images)
        return tuple(path.name for path in files), tuple(map(open_image, files))
    sources = tuple(images) if isinstance(images, list | tuple) else (images,)
    if not sources:
        raise InputError("there are no images; give one or more, or the path of a folder.")
    for number, image in enumerate(sources):
        if not is_image(image):
            raise InputError(
                f"image {number} is a {type(image).__name__}; give PIL images, uint8 arrays (height, width, 3), or "
                "the path of a folder of images."
            )
    return tuple(f"image {number}" for number in range(len(sources))), sources


def samples_of(
    model: str, host: nn.Module, reader: Any, names: Sequence[str], sources: Sequence[Any], unit: str
) -> list[Sample]:
    """Return the samples of a model, of which the last token of a text or the class token of an image is explained."""
    if unit == "text":
        return [Sample(inputs=text, target=-1, name=f"text {number}") for number, text in enumerate(sources)]
    try:
        return with_patches(
            [
                Sample(inputs=processed(image, reader, host), name=name)
                for name, image in zip(names, sources, strict=True)
            ],
            host,
        )
    except InputError as error:
        raise InputError(f"images with {model!r}: {error}") from error


def prediction(trace: Trace) -> str:
    """Return the label and the probability of the class that a model predicts, or a regression's largest output."""
    logits = trace.explained_logit.logits
    index = int(logits[0].argmax())
    labels = getattr(getattr(trace.host, "config", None), "id2label", None) or {}
    log_p = log_probabilities(logits, logit_kind(trace.host, logits))
    number = f"{float(logits[0, index]):.4g}" if log_p is None else f"{float(log_p[0, index].exp()):.0%}"
    return f"{labels.get(index, f'class {index}')} ({number})"


def image_read(trace: Trace, processor: Any) -> np.ndarray:
    """Return the image that a model read, resized and cropped by its processor, as uint8 (height, width, channel).

    The processor's normalisation is undone if it is known; the values are stretched from 0 to 255 otherwise.
    """
    values = pixels(trace.arguments)
    assert values is not None
    image = values[0].detach().float().cpu().permute(1, 2, 0)
    mean, deviation = (getattr(processor, name, None) for name in ("image_mean", "image_std"))
    if mean and deviation and getattr(processor, "do_normalize", False):
        image = image * torch.tensor(deviation, device="cpu") + torch.tensor(mean, device="cpu")
    else:
        image = (image - image.min()) / (image.max() - image.min()).clamp(min=1e-12)
    scaled: np.ndarray = (image.clamp(0, 1) * 255).round().to(torch.uint8).numpy()
    return scaled

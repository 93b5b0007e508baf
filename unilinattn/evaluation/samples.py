"""Samples of a data set: one sequence or image each, with its known answer."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from unilinattn.errors import InputError, OptionError, nearest
from unilinattn.evaluation.metrics import earlier_keys, tensor_text
from unilinattn.examples.tasks import HELD_OUT_SEED, NO_ANSWER, TASKS, Task
from unilinattn.host.inputs import token_ids

MASKS = ("relevant", "possible", "valid")
"""Fields of a `Sample` with one boolean for each key, or for each query and key."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Sample:
    """One sequence or image with its known answer; each metric needs some of the optional fields.

    Attributes:
        inputs: the model's inputs as `unilinattn.trace` takes them, with a batch axis of 1: ids (1, length), pixels
            (1, channel, height, width), a mapping of the model's keyword arguments, or a text.
        target: the explained position, counted over real tokens, negative from their end; None explains every query.
        relevant: (query, key), or (key,) for one target: True at the relevant keys; the sure gold links of an
            alignment.
        possible: possible gold links of an alignment, of the same shape; the sure ones are added to them.
        valid: the keys that are ranked or removed, of the same shape. Default: the keys that reach the query in the
            model's layers (in a causal model those before it), without its own; without a target and a query, all.
        label: the true class, or the id of the true token at the target; by default the model's prediction.
        grid: (rows, columns) of an image's patches, which are the valid keys in order.
        foreground: (height, width), True at the foreground of an image.
        reference: values that replace removed tokens or patches under masking="reference", of the shape of the ids or
            pixels in `inputs`: the same image without its object, for example.
        name: name in tables, by default the sample's position in the data.

    Raises `InputError` for a mask that is not boolean or of the wrong size.
    """

    inputs: Any
    target: int | None = None
    relevant: Bool[Tensor, "*query key"] | None = None
    possible: Bool[Tensor, "*query key"] | None = None
    valid: Bool[Tensor, "*query key"] | None = None
    label: int | None = None
    grid: tuple[int, int] | None = None
    foreground: Bool[Tensor, "height width"] | None = None
    reference: Tensor | None = None
    name: str = ""

    def __post_init__(self) -> None:
        arguments = self.inputs if isinstance(self.inputs, Mapping) else {"input_ids": self.inputs}
        ids = token_ids(arguments)
        for name in MASKS:
            if (mask := getattr(self, name)) is not None:
                _check_mask(name, mask, None if ids is None else ids.shape[1])
        shapes = {name: tuple(mask.shape) for name in MASKS if (mask := getattr(self, name)) is not None}
        if len(set(shapes.values())) > 1:
            listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
            raise InputError(f"The masks of a sample have one shape, (query, key) or (key,); got {listed}.")
        if self.grid is not None and not (len(self.grid) == 2 and min(self.grid) > 0):
            raise InputError(f"grid={self.grid!r}; give the positive numbers (rows, columns) of the patches.")
        if self.foreground is not None:
            _check_foreground(self.foreground, arguments)


def task_samples(task: str | Task, count: int, *, seed: int = HELD_OUT_SEED, target: int | None = None) -> list[Sample]:
    """Return `count` sequences of a task of the trained examples, with the keys that hold their answers.

    Every query with an answer is explained, or one position `target`. The candidates are the keys before the query;
    an answer at the query itself does not count. `seed`: by default that of the held-out sequences; layers are chosen
    on those of `examples.tasks.SELECTION_SEED`.

    Raises `OptionError` for an unknown task, and `InputError` for a target without an answer.
    """
    if isinstance(task, str):
        if task not in TASKS:
            raise OptionError(f"unknown task {task!r}{nearest(task, TASKS)}")
        task = TASKS[task]
    batch = task.sample(count, seed)
    earlier = earlier_keys(task.length)
    samples: list[Sample] = []
    for ids, labels, answers in zip(batch.input_ids, batch.labels, batch.relevant, strict=True):
        relevant = answers & earlier
        asked = relevant.any(-1)
        label = None
        if target is not None:
            if not -task.length <= target < task.length or not bool(asked[target]):
                positions = asked.nonzero().flatten().tolist()
                raise InputError(
                    f"target {target} of sequence {len(samples)} of {task.name} has no answer among the keys before "
                    f"it; positions that have one: {positions}."
                )
            label = int(labels[target])
        # Rows without an answer have no candidates, so that no metric counts them.
        samples.append(
            Sample(inputs=ids[None], target=target, relevant=relevant, valid=earlier & asked[:, None], label=label)
        )
    assert NO_ANSWER not in [sample.label for sample in samples]
    return samples


def fingerprint(*values: Any) -> str:
    """Return a hash of plain values, tensors and mappings of them, and of the fields of samples."""
    digest = hashlib.sha256()
    for value in values:
        _hash(digest, value)
    return digest.hexdigest()[:16]


def _hash(digest: Any, value: Any) -> None:
    if isinstance(value, Sample):
        value = {field.name: getattr(value, field.name) for field in fields(Sample)}
    if isinstance(value, Tensor):
        digest.update(f"{value.dtype} {tuple(value.shape)};".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for name in sorted(value):
            digest.update(f"{name}:".encode())
            _hash(digest, value[name])
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for entry in value:
            _hash(digest, entry)
    else:
        digest.update(f"{value!r};".encode())


def _check_mask(name: str, mask: Any, length: int | None) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.ndim not in (1, 2):
        raise InputError(
            f"{name} must be a boolean tensor (query, key), or (key,) for one target; got {tensor_text(mask)}."
        )
    if length is not None and any(size != length for size in mask.shape):
        raise InputError(
            f"{name} of shape {tuple(mask.shape)} does not fit {length} tokens; give ({length}, {length}), or "
            f"({length},) for one target."
        )


def _check_foreground(foreground: Any, arguments: Mapping[str, Any]) -> None:
    if not isinstance(foreground, Tensor) or foreground.dtype != torch.bool or foreground.ndim != 2:
        raise InputError(f"foreground must be a boolean tensor (height, width); got {tensor_text(foreground)}.")
    for value in arguments.values():
        image = isinstance(value, Tensor) and value.ndim == 4 and value.is_floating_point()
        if image and value.shape[2:] != foreground.shape:
            raise InputError(
                f"foreground of shape {tuple(foreground.shape)} does not fit an image of {value.shape[2]} x "
                f"{value.shape[3]} pixels; give one value for each pixel."
            )


def function_name(function: Any) -> str:
    """Return the name by which a record knows a function, the same in every run; a partial one with its arguments."""
    if isinstance(function, partial):
        arguments = [*map(repr, function.args), *(f"{name}={value!r}" for name, value in function.keywords.items())]
        return f"{function_name(function.func)}({', '.join(arguments)})"
    return getattr(function, "__qualname__", None) or repr(function)

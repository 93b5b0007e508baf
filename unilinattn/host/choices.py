"""Models that read several texts as one input, such as the answers to a question: each of them is a sequence."""

from collections.abc import Callable, Mapping
from functools import wraps
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from unilinattn.call.exactness import layer_tolerance, relative_error
from unilinattn.call.nested import mapped
from unilinattn.errors import InputError, UnilinattnError
from unilinattn.host.indices import checked_indices
from unilinattn.host.logits import logits_in
from unilinattn.host.run import run

IDS = "input_ids"

_copies: "WeakKeyDictionary[nn.Module, nn.Module]" = WeakKeyDictionary()
"""A copy of each model that reads one choice a sequence."""


def choices_as_sequences(model: nn.Module, inputs: Any) -> tuple[nn.Module, Any]:
    """Return a model that reads ids (batch * choice, length), and its inputs, for ids (batch, choice, length).

    It shares modules and weights with `model`, which returns a logit for each choice, (batch, choice); the copy returns
    them as (batch * choice, 1). Other inputs and their model are returned unchanged. Runs the model twice.

    Raises `InputError` for ids with three axes of a model that does not score each choice by its own tokens.
    """
    ids: Any = inputs.get(IDS) if isinstance(inputs, Mapping) else inputs
    is_bare = isinstance(inputs, Tensor) and getattr(model, "main_input_name", None) == IDS
    whole = isinstance(ids, Tensor) and not ids.is_floating_point() and ids.dtype != torch.bool
    if not whole or ids.ndim != 3 or not ids.numel() or not (is_bare or isinstance(inputs, Mapping)):
        return model, inputs
    named = {IDS: inputs} if is_bare else dict(inputs)
    rows = {k: v.flatten(0, 1) if isinstance(v, Tensor) and v.shape == ids.shape else v for k, v in named.items()}
    copied = _copied(model)
    seed = torch.get_rng_state()
    try:
        with checked_indices(model):
            scores = logits_in(run(model, named, seed=seed))
            by_row = logits_in(run(copied, rows, seed=seed)) if _of_choices(scores, ids, named) else None
    except (UnilinattnError, torch.OutOfMemoryError):
        raise
    # A host may raise any error for ids with another axis.
    except Exception:
        raise InputError(
            f"input_ids are {ids.dtype} of shape {tuple(ids.shape)}; integer token ids of shape (batch, length) are "
            "needed, (batch, choice, length) for a model that returns a logit for each choice, (batch, choice), or "
            "(batch, length, codebook) for one that adds the vectors of several codebooks."
        ) from None
    if scores is None or by_row is None or by_row.shape != (scores.numel(), 1):
        return model, inputs
    error = relative_error(by_row.detach().reshape(1, -1), scores.detach().reshape(1, -1))
    if not error <= layer_tolerance(scores.dtype):
        raise InputError(
            f"the logit of a choice of {type(model).__name__} depends on the other choices (by {error:.1e}), so a "
            "choice is no sequence by itself."
        )
    return copied, rows


def _of_choices(scores: Tensor | None, ids: Tensor, arguments: Mapping[str, Any]) -> bool:
    """Tell whether a model returned a logit for each choice, and not those of the tokens of several codebooks."""
    if scores is None or scores.shape != ids.shape[:2]:
        return False
    if arguments.get("labels") is not None:
        raise InputError("labels make a loss over the choices of a question; leave them out, each choice is explained.")
    return True


def _copied(model: nn.Module) -> nn.Module:
    """Return the copy of a model, with the present attributes and modules of it."""
    copied = _copies.get(model)
    if copied is None:
        copied = _copies[model] = object.__new__(type(model))
    vars(copied).clear()
    vars(copied).update(vars(model), _modules=dict(model._modules))
    # Bound, so that that of a deep copy is the copy's own.
    vars(copied)["forward"] = MethodType(_forward_of(type(model)), copied)
    return copied


def _forward_of(cls: type[nn.Module]) -> Callable[..., Any]:
    """Return a forward that reads each sequence as the only choice of a question."""

    @wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        arguments = [*args, kwargs.get(IDS), kwargs.get("inputs_embeds")]
        tokens = next(x.shape[:2] for x in arguments if isinstance(x, Tensor) and x.ndim > 1)

        def as_choices(x: Tensor) -> Tensor:
            return x.unsqueeze(1) if x.ndim > 1 and x.shape[:2] == tokens else x

        args, kwargs = mapped((args, kwargs), as_choices)
        return cls.forward(self, *args, **kwargs)

    return forward

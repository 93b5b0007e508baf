"""Restrict the logits that a language model computes to the required positions."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from unilinattn.errors import InputError

KEEP = "logits_to_keep"
"""Name of the hosts' argument with the number of last positions or the positions to compute; 0 means all."""

Logit = int | tuple[int, int] | Callable[[Any], Tensor] | None
"""A token or class id, a pair (their difference), a scalar function of the output, or None for the prediction."""


def logits_at(
    model: nn.Module,
    given: Mapping[str, Any],
    positions: Callable[[], Sequence[Int[Tensor, " position"]]],
    *,
    above: int,
) -> dict[str, Any]:
    """Return the arguments of a model with `logits_to_keep` set to `positions`, if the model accepts it.

    The arguments are unchanged for inputs of at most `above` tokens, if they have `logits_to_keep` already, and if they
    have `labels`, whose loss needs all logits.
    """
    ids = given.get("input_ids", given.get("inputs_embeds"))
    length = ids.shape[1] if isinstance(ids, Tensor) and ids.ndim > 1 else 0
    needs_all = KEEP in given or given.get("labels") is not None
    if length <= above or needs_all or KEEP not in inspect.signature(model.forward).parameters:
        return dict(given)
    wanted = (torch.cat(list(positions())) % length).unique()
    return {**given, KEEP: wanted.to(ids.device) if isinstance(ids, Tensor) else wanted}


def has_logits(output: Any) -> bool:
    """Tell whether a model's output has logits. Some vision models return the tensor of class logits itself."""
    return (isinstance(output, Tensor) and output.ndim == 2) or isinstance(getattr(output, "logits", None), Tensor)


def logits_of(output: Any, model: str) -> Float[Tensor, "batch *position token"]:
    """Return the logits in the output of a model; raise `InputError` with the model's name if it has none."""
    if not has_logits(output):
        raise InputError(
            f"{model} returns no logits; give `logit` as a function of its output, such as "
            "lambda out: out.last_hidden_state[:, -1, 0]."
        )
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits


def positions_of(
    target: int | Sequence[int] | Int[Tensor, " batch"], real: Bool[Tensor, "batch length"]
) -> Int[Tensor, " batch"]:
    """Return the position in each sequence of a target, which counts the tokens that are `real`.

    Raises `InputError` if a sequence has no such real token, and for a target of another type or size.
    """
    batch = real.shape[0]
    try:
        wanted = torch.as_tensor(target)
    except (TypeError, ValueError, RuntimeError):
        wanted = torch.zeros(0, dtype=torch.bool)
    if wanted.is_floating_point() or wanted.dtype == torch.bool or wanted.ndim > 1:
        raise InputError(f"target {target!r} is no position; give an int, or a list with one int a sequence.")
    if wanted.ndim == 1 and wanted.numel() != batch:
        raise InputError(f"target names {wanted.numel()} positions for {batch} sequences; give one each, or one int.")
    places = []
    for b, t in enumerate(wanted.expand(batch).tolist()):
        tokens = real[b].nonzero().squeeze(1)
        if not -len(tokens) <= t < len(tokens):
            raise InputError(f"target {t} is out of range: sequence {b} has {len(tokens)} real positions.")
        places.append(int(tokens[t]))
    return torch.tensor(places)


def logits_wanted(logit: Any) -> list[int]:
    """Return the ids of one logit or of a pair, an empty list for None; raise `InputError` for anything else."""
    try:
        wanted = [] if logit is None else [index(w) for w in (logit if isinstance(logit, tuple | list) else (logit,))]
    except TypeError:
        wanted = [0] * 3
    if len(wanted) > 2:
        raise InputError(
            f"logit {logit!r} is no token or class id; give an int, a pair of them for the difference, a function of "
            "the model's output, or None for its own prediction."
        )
    return wanted


def kept_positions(given: Mapping[str, Any], length: int) -> Int[Tensor, " position"] | None:
    """Return the positions of the logits that a model computed, None for all.

    Raises `InputError` if `logits_to_keep` is neither an int nor a tensor with one axis of positions.
    """
    keep = given.get(KEEP, 0)
    if isinstance(keep, int):
        return torch.arange(max(0, length - keep), length) if keep else None
    if not isinstance(keep, Tensor) or keep.ndim != 1 or keep.dtype == torch.bool:
        raise InputError(f"{KEEP} is {keep!r}; give an int, or a tensor with one axis of positions.")
    return keep.cpu() % length


def places_of(positions: Int[Tensor, " batch"], kept: Int[Tensor, " position"]) -> Int[Tensor, " batch"]:
    """Return the index of each of `positions` in `kept`; raise `InputError` for one that is not in it."""
    matches = positions[:, None] == kept
    missing = positions[~matches.any(1)].tolist()
    if missing:
        raise InputError(
            f"the model computed no logits for position {missing[0]}: the inputs have {KEEP} without it. Add "
            "it there, or leave the argument out."
        )
    return matches.long().argmax(1)


def chosen_ids(logits: Float[Tensor, "*batch token"], logit: Logit) -> Int[Tensor, "*batch id"]:
    """Return the ids of one logit or of a pair, by default those of the predictions; not for a function.

    Raises `InputError` for an id that is out of range.
    """
    wanted = logits_wanted(logit)
    if any(not 0 <= one < logits.shape[-1] for one in wanted):
        raise InputError(f"logit {logit} is out of range: the model has logits 0 to {logits.shape[-1] - 1}.")
    if not wanted:
        return logits.argmax(-1, keepdim=True)
    return torch.tensor(wanted, device=logits.device).expand(*logits.shape[:-1], -1)


def picked(logits: Float[Tensor, "*batch token"], ids: Int[Tensor, "*batch id"]) -> Float[Tensor, "*batch"]:
    """Return one logit, or the difference of two."""
    values = logits.gather(-1, ids)
    return values[..., 0] - (values[..., 1] if values.shape[-1] == 2 else 0)


def one_each(value: Any, count: int) -> Float[Tensor, " run"]:
    """Return the numbers of a function of the output, in float32 or more.

    Raises `InputError` unless there is a number for each of `count` sequences.
    """
    if not isinstance(value, Tensor) or value.shape != (count,):
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise InputError(
            f"the function `logit` returned {shape} for {count} sequences; it returns a number for each sequence, such "
            "as lambda out: out.logits[:, -1, 5]."
        )
    return value.to(torch.promote_types(value.dtype, torch.float32))

"""Restrict the logits that a language model computes to the required positions."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from unilinattn.errors import InputError

KEEP = "logits_to_keep"
"""Name of the hosts' argument with the number of last positions or the positions to compute; 0 means all."""


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

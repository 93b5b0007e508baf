"""Which positions a language model computes logits for: at length those that are asked for alone."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from unilinattn import standins
from unilinattn.errors import InputError

KEEP = "logits_to_keep"
"""What hosts call the argument: how many positions at the end, or which ones; 0 keeps all."""


def logits_at(
    model: nn.Module, given: Mapping[str, Any], positions: Callable[[], Sequence[Int[Tensor, " position"]]]
) -> dict[str, Any]:
    """Add the positions that are asked for to a model's arguments, where it takes them and the input is long.

    Short inputs, and arguments that say what to keep or that ask for a loss, which needs them all, stay as they are.
    """
    ids = given.get("input_ids", given.get("inputs_embeds"))
    length = ids.shape[1] if isinstance(ids, Tensor) and ids.ndim > 1 else 0
    needs_all = KEEP in given or given.get("labels") is not None
    if length <= standins.AT_LENGTH or needs_all or KEEP not in inspect.signature(model.forward).parameters:
        return dict(given)
    kept = (torch.cat(list(positions())) % length).unique()
    return {**given, KEEP: kept.to(ids.device) if isinstance(ids, Tensor) else kept}


def kept_positions(given: Mapping[str, Any], length: int) -> Int[Tensor, " position"] | None:
    """Return the positions that a model kept logits for, None for all.

    Raises `InputError` for anything but a number of positions or a list of them.
    """
    keep = given.get(KEEP, 0)
    if isinstance(keep, int):
        return torch.arange(max(0, length - keep), length) if keep else None
    if not isinstance(keep, Tensor) or keep.ndim != 1 or keep.dtype == torch.bool:
        raise InputError(f"{KEEP} is {keep!r}; give an int, or a tensor with one axis of positions.")
    return keep.cpu() % length


def places_of(positions: Int[Tensor, " batch"], kept: Int[Tensor, " position"]) -> Int[Tensor, " batch"]:
    """Return where positions stand among those that were kept; raise `InputError` for one that was not."""
    found = positions[:, None] == kept
    missing = positions[~found.any(1)].tolist()
    if missing:
        raise InputError(
            f"the model computed no logits for position {missing[0]}: the inputs say {KEEP}, which leaves it out. Add "
            "it there, or leave the argument out."
        )
    return found.long().argmax(1)

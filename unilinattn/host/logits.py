"""Restrict the logits that a language model computes to the required positions."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from operator import index
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from unilinattn.errors import InputError
from unilinattn.host.vectors import example
from unilinattn.options.bases import Relative

KEEP = "logits_to_keep"
"""Name of the hosts' argument with the number of last positions or the positions to compute; 0 means all."""

LEAST = 64
"""Logits this far below the largest count as absent in log-odds, which they change by less than exp(-64) each."""

Logit = int | tuple[int, int] | Relative | Callable[[Any], Tensor] | None
"""A token or class id, a pair (their difference), a scalar function of the output, or None for the prediction."""


def logits_at(
    model: nn.Module,
    arguments: Mapping[str, Any],
    positions: Callable[[], Sequence[Int[Tensor, " position"]]],
    *,
    above: int,
) -> dict[str, Any]:
    """Return the arguments of a model with `logits_to_keep` set to `positions`, if the model accepts it.

    The arguments are unchanged for inputs of at most `above` tokens, if they have `logits_to_keep` already or `labels`,
    whose loss needs all logits, and for a model in which `logits_to_keep` restricts more than logits.
    """
    ids = arguments.get("input_ids", arguments.get("inputs_embeds"))
    length = ids.shape[1] if isinstance(ids, Tensor) and ids.ndim > 1 else 0
    needs_all = KEEP in arguments or arguments.get("labels") is not None
    if length <= above or needs_all or not _keeps_logits_only(model):
        return dict(arguments)
    wanted = torch.cat(list(positions())).unique()
    return {**arguments, KEEP: wanted.to(ids.device) if isinstance(ids, Tensor) else wanted}


def keeps_logits(model: nn.Module) -> bool:
    """Tell whether a model accepts `logits_to_keep`, so that a run may compute the logits of some positions only."""
    return _accepts_keep(type(model).forward)


def plain_sizes(model: nn.Module) -> frozenset[int]:
    """Return the sizes of the last axis by which a tensor (batch, position, token) has the logits of a model's ids.

    They are the sizes of its tables of embeddings, but for the widths of these, which the vectors of tokens have.
    """
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return frozenset({table.num_embeddings for table in tables} - {table.embedding_dim for table in tables})


def logits_of(
    output: Any,
    model: str,
    tokens: tuple[int, ...] | None = None,
    computed: Int[Tensor, " position"] | None = None,
    *,
    sizes: Collection[int] = (),
) -> Float[Tensor, "batch *position token"]:
    """Return the logits in the output of a model: (batch, class), or (batch, position, token).

    They are the entry `logits` of an output or dictionary, or the output itself if it is a tensor of at most two axes,
    as of some vision models, or of three with one of `sizes` in the last one. One number for each sequence is one
    logit.

    Args:
        output: the model's output.
        model: name of the model, for errors.
        tokens: (batch, length) of the model's layers; None does not compare the logits with it.
        computed: positions of the logits that the model computed, None for all.
        sizes: those of `plain_sizes`, for a model of ids.

    Raises `InputError` for an output without logits, and if they are those of other sequences or positions.
    """
    logits, named, plain = logits_in(output, sizes), _entry(output), _only_tensor(output)
    if logits is None:
        state = f"logits of shape {tuple(named.shape)}" if isinstance(named, Tensor) else "no logits"
        reason = (
            f" The tensor of shape {tuple(plain.shape)} that it returns would be logits if its last axis had one for "
            "each of the model's ids, and vectors of tokens another size."
            if plain is not None and plain.ndim == 3
            else ""
        )
        raise InputError(
            f"{model} returns {state}; give `logit` as a function of its output, such as {example(output)}." + reason
        )
    if tokens is None:
        return logits
    length = tokens[1] if computed is None else len(computed)
    if logits.shape[0] != tokens[0] or (logits.ndim == 3 and logits.shape[1] != length):
        rows, rest = divmod(logits.shape[0], tokens[0])
        raise InputError(
            f"{model} returns logits of shape {tuple(logits.shape)}, and its layers have {tokens[0]} sequences of "
            f"{tokens[1]} tokens, so a target does not name a row of logits; give `logit` as a function of its output, "
            f"such as {example(output, rows=1 if rest else rows)}."
        )
    return logits


def logits_in(output: Any, sizes: Collection[int] = ()) -> Float[Tensor, "batch *position token"] | None:
    """Return the logits of `logits_of`, None for an output without them."""
    entry, plain = _entry(output), _only_tensor(output)
    if isinstance(output, Tensor):
        entry = output if output.ndim in (1, 2) else None
    if plain is not None and plain.ndim == 3 and plain.shape[-1] in sizes:
        entry = plain
    if not isinstance(entry, Tensor) or not 1 <= entry.ndim <= 3:
        return None
    return entry.unsqueeze(-1) if entry.ndim == 1 else entry


def _only_tensor(output: Any) -> Tensor | None:
    """Return an output that is a tensor, or the only tensor beside None in a tuple, such as (logits, no loss)."""
    values = list(output) if type(output) in (tuple, list) else [output]
    present = [value for value in values if value is not None]
    return present[0] if len(present) == 1 and isinstance(present[0], Tensor) else None


def _entry(output: Any) -> Any:
    return output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)


def _keeps_logits_only(model: nn.Module) -> bool:
    """Tell whether a model accepts `logits_to_keep`, and every module that does has a language model's head.

    A classifier picks its token among the kept ones, and Gemma 4 computes its last layers at kept positions only.
    """
    if not keeps_logits(model):
        return False
    modules = [module for module in model.modules() if _accepts_keep(type(module).forward)]
    heads = (getattr(module, "get_output_embeddings", lambda: True) for module in modules)
    return all(head() is not None for head in heads)


@cache
def _accepts_keep(forward: Callable[..., Any]) -> bool:
    return KEEP in inspect.signature(forward).parameters


def positions_of(
    target: int | Sequence[int] | Int[Tensor, " batch"], real: Bool[Tensor, "batch length"]
) -> Int[Tensor, " batch"]:
    """Return the position in each sequence of a target, which counts the tokens that are `real`.

    Raises `InputError` if a sequence has no such real token, and for a target of another type or size.
    """
    batch = real.shape[0]
    try:
        targets = torch.as_tensor(target, device=real.device)
    except (TypeError, ValueError, RuntimeError):
        targets = real.new_zeros(0)
    if targets.is_floating_point() or targets.dtype == torch.bool or targets.ndim > 1:
        raise InputError(f"target {target!r} is no position; give an int, or a list with one int a sequence.")
    if targets.ndim == 1 and targets.numel() != batch:
        raise InputError(f"target names {targets.numel()} positions for {batch} sequences; give one each, or one int.")
    targets, counts = targets.expand(batch), real.sum(1)
    outside = (targets < -counts) | (targets >= counts)
    if bool(outside.any()):
        b = int(outside.nonzero()[0])
        raise InputError(f"target {int(targets[b])} is out of range: sequence {b} has {int(counts[b])} real positions.")
    number = torch.where(targets < 0, targets + counts, targets)
    return (real & (real.cumsum(1) == number[:, None] + 1)).int().argmax(1).cpu()


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


def kept_positions(arguments: Mapping[str, Any], length: int) -> Int[Tensor, " position"] | None:
    """Return the positions of the logits that a model computed, None for all.

    Raises `InputError` if `logits_to_keep` is neither an int nor a tensor with one axis of positions.
    """
    keep = arguments.get(KEEP, 0)
    if isinstance(keep, int):
        return torch.arange(max(0, length - keep), length, device="cpu") if keep else None
    if not isinstance(keep, Tensor) or keep.ndim != 1 or keep.dtype == torch.bool:
        raise InputError(f"{KEEP} is {keep!r}; give an int, or a tensor with one axis of positions.")
    return keep.cpu() % length


def at_positions(
    logits: Float[Tensor, "batch position token"],
    positions: Int[Tensor, " batch"],
    computed: Int[Tensor, " position"] | None,
) -> Float[Tensor, "batch token"]:
    """Return the logits at one position of each sequence; `computed` are the positions that have logits, None for all.

    Raises `InputError` for a position without logits.
    """
    rows = positions
    if computed is not None:
        matches = positions[:, None] == computed
        missing = positions[~matches.any(1)].tolist()
        if missing:
            raise InputError(
                f"the model computed no logits for position {missing[0]}: the inputs have {KEEP} without it. Add "
                "it there, or leave the argument out."
            )
        rows = matches.long().argmax(1)
    return logits[torch.arange(len(logits), device=logits.device), rows.to(logits.device)]


def chosen_ids(logits: Float[Tensor, "*batch token"], logit: Logit) -> Int[Tensor, "*batch id"]:
    """Return the ids of one logit or of a pair, by default those of the predictions; not for a function.

    Raises `InputError` for an id that is out of range.
    """
    wanted = logits_wanted(logit)
    if any(not 0 <= id_ < logits.shape[-1] for id_ in wanted):
        last = logits.shape[-1] - 1
        numbers = f"logits 0 to {last}" if last else "one logit for each sequence, 0"
        raise InputError(f"logit {logit} is out of range: the model has {numbers}.")
    if not wanted:
        return logits.argmax(-1, keepdim=True)
    return torch.tensor(wanted, device=logits.device).expand(*logits.shape[:-1], -1)


def picked(logits: Float[Tensor, "*batch token"], ids: Int[Tensor, "*batch id"]) -> Float[Tensor, "*batch"]:
    """Return one logit, or the difference of two."""
    values = logits.gather(-1, ids)
    return values[..., 0] - (values[..., 1] if values.shape[-1] == 2 else 0)


def relative(
    logits: Float[Tensor, "*batch token"], ids: Int[Tensor, "*batch 1"], measure: str
) -> Float[Tensor, "*batch"]:
    """Return one logit less the mean of all, or the log-odds of its token (see `Relative`), in float32 or more."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    value = picked(logits, ids)
    if logits.shape[-1] == 1:
        return value
    if measure == "centered":
        return value - logits.mean(-1)
    others = logits.scatter(-1, ids, -torch.inf)
    # The gradient at smaller logits would be below the normal numbers, which make products slow.
    least = others.detach().amax(-1, keepdim=True) - LEAST
    return value - others.masked_fill(others < least, -torch.inf).logsumexp(-1)


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

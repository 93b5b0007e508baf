"""`logit`: the exact share of each token in a logit, through the whole frozen model."""

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from unilinattn.memory import allowed
from unilinattn.methods.options import ScalarOptions
from unilinattn.methods.results import allocate_scores, make_result, result_shape
from unilinattn.methods.selection import every_position, layers_from, only_target, query_rows
from unilinattn.progress import progress
from unilinattn.registry import register_method
from unilinattn.results.attribution import Attribution
from unilinattn.results.estimate import Estimate, LayerCost
from unilinattn.tracing.frozen import By
from unilinattn.tracing.shares import Shares
from unilinattn.tracing.trace import Target, Trace

EXTRAS: Mapping[By, tuple[str, ...]] = {
    "tokens": ("bias", "remainder", "logit", "gap"),
    "depth": ("bias", "remainder", "logit", "gap"),
    "layer": ("bias", "part", "logit", "gap"),
}
"""The extras with the axes of the scores but `key`."""


class LogitOptions(ScalarOptions):
    """Options of `logit`."""

    by: By = Field(
        "tokens",
        description="shares of the tokens' embeddings; by 'depth' of the stream that enters each layer's block; by "
        "'layer' the part of the logit that passes through each layer's output, sum_i g_i . T_ij x_j",
    )

    @property
    def has_layer_axis(self) -> bool:
        """Whether the scores have a layer axis: by depth and by layer."""
        return self.by != "tokens"


def cost(trace: Trace, *, target: Target | None = None, **options: Any) -> Estimate:
    """Return the cost of `logit`: a run of the model whose graph is kept, and a backward pass for each target."""
    chosen = LogitOptions.of("logit", options)
    return shares_estimate(trace, "logit", target, chosen, by=chosen.by)


def shares_estimate(
    trace: Trace, method: str, target: Target | None, options: ScalarOptions, *, rule: str = "freeze", by: By = "tokens"
) -> Estimate:
    """Return the cost of `shares_result`."""
    layers = layers_from(trace, method, 0)
    target = only_target(trace, target, options.logit)
    sizes, dtype = result_shape(layers, target, options)
    shape = tuple(sizes.values())
    row = LayerCost("frozen run", "forward and backward pass", trace.frozen_cost(shape[-2], rule=rule))
    doubles = prod(shape[:-1]) * len(EXTRAS[by]) + (prod(shape) if by == "tokens" else 0)
    result = prod(shape) * dtype.itemsize + doubles * torch.float64.itemsize
    shape = shape if target is None else (*shape[:-2], shape[-1])
    return Estimate(method, shape, result, 0, (row,), allowed())


@register_method("logit", options=LogitOptions, cost=cost, needs=("logit", "frozen run"))
def logit(trace: Trace, *, target: Target | None = None, **options: Any) -> Attribution:
    """Exact shares of the tokens in a logit, which add up to it with the bias: gradient x embedding, model frozen.

    Every factor that the input decided is frozen: the layers are their operators, and in the code between them slopes
    of activations, scales of norms, gates and routers' weights are constants, as in MambaLRP (Jafari et al., 2024)
    without its half rule. The logit, that of the model's prediction at the target or of the option `logit`, is then an
    affine function of the tokens' embeddings. Without a target row i explains the logit at position i, a backward pass
    for each token. A model with one vector of logits for each sequence, or a function as `logit`, has no query axis.

    Scores: (batch, query, key), without `query` for a target, and with a `layer` axis in front by depth and by layer.
    Extras, with the same axes but `key`: `bias`, the share of biases and other constants; `remainder`, the part that is
    not linear in the output, zero for a logit; `logit`, the explained value; and `gap`, the absolute difference between
    it and the sum of the parts.

    - by="tokens": shares + bias + remainder = logit. The extra `embedding`, with the axes of the scores, is the part of
      each share from constants that are added to the token's embedding, such as its position.
    - by="depth": row l has the shares of the stream that enters the block of layer l, and `bias` those of the constants
      that are added later: shares + bias + remainder = logit in every row.
    - by="layer": row l has sum_i g_i . T_ij x_j, where g is the gradient at the output y of layer l and x its input,
      and `bias` is sum_i g_i . b_i: shares + bias = `part`, the part sum_i g_i . y_i of the logit that passes through
      the layer. Parts of several layers overlap, since what passes through one layer may pass through later ones.

    `completeness_gap` is the largest gap relative to the logit.

    Options: `LogitOptions`. Raises `OptionError` for an unknown option or value, `InputError` for a model without
    logits, `UncoveredError` for code without a frozen form, and `ExactnessError` if the shares miss their sum; with
    trust="warn" the result keeps a warning instead.
    """
    chosen = LogitOptions.of("logit", options)
    return shares_result(trace, "logit", target, chosen, by=chosen.by)


def shares_result(
    trace: Trace, method: str, target: Target | None, options: ScalarOptions, *, rule: str = "freeze", by: By = "tokens"
) -> Attribution:
    """Return the shares of a frozen run by a rule as the result of a method, with the `EXTRAS` of `by`."""
    layers = layers_from(trace, method, 0)
    target = only_target(trace, target, options.logit)
    scores = allocate_scores(method, layers, target, options)
    extras = {name: scores.new_zeros(scores.shape[:-1], dtype=torch.float64) for name in EXTRAS[by]}
    if by == "tokens":
        extras["embedding"] = scores.new_zeros(scores.shape, dtype=torch.float64)
    targets = every_position(trace) if target is None else [target]
    run = trace.frozen(None if callable(options.logit) else targets, rule=rule)
    for position in progress(targets, method):
        shares = run.complete_shares(position, options.logit, by=by)
        if target is None:
            rows = query_rows(trace, layers[0], position).squeeze(1).to(scores.device)
        else:
            rows = torch.zeros(scores.shape[-3], dtype=torch.long, device=scores.device)
        tokens = shares.tokens if shares.parts is None else shares.parts.tokens
        write_rows(scores, rows, tokens, layered=by != "tokens")
        for name, values in _extras(shares, by).items():
            write_rows(extras[name], rows, values, layered=by != "tokens")
    size = extras["logit"].abs().clamp_min(torch.finfo(torch.float64).tiny)
    gap = float((extras["gap"] / size).max())
    if target is not None:
        scores = scores.squeeze(-2)
        extras = {name: values.squeeze(-2 if name == "embedding" else -1) for name, values in extras.items()}
    axes = ("layer", "batch", "query", "key") if by != "tokens" else ("batch", "query", "key")
    return make_result(
        trace,
        method,
        layers,
        scores,
        dims=tuple(axis for axis in axes if target is None or axis != "query"),
        options=options,
        target=target,
        scope=None,
        extras=extras,
        completeness_gap=gap,
        warnings=() if run.doubt is None else (run.doubt,),
    )


def _extras(shares: Shares, by: By) -> dict[str, Tensor]:
    """Return the extras of one target; those without a layer axis hold for every layer."""
    parts, sums = shares.parts, {"remainder": shares.remainder, "logit": shares.value}
    if parts is None:
        return {**sums, "bias": shares.bias, "gap": shares.gap, "embedding": shares.embedding}
    if by == "layer":
        return {"bias": parts.bias, "part": parts.value, "logit": shares.value, "gap": parts.gap}
    total = parts.tokens.sum(-1) + parts.bias + shares.remainder
    return {**sums, "bias": parts.bias, "gap": (total - shares.value).abs()}


def write_rows(
    out: Float[Tensor, "*axes"], rows: Int[Tensor, " batch"], values: Float[Tensor, "*part"], *, layered: bool = False
) -> None:
    """Write one row of each sequence into (batch, row[, key]), with a layer axis in front if `layered`."""
    batch, rows = torch.arange(len(rows), device=out.device), rows.to(out.device)
    out[(slice(None), batch, rows) if layered else (batch, rows)] = values.to(out)

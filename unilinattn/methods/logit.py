"""`logit`: the exact share of each token in a logit, through the whole frozen model."""

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unilinattn.frozen.passes import FREEZE, Rule
from unilinattn.frozen.run import By, FrozenRun, frozen
from unilinattn.frozen.shares import Shares
from unilinattn.options import Logit
from unilinattn.options.bases import ScalarOptions
from unilinattn.progress import progress
from unilinattn.registry import register_method
from unilinattn.results.attribution import Attribution
from unilinattn.results.estimate import Estimate, LayerCost
from unilinattn.scoring.base import Scoring, relative_gap
from unilinattn.scoring.joint import Axes
from unilinattn.scoring.selection import every_position, layers_from, only_target
from unilinattn.tracing.token_streams import streams_read
from unilinattn.tracing.trace import Target, Trace

READ = 1e-4
"""Largest share of padding, in units of the largest share of its sequence, that is rounding."""

EXTRAS: Mapping[By, tuple[str, ...]] = {
    "tokens": ("bias", "remainder", "logit", "gap", "cancellation"),
    "depth": ("bias", "remainder", "logit", "gap", "cancellation"),
    "layer": ("bias", "part", "logit", "gap"),
}
"""The extras with the axes of the scores but `key`."""


def cost(trace: Trace, options: Logit, *, target: Target | None = None) -> Estimate:
    """Return the cost of `logit`: a run of the model whose graph is kept, and a backward pass for each target."""
    return shares_estimate(trace, options, target, by=options.by)


def shares_estimate(
    trace: Trace, options: ScalarOptions, target: Target | None, *, rule: str = "freeze", by: By = "tokens"
) -> Estimate:
    """Return the cost of `shares_result`."""
    maps = 1 if by == "tokens" else 0
    return relevance_estimate(trace, options, target, rule=rule, maps=maps, numbers=len(EXTRAS[by]))


def relevance_estimate(
    trace: Trace, options: ScalarOptions, target: Target | None, *, rule: str, maps: int, numbers: int
) -> Estimate:
    """Return the cost of a run by a rule, and of a result with extras: maps like the scores, and numbers of a row."""
    target = only_target(trace, target, options.scalar)
    scoring = Scoring(trace=trace, options=options, target=target, layers=layers_from(trace, options.name, 0))
    count = tuple(scoring.sizes.values())
    row = LayerCost("frozen run", "forward and backward pass", trace.frozen_cost(count[-2], rule=rule))
    doubles = prod(count[:-1]) * numbers + prod(count) * maps
    return scoring.estimate(None, extras=doubles * torch.float64.itemsize, before=[row])


@register_method(Logit, cost=cost)
def logit(trace: Trace, options: Logit, *, target: Target | None = None) -> Attribution:
    """Run `Logit`."""
    return shares_result(trace, options, target, by=options.by)


def shares_result(
    trace: Trace, options: ScalarOptions, target: Target | None, *, rule: Rule = FREEZE, by: By = "tokens"
) -> Attribution:
    """Return the shares of a frozen run by a rule as the result of a method, with the `EXTRAS` of `by`."""
    layers = layers_from(trace, options.name, 0)
    target = only_target(trace, target, options.scalar)
    targets = every_position(trace) if target is None else [target]
    run = frozen(trace, None if callable(options.scalar) else targets, rule=rule)
    axes = _axes(trace, run, by)
    scoring = Scoring(trace=trace, options=options, target=target, layers=layers, axes=axes)
    scores = scoring.allocate()
    extras = {name: scores.new_zeros(scores.shape[:-1], dtype=torch.float64) for name in EXTRAS[by]}
    if by == "tokens":
        extras["embedding"] = scores.new_zeros(scores.shape, dtype=torch.float64)
    for position in progress(targets, options.name):
        shares = run.complete_shares(position, options.scalar, by=by)
        if target is None:
            rows = trace.positions(position).to(scores.device)
        else:
            rows = torch.zeros(scores.shape[-3], dtype=torch.long, device=scores.device)
        tokens = shares.tokens if shares.parts is None else shares.parts.tokens
        write_rows(scores, rows, tokens, layered=by != "tokens")
        for name, values in _extras(shares, by).items():
            write_rows(extras[name], rows, values, layered=by != "tokens")
    gap = relative_gap(extras["gap"], extras["logit"])
    padding = None if target is None or by == "layer" else padding_read(scores, axes.mask())
    doubts = tuple(doubt for doubt in (run.doubt, padding) if doubt is not None)
    result = scoring.result(scores, scope=None, extras=extras, completeness_gap=gap, warnings=doubts)
    return with_grid(result, run.grid if by == "tokens" else None)


def with_grid(result: Attribution, grid: tuple[int, int] | None) -> Attribution:
    """Return a result whose keys are the patches of an image, if `grid` has their rows and columns."""
    return result if grid is None else replace(result, grid=grid, patches=tuple(range(result.sizes["key"])), cls=())


def padding_read(scores: Float[Tensor, "*layer batch query key"], mask: Bool[Tensor, "batch key"] | None) -> str | None:
    """Return a message if the explained logit of a sequence reads padding, None if none does."""
    if mask is None:
        return None
    sizes = scores.abs().transpose(-2, -3).reshape(-1, *mask.shape).amax(0)
    share = sizes.masked_fill(mask.to(sizes.device), 0).amax(1) / sizes.amax(1).clamp_min(torch.finfo(sizes.dtype).tiny)
    sequence = int(share.argmax())
    if float(share[sequence]) <= READ:
        return None
    return (
        f"the explained logit reads padding: in sequence {sequence} the largest share of a padding token is "
        f"{float(share[sequence]):.1e} of the largest share, as where a model pools its last token without a look at "
        "attention_mask. Explain texts of different lengths one by one, or pad on the other side."
    )


def _axes(trace: Trace, run: FrozenRun, by: By) -> Axes:
    """Return the axes of shares: the queries are those of the logits, and the keys the tokens that have shares."""
    return Axes(trace, (trace.target_stream,), streams_read(trace.layers) if by == "layer" else run.streams)


def _extras(shares: Shares, by: By) -> dict[str, Tensor]:
    """Return the extras of one target; those without a layer axis hold for every layer."""
    by_layer, sums = shares.parts, {"remainder": shares.remainder, "logit": shares.value}
    if by_layer is None:
        ratio = share_cancellation(shares.tokens, shares.bias, shares.value)
        sums = {**sums, "bias": shares.bias, "gap": shares.gap, "cancellation": ratio}
        return {**sums, "embedding": shares.embedding}
    if by == "layer":
        return {"bias": by_layer.bias, "part": by_layer.value, "logit": shares.value, "gap": by_layer.gap}
    total = by_layer.tokens.sum(-1) + by_layer.bias + shares.remainder
    ratio = share_cancellation(by_layer.tokens, by_layer.bias, shares.value)
    return {**sums, "bias": by_layer.bias, "gap": (total - shares.value).abs(), "cancellation": ratio}


def share_cancellation(
    shares: Float[Tensor, "*row key"], bias: Float[Tensor, "*row"], value: Float[Tensor, "*#row"]
) -> Float[Tensor, "*row"]:
    """Return (sum |shares| + |bias|) / |value|: 1 if all have one sign, large if they cancel, 0 without any."""
    sizes = shares.double().abs().sum(-1) + bias.double().abs()
    return sizes / value.double().abs().clamp_min(torch.finfo(torch.float64).tiny)


def write_rows(
    out: Float[Tensor, "*axes"], rows: Int[Tensor, " batch"], values: Float[Tensor, "*part"], *, layered: bool = False
) -> None:
    """Write one row of each sequence into (batch, row[, key]), with a layer axis in front if `layered`."""
    batch, rows = torch.arange(len(rows), device=out.device), rows.to(out.device)
    out[(slice(None), batch, rows) if layered else (batch, rows)] = values.to(out)

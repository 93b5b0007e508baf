"""`logit`: the exact share of each token in a logit, through the whole frozen model."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.memory import allowed
from unilinattn.methods.options import ScalarOptions
from unilinattn.methods.results import allocate_scores, make_result, result_shape
from unilinattn.methods.selection import every_position, layers_from, query_rows
from unilinattn.progress import progress
from unilinattn.registry import register_method
from unilinattn.results.attribution import Attribution
from unilinattn.results.estimate import Estimate, LayerCost
from unilinattn.tracing.logits import logits_of
from unilinattn.tracing.trace import Target, Trace

EXTRAS = {"bias": "bias", "remainder": "remainder", "logit": "value", "gap": "gap"}
"""Fields of `tracing.shares.Shares` by their name in a result's extras."""


class LogitOptions(ScalarOptions):
    """Options of `logit`."""


def cost(trace: Trace, *, target: Target | None = None, **options: Any) -> Estimate:
    """Return the cost of `logit`: a run of the model whose graph is kept, and a backward pass for each target."""
    return shares_estimate(trace, "logit", target, LogitOptions.of("logit", options), rule="freeze")


def shares_estimate(trace: Trace, method: str, target: Target | None, options: ScalarOptions, *, rule: str) -> Estimate:
    """Return the cost of `shares_result`."""
    layers = layers_from(trace, method, 0)
    target = _only_target(trace, target, options)
    (batch, queries, keys), dtype = result_shape(layers, target, options)
    shape = (batch, queries, keys) if target is None else (batch, keys)
    run = trace.frozen_cost(queries, rule=rule)
    operations = run.operations + queries * trace.frozen_cost(queries).operations
    row = LayerCost("frozen run", "forward and backward pass", run.bytes, operations)
    result = batch * queries * (keys * dtype.itemsize + len(EXTRAS) * torch.float64.itemsize)
    return Estimate(method, shape, result, 0, (row,), allowed())


@register_method("logit", options=LogitOptions, cost=cost)
def logit(trace: Trace, *, target: Target | None = None, **options: Any) -> Attribution:
    """Exact shares of the tokens in a logit, which add up to it with the bias: gradient x embedding, model frozen.

    Every factor that the input decided is frozen: the layers are their operators, and in the code between them slopes
    of activations, scales of norms, gates and routers' weights are constants, as in MambaLRP (Jafari et al., 2024)
    without its half rule. The logit is then an affine function of the tokens' embeddings. It is the model's own
    prediction at the target, or what the option `logit` names. Without a target row i explains the logit at position
    i, a backward pass for each token. A model with one vector of logits for each sequence, or a function as `logit`,
    has no query axis.

    Scores: (batch, query, key), without `query` for a target. Extras, with the same axes but `key`: `bias`, the share
    of biases and other constants; `remainder`, what is not linear in the output, zero for a logit; `logit`, the value
    that shares, bias and remainder add up to; and `gap`, what they miss of it. `completeness_gap` is the largest gap
    relative to the logit.

    Options: `LogitOptions`. Raises `OptionError` for an unknown option or value, `InputError` for a model without
    logits, `UncoveredError` for code without a frozen form, and `ExactnessError` if the shares miss the logit.
    """
    return shares_result(trace, "logit", target, LogitOptions.of("logit", options), rule="freeze")


def shares_result(
    trace: Trace, method: str, target: Target | None, options: ScalarOptions, *, rule: str
) -> Attribution:
    """Return the shares of a frozen run by a rule as the result of a method, with `EXTRAS`."""
    layers = layers_from(trace, method, 0)
    target = _only_target(trace, target, options)
    scores = allocate_scores(method, layers, target)
    extras = {name: scores.new_zeros(scores.shape[:2], dtype=torch.float64) for name in EXTRAS}
    targets = every_position(trace) if target is None else [target]
    run = trace.frozen(None if callable(options.logit) else targets, rule=rule)
    for position in progress(targets, method):
        shares = run.complete_shares(position, options.logit)
        rows = query_rows(trace, layers[0], position) if target is None else torch.zeros_like(scores[:, :1, 0]).long()
        _write(scores, rows, shares.tokens)
        for name, field in EXTRAS.items():
            _write(extras[name], rows, getattr(shares, field))
    size = extras["logit"].abs().clamp_min(torch.finfo(torch.float64).tiny)
    gap = float((extras["gap"] / size).max())
    if target is not None:
        scores, extras = scores.squeeze(1), {name: values.squeeze(1) for name, values in extras.items()}
    return make_result(
        trace,
        method,
        layers,
        scores,
        options=options,
        target=target,
        scope=None,
        extras=extras,
        completeness_gap=gap,
    )


def _only_target(trace: Trace, target: Target | None, options: ScalarOptions) -> Target | None:
    """Return the target, by default the last token if all positions have the same scalar.

    Raises `InputError` for a model without logits, unless the option `logit` is a function.
    """
    one = callable(options.logit) or logits_of(trace.output, trace.model).ndim == 2
    return -1 if target is None and one else target


def _write(out: Float[Tensor, "batch row *key"], rows: Tensor, values: Float[Tensor, "batch *key"]) -> None:
    """Write one row of each sequence."""
    out[torch.arange(len(out), device=out.device), rows.squeeze(1).to(out.device)] = values.to(out)

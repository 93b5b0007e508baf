"""`latim`: the norm of each token's contribution to each output, a vector through the whole layer."""

from collections.abc import Sequence
from typing import Any, Literal, Self

import torch
from jaxtyping import Float, Int
from pydantic import Field, model_validator
from torch import Tensor

from unilinattn.errors import OptionError, StreamError, UncoveredError
from unilinattn.methods.composition import product_cost, product_of_maps
from unilinattn.methods.costs import estimated
from unilinattn.methods.heads import head_axis, through_heads
from unilinattn.methods.maps import gather_rows, map_shape, postprocess_, postprocess_bytes, sum_on_first
from unilinattn.methods.options import Activation, Discard, Normalize, ThroughHeads
from unilinattn.methods.results import score_layers, to_result
from unilinattn.methods.selection import composable_steps, only_port, real_pairs, stackable_layers
from unilinattn.methods.sketch import exact_norms, sketch_cost, sketched_form, standard_errors
from unilinattn.methods.vectors import (
    at_target,
    cancellation,
    contribution_tiles,
    head_tiles,
    head_tiles_cost,
    shares_cost,
)
from unilinattn.registry import register_method
from unilinattn.results.attribution import Attribution
from unilinattn.results.estimate import Estimate
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Target, Trace


class LatimOptions(ThroughHeads):
    """Options of `latim`."""

    p: float = Field(2.0, ge=1, description="order of the norm, at least 1; float('inf') for the maximum")
    activation: Activation = Field(
        "exact",
        description="'exact' freezes the activation's slope; the others are LaTIM's f, applied to each tap of the "
        "convolution (LaTIM Eq. 19)",
    )
    bias: Literal["column", "query"] = Field(
        "column", description="'column' returns the bias's norm in extras['bias']; 'query' adds its vector to T_ii"
    )
    residual: bool = Field(
        False,
        description="whether T_ii includes the residual stream that the host adds outside the module; "
        "compose='rollout' includes it",
    )
    sketch: int | None = Field(
        None,
        ge=1,
        description="None computes the norms of all pairs; a number estimates them by a random projection of the "
        "output to that many dimensions, with a relative standard error of at most 1 / sqrt(2 sketch)",
    )
    seed: int = Field(0, ge=0, description="seed of the random projection")
    exact_keys: int = Field(
        0, ge=0, description="with `sketch`, the number of keys with the largest estimates in each row that are exact"
    )
    discard: Discard = 0.0
    normalize: Normalize = "none"

    @model_validator(mode="before")
    @classmethod
    def _composed(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Include the stream and normalise rows for compose="rollout", and refuse other values."""
        if given.get("compose") != "rollout":
            return given
        needed = {"residual": True, "normalize": "rows"}
        for name, value in needed.items():
            if given.get(name, value) != value:
                raise ValueError(
                    "compose='rollout' multiplies maps that include the residual stream and whose rows sum to 1: leave "
                    f"{name}={given[name]!r} out"
                )
        return {**given, **needed}

    @model_validator(mode="after")
    def _l2_only(self) -> Self:
        if self.sketch is None:
            if self.exact_keys:
                raise ValueError(f"exact_keys={self.exact_keys} is of estimated norms; give sketch too")
            return self
        plain = {"p": 2.0, "activation": "exact", "bias": "column", "residual": False, "compose": "none"}
        for name, value in plain.items():
            if getattr(self, name) != value:
                raise ValueError(f"a sketch estimates the l2 norms of exact contributions: leave {name} out")
        if self.is_through_heads:
            raise ValueError("a sketch estimates the norms of whole contributions; leave heads and by_head out")
        return self

    @model_validator(mode="after")
    def _no_head(self) -> Self:
        if self.is_through_heads and (self.residual or self.bias == "query"):
            name = "residual=True" if self.residual else "bias='query'"
            raise ValueError(f"the residual stream and the bias pass through no head; leave {name} out")
        return self


def cost(trace: Trace, *, target: Target | None = None, **options: Any) -> Estimate:
    """Return the cost of `latim`: tiles of vectors, or the vectors of a few rows; composed also that of two maps."""
    chosen = _options(target, options)
    layers = stackable_layers(trace, "latim", chosen.layers)
    if chosen.residual:
        for layer in layers:
            residual_of(layer, "latim", chosen.without_stream)
    extremes, width = chosen.normalize == "min-max", layers[0].output.element_size()
    exact = chosen.activation == "exact"
    batch, queries, _ = map_shape(layers[0])
    # The norms of the bias, the cancellation, and the standard errors.
    numbers = (
        ((2 if chosen.bias == "column" else 1) + (chosen.sketch is not None))
        * batch
        * (queries if target is None else 1)
        * width
    )
    axis = head_axis("latim", layers, chosen.heads) if chosen.by_head else None
    if chosen.compose == "rollout":

        def of_step(step: Sequence[Layer]) -> int:
            shape = map_shape(step[0])
            return max(shares_cost(step, shape[1], exact=exact), postprocess_bytes(shape, width, chosen.discard))

        of_layer, held = product_cost(trace, "latim", layers, target, of_step)
        extras = len(composable_steps(trace, "latim", layers)) * (8 + numbers)
        return estimated("latim", layers, target, chosen, of_layer, held=held, extras=extras)

    def of(layer: Layer) -> int:
        batch, queries, keys = map_shape(layer)
        rows = queries if target is None or extremes else 1
        apart = batch * rows * keys * layer.output.element_size() if chosen.layers == "mean" or target else 0
        if chosen.is_through_heads:
            split = through_heads("latim", layer, chosen.heads, by_head=chosen.by_head)
            apart *= split.count
            size = head_tiles_cost(split, rows, exact=exact, products=False)
        elif chosen.sketch is not None:
            size = sketch_cost(layer, chosen.sketch, chosen.exact_keys)
        else:
            size = shares_cost((layer,), rows, exact=exact)
        treatment = postprocess_bytes((batch, rows, keys), layer.output.element_size(), chosen.discard)
        return apart + max(size, treatment)

    extras = 8 * len(layers) + numbers * (1 if chosen.layers == "mean" else len(layers))
    return estimated("latim", layers, target, chosen, of, heads=axis, extras=extras)


@register_method("latim", options=LatimOptions, cost=cost, needs=("layers", "contributions"))
def latim(trace: Trace, *, target: Target | None = None, **options: Any) -> Attribution:
    """LaTIM: C_ij = ||T_i(x_j)||_p, the norm of token j's contribution to output i (LaTIM Eq. 5, Table 1).

    T_i(x_j) is exact by default; `activation` selects one of the paper's splits of the activation over the
    convolution's taps. Scores: (layer, batch, query, key), without `query` for a target. The residual inside a module
    is part of T_ii for any `residual`.

    With compose="rollout" the scores are A_n ... A_1 without a layer axis: A_ij = C_ij / sum_k C_ik of a step, T_ii
    with the residual stream (LaTIM Eq. 4). Layers that run in parallel are summed before the norm. LaTIM does not
    compose its norms; the product of norms with the residual and normalised rows is that of GlobEnc (Modarressi et
    al., 2022), after Kobayashi et al. (2021) and Abnar and Zuidema (2020).

    With by_head=True the scores are (layer, batch, head, query, key): ||T^h_i(x_j)||_p for each head that `heads`
    selects, where T^h_i(x_j) passes through head h of the core, a block of channels, and through the stages after it:
    T_i(x_j) = sum_h T^h_i(x_j). Gate and norm are frozen; the columns of the output projection that read head h carry
    it. With `heads` and without `by_head` the scores are ||sum_h T^h_i(x_j)||_p over these heads. A residual inside a
    module, the stream and the bias pass through no head. This split is an extension of LaTIM.

    With sketch=k the norms are estimates ||S T_i(x_j)||, S a k x d matrix of random signs over sqrt(k) that `seed`
    draws: the squared norm is unbiased, with a relative standard deviation of at most sqrt(2 / k) (Achlioptas, 2003).
    S is multiplied into the output projection once, so that all pairs cost k / d of the norms. `exact_keys` computes
    those keys of each row again whose estimates are the largest. Extras then include "standard_error", the root mean
    square over the estimated real keys of each row, in the unit of the scores before `discard` and `normalize`.

    Extras: "bias", the norm of the bias at each query (with bias="column"); "cancellation" at each query, the ratio
    sum_j ||T_i(x_j)||_p / ||sum_j T_i(x_j)||_p without bias and stream (see `vectors.cancellation`); and
    "decomposition_error" of each layer: ||sum_j T_i(x_j) + bias_i - y_i|| / ||y_i|| over the computed real rows, the
    worst sequence. The completeness gap is that of the worst layer. Composed layers have one of each for a step. Of
    split contributions, the sum of "cancellation" is over heads and keys, and the parts that pass through no selected
    head are added to the decomposition.

    Options: `LatimOptions`. Raises `OptionError` for an unknown option or value, `UncoveredError` for layers that
    cannot be stacked or composed, that have no activation to split, whose residual stream is unknown, or that have
    different numbers of heads with by_head=True, and `StreamError` if stream and output do not add up.
    """
    chosen = _options(target, options)
    layers = stackable_layers(trace, "latim", chosen.layers)
    stream_error = stream_errors(trace, layers, "latim", chosen.without_stream) if chosen.residual else None
    biases: dict[str, Tensor] = {}
    ratios: dict[str, Tensor] = {}
    errors: dict[str, float] = {}
    deviations: dict[str, Tensor] = {}

    def fill(step: Sequence[Layer], rows: Int[Tensor, "batch row"], out: Float[Tensor, "batch *head row key"]) -> None:
        first = step[0]
        if chosen.is_through_heads:
            bias, errors[first.name], ratio = _fill_heads(out, trace, first, rows, chosen)
        elif chosen.sketch is not None:
            bias, errors[first.name], ratio, deviations[first.name] = _fill_sketch(out, trace, first, rows, chosen)
        else:
            bias, errors[first.name], ratio = _fill(out, trace, step, rows, chosen)
        biases[first.name], ratios[first.name] = (at_target(part, trace, first, target) for part in (bias, ratio))

    axis = head_axis("latim", layers, chosen.heads) if chosen.by_head else None
    scale: dict[str, Tensor] = {}
    if chosen.compose == "rollout":
        scores, scale = product_of_maps(trace, "latim", layers, target, fill)
    else:
        # The map's minimum and maximum need the whole map.
        whole = chosen.normalize == "min-max"
        scores = score_layers(
            trace, "latim", layers, target, chosen, lambda layer, *part: fill((layer,), *part), heads=axis, whole=whole
        )
    names = [layer.name for layer in layers if layer.name in errors]
    extras = {"bias": [biases[name] for name in names]} if chosen.bias == "column" else {}
    if chosen.sketch is not None:
        extras["standard_error"] = [deviations[name] for name in names]
    return to_result(
        trace,
        "latim",
        layers,
        scores,
        options=chosen,
        target=target,
        scope="layer",
        heads=axis,
        extras={**extras, "cancellation": [ratios[name] for name in names]},
        scale=scale,
        decomposition_error=[errors[name] for name in names],
        stream_error=stream_error,
    )


def stream_errors(trace: Trace, layers: Sequence[Layer], method: str, remedy: str = "") -> dict[str, float]:
    """Return the `stream_error` of each layer's step by the layer's name, without modules that contain their residual.

    Raises `StreamError`, which ends with `remedy`, if an error exceeds the rounding of the host's dtype.
    """
    errors = {}
    for layer in layers:
        step = next(step for step in trace.steps if any(layer is other for other in step.layers))
        error, allowed = step.stream_error(), step.stream_tolerance()
        if error is None:
            continue
        if not error <= allowed:
            names = " and ".join(other.name for other in step.layers)
            raise StreamError(
                f"{method}: the residual stream and the output of {names} do not add up to the next stream of "
                f"{trace.model}: the relative error is {error:.1e}, and {allowed:.0e} is accepted. The "
                f"host may have written into its stream after the layer.{remedy}"
            )
        errors[layer.name] = error
    return errors


def residual_of(layer: Layer, method: str, remedy: str = "") -> Float[Tensor, "batch query out"]:
    """Return the stream that the host adds to a layer's output.

    Raises `UncoveredError`, which ends with `remedy`, if the trace found none.
    """
    if layer.residual is None:
        raise UncoveredError(
            f"{method} needs the stream that the host adds to the output of {layer.name}; {layer.no_residual}.{remedy}"
        )
    if only_port(layer).ports != ("x",):
        raise UncoveredError(
            f"{method}: {layer.name} takes its keys from {layer.operator.ports[0]!r}, so the residual stream belongs "
            "to none of the keys."
        )
    return layer.residual


def _fill(
    out: Float[Tensor, "batch row key"],
    trace: Trace,
    together: Sequence[Layer],
    rows: Int[Tensor, "batch row"],
    options: LatimOptions,
) -> tuple[Float[Tensor, "batch row"], float, Float[Tensor, "batch row"]]:
    """Write the scores of a step; return the norms of its bias, its decomposition error and its cancellation."""
    layer, ops = together[0], [only_port(layer) for layer in together]
    if options.bias == "query" and ops[0].ports != ("x",):
        raise UncoveredError(
            f"latim: {layer.name} takes its keys from {ops[0].ports[0]!r}, so none of the keys is the query's own "
            "token; use bias='column'."
        )
    factors = [other.multiplier if options.residual else 1.0 for other in together]
    parts = [factor * op.activation_bias(options.activation) for op, factor in zip(ops, factors, strict=True)]
    bias = gather_rows(sum_on_first(parts), rows)
    extra = bias if options.bias == "query" else None
    if options.residual:
        stream = gather_rows(residual_of(layer, "latim", options.without_stream), rows)
        extra = stream if extra is None else stream + extra
    sizes, total = layer.output.new_zeros(rows.shape), layer.output.new_zeros(*rows.shape, layer.output.shape[-1])
    for tile in contribution_tiles(together, factors, rows, options.activation):
        norms = tile.norms(options.p)
        sizes[:, tile.rows] += norms.sum(-1)
        total[:, tile.rows] += tile.total()
        scores = norms if extra is None else tile.with_extra(norms, options.p, extra[:, tile.rows])
        out[:, tile.rows, tile.cols] = scores
    postprocess_(out, trace, layer, rows, discard=options.discard, normalize=options.normalize)
    output = sum_on_first(factor * other.output for other, factor in zip(together, factors, strict=True))
    ratio = cancellation(sizes, total, options.p, layer, rows)
    return *_checked(bias, total + bias, output, layer, rows, options.p), ratio


def _options(target: Target | None, given: dict[str, Any]) -> LatimOptions:
    chosen = LatimOptions.of("latim", given)
    if chosen.sketch is not None and target is not None:
        raise OptionError(
            f"latim: sketch={chosen.sketch} estimates the norms of all pairs, and the row of a target takes linear "
            "time without it; leave sketch or target out."
        )
    return chosen


def _fill_sketch(
    out: Float[Tensor, "batch query key"],
    trace: Trace,
    layer: Layer,
    rows: Int[Tensor, "batch query"],
    options: LatimOptions,
) -> tuple[Float[Tensor, "batch query"], float, Float[Tensor, "batch query"], Float[Tensor, "batch query"]]:
    """Write estimates of the scores of a layer; return the values of `_fill`, and the standard errors of the rows.

    The decomposition error is that of the projected vectors.
    """
    assert options.sketch is not None
    op, (form, small, sketch) = only_port(layer), sketched_form(layer, options.sketch, options.seed)
    total = layer.output.new_zeros(*rows.shape, options.sketch)
    for tile in small.tiles(small.causal):
        out[:, tile.rows, tile.cols] = tile.norms(2.0)
        total[:, tile.rows] += tile.total()
    pairs = real_pairs(trace, layer, rows)
    estimated = pairs.clone()
    if options.exact_keys:
        largest = out.masked_fill(~pairs, -1).topk(min(options.exact_keys, out.shape[-1])).indices
        estimated.scatter_(-1, largest, False)
        for place, norms in exact_norms(form, pairs & ~estimated):
            out[tuple(place)] = norms
    sizes, deviation = out.sum(-1), standard_errors(out, estimated, options.sketch)
    postprocess_(out, trace, layer, rows, discard=options.discard, normalize=options.normalize)
    bias = op.activation_bias("exact")
    projected = (total + bias @ sketch.mT, layer.output @ sketch.mT)
    _, error = _checked(bias @ sketch.mT, *projected, layer, rows, 2.0)
    ratio = cancellation(sizes, layer.output - bias, 2.0, layer, rows)
    real = torch.ones_like(deviation) if layer.mask is None else layer.mask.to(deviation)
    return torch.linalg.vector_norm(bias, dim=-1) * real, error, ratio, deviation * real


def _fill_heads(
    out: Float[Tensor, "batch *head row key"],
    trace: Trace,
    layer: Layer,
    rows: Int[Tensor, "batch row"],
    options: LatimOptions,
) -> tuple[Float[Tensor, "batch row"], float, Float[Tensor, "batch row"]]:
    """Write the scores through heads of a layer; return the values of `_fill`."""
    split = through_heads("latim", layer, options.heads, by_head=options.by_head)
    op, by_part = split.operator, out if options.by_head else out.unsqueeze(1)
    sizes, total = layer.output.new_zeros(rows.shape), layer.output.new_zeros(*rows.shape, layer.output.shape[-1])
    for part, tile in head_tiles(split, 1.0, rows, options.activation):
        norms = tile.norms(options.p)
        sizes[:, tile.rows] += norms.sum((1, 3))
        total[:, tile.rows] += tile.total()
        by_part[:, part, tile.rows, tile.cols] = norms
    for scores in by_part.unbind(1):
        postprocess_(scores, trace, layer, rows, discard=options.discard, normalize=options.normalize)
    bias = gather_rows(op.activation_bias(options.activation), rows)
    # The bias, a residual inside the module and the other heads.
    others = op.decomposed_output(options.activation) - split.output(options.activation)
    ratio = cancellation(sizes, total, options.p, layer, rows)
    return *_checked(bias, total + gather_rows(others, rows), layer.output, layer, rows, options.p), ratio


def _checked(
    bias: Float[Tensor, "batch row out"],
    decomposed: Float[Tensor, "batch row out"],
    output: Float[Tensor, "batch query out"],
    layer: Layer,
    rows: Int[Tensor, "batch row"],
    p: float,
) -> tuple[Float[Tensor, "batch row"], float]:
    """Return the norms of the bias and the error of the decomposed output over real rows, of the worst sequence."""
    real = torch.ones_like(rows, dtype=torch.bool) if layer.mask is None else layer.mask.gather(1, rows)
    output = gather_rows(output, rows) * real.unsqueeze(-1)
    missed = (decomposed * real.unsqueeze(-1) - output).flatten(1).norm(dim=1)
    size = output.flatten(1).norm(dim=1).clamp_min(torch.finfo(output.dtype).tiny)
    return torch.linalg.vector_norm(bias * real.unsqueeze(-1), ord=p, dim=-1), float((missed / size).max())

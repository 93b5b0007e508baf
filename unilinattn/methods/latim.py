"""`latim`: the norm of each token's contribution to each output, a vector through the whole layer."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unilinattn.errors import OptionError, StreamError, UncoveredError
from unilinattn.methods.composition import layers_of, product_cost, score_steps, stacked_count
from unilinattn.methods.costs import estimated
from unilinattn.methods.heads import head_axis, through_heads
from unilinattn.methods.joint import Joint
from unilinattn.methods.maps import gather_rows, map_shape, postprocess_, postprocess_bytes, sum_on_first
from unilinattn.methods.results import to_result
from unilinattn.methods.selection import begins_stream, only_port, reads_own_tokens, real_pairs
from unilinattn.methods.sketch import exact_norms, sketch_cost, sketched_form, standard_errors
from unilinattn.methods.vectors import (
    cancellation,
    contribution_tiles,
    head_tiles,
    head_tiles_cost,
    shares_cost,
)
from unilinattn.options import Latim
from unilinattn.registry import register_method
from unilinattn.results.attribution import Attribution
from unilinattn.results.estimate import Estimate
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Target, Trace


def cost(trace: Trace, options: Latim, *, target: Target | None = None) -> Estimate:
    """Return the cost of `latim`: tiles of vectors, or the vectors of a few rows; composed also that of two maps."""
    _refuse_sketch_of_row(options, target)
    layers = layers_of(trace, options)
    if options.residual:
        for layer in layers:
            residual_of(trace, layer, "latim", options.without_stream)
    exact, width = options.activation == "exact", layers[0].output.element_size()
    batch, queries, _ = map_shape(layers[0])

    def of(layer: Layer) -> int:
        batch, queries, keys = map_shape(layer)
        rows = queries if target is None or options.normalize == "min-max" else 1
        copied = options.layers == "mean" or target is not None
        apart = batch * rows * keys * layer.output.element_size() if copied else 0
        if options.is_through_heads:
            split = through_heads("latim", layer, options.heads, by_head=options.by_head)
            apart *= split.count
            size = head_tiles_cost(split, rows, exact=exact, products=False)
        elif options.sketch is not None:
            size = sketch_cost(layer, options.sketch, options.exact_keys)
        else:
            size = shares_cost((layer,), rows, exact=exact)
        treatment = postprocess_bytes((batch, rows, keys), layer.output.element_size(), options.discard)
        return apart + max(size, treatment)

    def of_step(step: Sequence[Layer]) -> int:
        shape = map_shape(step[0])
        return max(shares_cost(step, shape[1], exact=exact), postprocess_bytes(shape, width, options.discard))

    # The norms of the bias, the cancellation, and the standard errors; the decomposition error of each layer.
    numbers = (1 + (options.bias == "column") + (options.sketch is not None)) * batch
    count = stacked_count(trace, options, layers)
    extras = count * numbers * (queries if target is None else 1) * width
    extras += 8 * (len(layers) if options.layers == "mean" else count)
    axis = head_axis("latim", layers, options.heads) if options.by_head else None
    if options.compose == "rollout":
        joint = Joint.of(trace, "latim", layers)
        of_layer, resident = product_cost(joint, layers, target, of_step)
        axes = joint.axes(whole=target is None)
        return estimated(options, layers, target, of_layer, resident=resident, extras=extras, axes=axes)
    return estimated(options, layers, target, of, heads=axis, extras=extras)


@register_method(Latim, cost=cost)
def latim(trace: Trace, options: Latim, *, target: Target | None = None) -> Attribution:
    """Run `Latim`."""
    _refuse_sketch_of_row(options, target)
    layers = layers_of(trace, options)
    stream_error = stream_errors(trace, layers, "latim", options.without_stream) if options.residual else None
    biases: dict[str, Tensor] = {}
    ratios: dict[str, Tensor] = {}
    errors: dict[str, float] = {}
    deviations: dict[str, Tensor] = {}

    residuals: dict[str, Tensor] = {}

    def fill(
        step: Sequence[Layer], rows: Int[Tensor, "batch row"], out: Float[Tensor, "batch *head row key"]
    ) -> Float[Tensor, "batch row"] | None:
        name, residual = step[0].name, None
        if options.is_through_heads:
            biases[name], errors[name], ratios[name] = _fill_heads(out, trace, step[0], rows, options)
        elif options.sketch is not None:
            bias, error, ratio, deviations[name] = _fill_sketch(out, trace, step[0], rows, options)
            biases[name], errors[name], ratios[name] = bias, error, ratio
        else:
            biases[name], errors[name], ratios[name], residual = _fill(out, trace, step, rows, options)
        if residual is not None:
            residuals[name] = residual
        return residual

    axis = head_axis("latim", layers, options.heads) if options.by_head else None
    # The map's minimum and maximum need the whole map.
    whole = options.normalize == "min-max"
    scores, composed = score_steps(trace, options, layers, target, fill, heads=axis, whole=whole)
    extras = {
        **({"bias": biases} if options.bias == "column" else {}),
        "cancellation": ratios,
        **({"residual": residuals} if residuals and len(residuals) == len(ratios) else {}),
    }
    return to_result(
        trace,
        options,
        layers,
        scores,
        target=target,
        scope="layer",
        heads=axis,
        axes=composed.axes,
        extras=composed.by_row(extras) | ({"standard_error": deviations} if options.sketch is not None else {}),
        scale=composed.scale,
        decomposition_error=errors,
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


def residual_of(trace: Trace, layer: Layer, method: str, remedy: str = "") -> Float[Tensor, "batch query out"]:
    """Return the stream that the host adds to a layer's output, zeros for one that begins a stream.

    Raises `UncoveredError`, which ends with `remedy`, if the trace found none.
    """
    if layer.residual is None and begins_stream(trace, layer):
        return torch.zeros_like(layer.output)
    if layer.residual is None:
        raise UncoveredError(
            f"{method} needs the stream that the host adds to the output of {layer.name}; {layer.no_residual}.{remedy}"
        )
    return layer.residual


def _fill(
    out: Float[Tensor, "batch row key"],
    trace: Trace,
    step: Sequence[Layer],
    rows: Int[Tensor, "batch row"],
    options: Latim,
) -> tuple[Float[Tensor, "batch row"], float, Float[Tensor, "batch row"], Float[Tensor, "batch row"] | None]:
    """Write the scores of a step; return the norms of its bias, its decomposition error and its cancellation.

    Also returns the score of each row's own token if that is none of the keys and the residual is scored, else None.
    """
    if options.residual:
        step = [layer.added for layer in step]
    layer, ops = step[0], [only_port(layer) for layer in step]
    is_among_keys = reads_own_tokens(trace, layer)
    if options.bias == "query" and not is_among_keys:
        raise UncoveredError(
            f"latim: {layer.name} takes its keys from {ops[0].ports[0]!r}, so none of the keys is the query's own "
            "token; use bias='column'."
        )
    factors = [other.multiplier if options.residual else 1.0 for other in step]
    biases = [factor * op.activation_bias(options.activation) for op, factor in zip(ops, factors, strict=True)]
    bias = gather_rows(sum_on_first(biases), rows)
    extra = bias if options.bias == "query" else None
    if options.residual:
        stream = gather_rows(residual_of(trace, layer, "latim", options.without_stream), rows)
        extra = stream if extra is None else stream + extra
    sizes, total = layer.output.new_zeros(rows.shape), layer.output.new_zeros(*rows.shape, layer.output.shape[-1])
    for tile in contribution_tiles(step, factors, rows, options.activation):
        norms = tile.norms(options.p)
        sizes[:, tile.rows] += norms.sum(-1)
        total[:, tile.rows] += tile.total()
        if extra is not None and is_among_keys:
            norms = tile.with_extra(norms, options.p, extra[:, tile.rows])
        out[:, tile.rows, tile.cols] = norms
    residual = None
    if options.residual and not is_among_keys:
        residual = _with_residual(out, trace, step, rows, options)
    else:
        postprocess_(out, trace, layer, rows, discard=options.discard, normalize=options.normalize)
    output = sum_on_first(factor * other.output for other, factor in zip(step, factors, strict=True))
    ratio = cancellation(sizes, total, options.p, layer, rows)
    return *_checked(bias, total + bias, output, layer, rows, options.p), ratio, residual


def _with_residual(
    out: Float[Tensor, "batch row key"],
    trace: Trace,
    step: Sequence[Layer],
    rows: Int[Tensor, "batch row"],
    options: Latim,
) -> Float[Tensor, "batch row"]:
    """Treat scores of keys that are other tokens than the rows; return the score of the stream, treated alike."""
    layer = step[0]
    if options.normalize == "min-max":
        raise UncoveredError(
            f"latim: {layer.name} reads other tokens than it writes, and normalize='min-max' is that of one map; use "
            "normalize='rows' or 'none'."
        )
    stream = gather_rows(residual_of(trace, layer, "latim", options.without_stream), rows)
    residual = torch.linalg.vector_norm(stream, ord=options.p, dim=-1)
    residual = residual if layer.mask is None else residual * layer.mask.gather(1, rows)
    postprocess_(out, trace, layer, rows, discard=options.discard, normalize="none")
    if options.normalize == "rows":
        size = out.sum(-1) + residual
        size = size.masked_fill(size == 0, 1)
        out.div_(size.unsqueeze(-1))
        residual = residual / size
    return residual


def _refuse_sketch_of_row(options: Latim, target: Target | None) -> None:
    if options.sketch is not None and target is not None:
        raise OptionError(
            f"latim: sketch={options.sketch} estimates the norms of all pairs, and the row of a target takes linear "
            "time without it; leave sketch or target out."
        )


def _fill_sketch(
    out: Float[Tensor, "batch query key"],
    trace: Trace,
    layer: Layer,
    rows: Int[Tensor, "batch query"],
    options: Latim,
) -> tuple[Float[Tensor, "batch query"], float, Float[Tensor, "batch query"], Float[Tensor, "batch query"]]:
    """Write estimates of the scores of a layer; return the values of `_fill`, and the standard errors of the rows.

    The decomposition error is that of the projected vectors.
    """
    assert options.sketch is not None
    op, (form, small, sketch) = only_port(layer), sketched_form(layer, options.sketch, options.seed)
    total = layer.output.new_zeros(*rows.shape, options.sketch)
    # The sketch of the sum is the sum of the sketches, so the decomposition is checked without whole vectors.
    for tile in small.tiles(small.causal):
        out[:, tile.rows, tile.cols] = tile.norms(2.0)
        total[:, tile.rows] += tile.total()
    pairs = real_pairs(trace, layer, rows)
    estimated = pairs.clone()
    if options.exact_keys:
        largest = out.masked_fill(~pairs, -1).topk(min(options.exact_keys, out.shape[-1])).indices
        estimated.scatter_(-1, largest, False)
        for pair, norms in exact_norms(form, pairs & ~estimated):
            out[tuple(pair)] = norms
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
    options: Latim,
) -> tuple[Float[Tensor, "batch row"], float, Float[Tensor, "batch row"]]:
    """Write the scores through heads of a layer; return the values of `_fill`."""
    split = through_heads("latim", layer, options.heads, by_head=options.by_head)
    op, by_part = split.operator, out if options.by_head else out.unsqueeze(1)
    sizes, total = layer.output.new_zeros(rows.shape), layer.output.new_zeros(*rows.shape, layer.output.shape[-1])
    for span, tile in head_tiles(split, 1.0, rows, options.activation):
        norms = tile.norms(options.p)
        sizes[:, tile.rows] += norms.sum((1, 3))
        total[:, tile.rows] += tile.total()
        by_part[:, span, tile.rows, tile.cols] = norms
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

"""`latim`: the norm of each token's contribution to each output, a vector through the whole layer."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.errors import OptionError, UncoveredError
from unilinattn.options import Latim
from unilinattn.registry import register_method
from unilinattn.results.attribution import Attribution
from unilinattn.results.estimate import Estimate
from unilinattn.scoring.composition import Composition, at_rows, layerwise, product_cost, score_steps, stacked_count
from unilinattn.scoring.maps import map_shape, postprocess_, postprocess_bytes, sum_on_first
from unilinattn.scoring.selection import StepRows, only_port, reads_own_tokens, real_pairs, residual_of, stream_errors
from unilinattn.scoring.sketch import exact_norms, sketch_cost, sketched_form, standard_errors
from unilinattn.scoring.vectors import (
    cancellation,
    contribution_tiles,
    head_tiles,
    head_tiles_cost,
    shares_cost,
    through_heads,
)
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Target, Trace


class Filled(NamedTuple):
    """Numbers of the rows of a step whose scores are written.

    Attributes:
        bias: the norms of the bias.
        error: the decomposition error of the step.
        cancellation: see `vectors.cancellation`.
        residual: the score of each row's own token if that is none of the keys and the residual is scored, else None.
        standard_error: the standard errors of estimated scores.
    """

    bias: Float[Tensor, "batch row"]
    error: float
    cancellation: Float[Tensor, "batch row"]
    residual: Float[Tensor, "batch row"] | None = None
    standard_error: Float[Tensor, "batch row"] | None = None


def cost(trace: Trace, options: Latim, *, target: Target | None = None) -> Estimate:
    """Return the cost of `latim`: tiles of vectors, or the vectors of a few rows; composed also that of two maps."""
    _refuse_sketch_of_row(options, target)
    scoring = layerwise(trace, options, target, options.heads)
    layers = scoring.layers
    for layer in layers if options.residual else ():
        residual_of(trace, layer, "latim", options.without_stream)
    exact, width = options.activation == "exact", layers[0].output.element_size()
    batch, queries, _ = map_shape(layers[0])

    def of(layer: Layer) -> int:
        batch, queries, keys = map_shape(layer)
        rows = queries if target is None or options.normalize == "min-max" else 1
        copied = options.layers == "mean" or target is not None
        apart = batch * rows * keys * layer.output.element_size() if copied else 0
        if options.is_through_heads:
            split = through_heads(options, layer)
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
    count = stacked_count(scoring)
    extras = count * numbers * (queries if target is None else 1) * width
    extras += 8 * (len(layers) if options.layers == "mean" else count)
    if isinstance(scoring, Composition):
        return product_cost(scoring, of_step, extras=extras)
    return scoring.estimate(of, extras=extras)


@register_method(Latim, cost=cost)
def latim(trace: Trace, options: Latim, *, target: Target | None = None) -> Attribution:
    """Run `Latim`."""
    _refuse_sketch_of_row(options, target)
    scoring = layerwise(trace, options, target, options.heads)
    stream_error = None
    if options.residual:
        stream_error = stream_errors(trace, scoring.layers, "latim", options.without_stream)
    filled: dict[str, Filled] = {}

    def fill(rows: StepRows, out: Float[Tensor, "batch *head row key"]) -> Float[Tensor, "batch row"] | None:
        write = _fill_heads if options.is_through_heads else _fill if options.sketch is None else _fill_sketch
        filled[rows.layer.name] = numbers = write(out, rows, options)
        return numbers.residual

    # The map's minimum and maximum need the whole map.
    scores, extras = score_steps(scoring, fill, whole=options.normalize == "min-max")
    for extra in ("bias", "cancellation", "residual", "standard_error"):
        numbers = {name: getattr(each, extra) for name, each in filled.items()}
        if None not in numbers.values() and (extra != "bias" or options.bias == "column"):
            extras[extra] = at_rows(scoring, numbers)
    errors = {name: each.error for name, each in filled.items()}
    return scoring.result(scores, scope="layer", extras=extras, decomposition_error=errors, stream_error=stream_error)


def _fill(out: Float[Tensor, "batch row key"], rows: StepRows, options: Latim) -> Filled:
    """Write the scores of a step."""
    step = [layer.added for layer in rows.step] if options.residual else rows.step
    layer, ops = step[0], [only_port(layer) for layer in step]
    is_among_keys = reads_own_tokens(rows.trace, layer)
    if options.bias == "query" and not is_among_keys:
        raise UncoveredError(
            f"latim: {layer.name} takes its keys from {ops[0].ports[0]!r}, so none of the keys is the query's own "
            "token; use bias='column'."
        )
    factors = [other.multiplier if options.residual else 1.0 for other in step]
    biases = [factor * op.activation_bias(options.activation) for op, factor in zip(ops, factors, strict=True)]
    bias = rows.of(sum_on_first(biases))
    extra = bias if options.bias == "query" else None
    if options.residual:
        stream = rows.of(residual_of(rows.trace, layer, "latim", options.without_stream))
        extra = stream if extra is None else stream + extra
    sizes, total = layer.output.new_zeros(bias.shape[:2]), layer.output.new_zeros(bias.shape)
    for tile in contribution_tiles(step, factors, rows.index, options.activation):
        norms = tile.norms(options.p)
        sizes[:, tile.rows] += norms.sum(-1)
        total[:, tile.rows] += tile.total()
        if extra is not None and is_among_keys:
            norms = tile.with_extra(norms, options.p, extra[:, tile.rows])
        out[:, tile.rows, tile.cols] = norms
    residual = None
    if options.residual and not is_among_keys:
        residual = _with_residual(out, rows, options)
    else:
        postprocess_(out, rows, discard=options.discard, normalize=options.normalize)
    output = sum_on_first(factor * other.output for other, factor in zip(step, factors, strict=True))
    ratio = cancellation(sizes, total, options.p, rows)
    return Filled(*_checked(bias, total + bias, output, rows, options.p), ratio, residual)


def _with_residual(out: Float[Tensor, "batch row key"], rows: StepRows, options: Latim) -> Float[Tensor, "batch row"]:
    """Treat scores of keys that are other tokens than the rows; return the score of the stream, treated alike."""
    if options.normalize == "min-max":
        raise UncoveredError(
            f"latim: {rows.layer.name} reads other tokens than it writes, and normalize='min-max' is that of one map; "
            "use normalize='rows' or 'none'."
        )
    stream = rows.of(residual_of(rows.trace, rows.layer, "latim", options.without_stream))
    residual = torch.linalg.vector_norm(stream, ord=options.p, dim=-1) * rows.real
    postprocess_(out, rows, discard=options.discard, normalize="none")
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


def _fill_sketch(out: Float[Tensor, "batch query key"], rows: StepRows, options: Latim) -> Filled:
    """Write estimates of the scores of a layer; the decomposition error is that of the projected vectors."""
    assert options.sketch is not None
    layer, op = rows.layer, only_port(rows.layer)
    form, small, sketch = sketched_form(layer, options.sketch, options.seed)
    total = layer.output.new_zeros(*rows.index.shape, options.sketch)
    # The sketch of the sum is the sum of the sketches, so the decomposition is checked without whole vectors.
    for tile in small.tiles(small.causal):
        out[:, tile.rows, tile.cols] = tile.norms(2.0)
        total[:, tile.rows] += tile.total()
    pairs = real_pairs(rows.trace, layer, rows.index)
    estimated = pairs.clone()
    if options.exact_keys:
        largest = out.masked_fill(~pairs, -1).topk(min(options.exact_keys, out.shape[-1])).indices
        estimated.scatter_(-1, largest, False)
        for pair, norms in exact_norms(form, pairs & ~estimated):
            out[tuple(pair)] = norms
    sizes, deviation = out.sum(-1), standard_errors(out, estimated, options.sketch)
    postprocess_(out, rows, discard=options.discard, normalize=options.normalize)
    bias = op.activation_bias("exact")
    projected = (total + bias @ sketch.mT, layer.output @ sketch.mT)
    _, error = _checked(bias @ sketch.mT, *projected, rows, 2.0)
    ratio = cancellation(sizes, layer.output - bias, 2.0, rows)
    real = rows.real.to(deviation)
    return Filled(torch.linalg.vector_norm(bias, dim=-1) * real, error, ratio, standard_error=deviation * real)


def _fill_heads(out: Float[Tensor, "batch *head row key"], rows: StepRows, options: Latim) -> Filled:
    """Write the scores through heads of a layer."""
    split = through_heads(options, rows.layer)
    op, by_part = split.operator, out if options.by_head else out.unsqueeze(1)
    bias, output = rows.of(op.activation_bias(options.activation)), rows.layer.output
    sizes, total = output.new_zeros(bias.shape[:2]), output.new_zeros(bias.shape)
    for span, tile in head_tiles(split, 1.0, rows.index, options.activation):
        norms = tile.norms(options.p)
        sizes[:, tile.rows] += norms.sum((1, 3))
        total[:, tile.rows] += tile.total()
        by_part[:, span, tile.rows, tile.cols] = norms
    for scores in by_part.unbind(1):
        postprocess_(scores, rows, discard=options.discard, normalize=options.normalize)
    # The bias, a residual inside the module and the other heads.
    others = op.decomposed_output(options.activation) - split.output(options.activation)
    ratio = cancellation(sizes, total, options.p, rows)
    return Filled(*_checked(bias, total + rows.of(others), output, rows, options.p), ratio)


def _checked(
    bias: Float[Tensor, "batch row out"],
    decomposed: Float[Tensor, "batch row out"],
    output: Float[Tensor, "batch query out"],
    rows: StepRows,
    p: float,
) -> tuple[Float[Tensor, "batch row"], float]:
    """Return the norms of the bias and the error of the decomposed output over real rows, of the worst sequence."""
    real = rows.real.unsqueeze(-1)
    output = rows.of(output) * real
    missed = (decomposed * real - output).flatten(1).norm(dim=1)
    size = output.flatten(1).norm(dim=1).clamp_min(torch.finfo(output.dtype).tiny)
    return torch.linalg.vector_norm(bias * real, ord=p, dim=-1), float((missed / size).max())

"""Rollouts of maps whose entries are weighted, head by head, by gradients with respect to the attention matrices."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.errors import UncoveredError
from unilinattn.kernels.reduced_map.tiled import ROWS
from unilinattn.kernels.row_product.naive import Sign, apply_sign
from unilinattn.memory import allowed, rows_within
from unilinattn.mixers import CoreMixer
from unilinattn.mixers.cost import cost_of
from unilinattn.operator.cost import BLOCK_ROWS
from unilinattn.operator.stages import Branch, Chain, Mix
from unilinattn.options.bases import GradientMapOptions, ScalarOptions
from unilinattn.results.attribution import Attribution
from unilinattn.results.estimate import Estimate
from unilinattn.scoring.composition import Composition, weighted_cost, weighted_rollout
from unilinattn.scoring.cores import cores
from unilinattn.scoring.maps import map_shape, sum_on_first
from unilinattn.scoring.scaled import Blocks
from unilinattn.scoring.selection import one_scalar, only_port, query_rows, real_pairs
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.trace import Target, Trace

AtCores = Sequence[Float[Tensor, "batch query channel"]]
"""Gradients with respect to the outputs of a layer's cores."""

Factors = Mapping[str, Sequence[AtCores]]
"""The gradients that weight each layer's attention matrices, by the layer's name; their weights are multiplied."""

COPIES = 3
"""Blocks of all heads that are held at once: the matrix, a weight, and their product."""


def gradient_rollout(
    scoring: Composition[GradientMapOptions], factors: Callable[[Sequence[Target]], Iterable[Factors]]
) -> Attribution:
    """Return rho = B_n ... B_1 with B = I + mean_h (alpha_h o the weights of `factors`).

    `sign` applies to each head, and `factors` yields the gradients of each target. Without a target, row i takes those
    of the scalar at position i; if all positions have one scalar, the maps are multiplied once for all rows. Raises
    `UncoveredError` for layers without one attention matrix per head (see `core_mixers`).
    """
    for layer in scoring.layers:
        core_mixers(layer)

    def blocks(weights: Factors, layer: Layer) -> Blocks:
        return weighted_blocks(scoring.trace, layer, weights[layer.name], scoring.options.sign)

    def multiply(weights: Factors, _: Tensor, row: Tensor, layer: Layer) -> Tensor:
        row = row.to(layer.output)
        return sum_on_first(row[:, :, tokens] @ block for tokens, block in blocks(weights, layer))

    return weighted_rollout(scoring, "core", factors, multiply, blocks)


def core_gradients(scoring: Composition[ScalarOptions], targets: Sequence[Target]) -> Iterator[dict[str, AtCores]]:
    """Yield the model's own gradient of the scalar with respect to the outputs of each layer's cores."""
    trace, layers = scoring.trace, scoring.layers
    indices = {layer.name: index for index, layer in enumerate(trace.layers)}
    pulls = {layer.name: layer.core_pullback() for layer in layers} if len(targets) > 1 else {}
    for gradients in trace.gradients(targets, scoring.options.scalar):
        yield {
            layer.name: (pulls.get(layer.name) or layer.core_pullback())(gradients[indices[layer.name]])
            for layer in layers
        }


def weighted_blocks(
    trace: Trace, layer: Layer, factors: Sequence[AtCores], sign: Sign
) -> Iterator[tuple[slice, Float[Tensor, "batch row key"]]]:
    """Yield mean_h sign(alpha_hij prod_g sum_p g_ihp v_jhp) in blocks of rows, for the gradients g of `factors`.

    v are the core's values. A head sums the products of its parallel cores, such as the directions of a bidirectional
    layer.
    """
    every_core = cores(layer)
    if any(len(g) != len(every_core) for g in factors):
        raise UncoveredError(
            f"the gradients at the {len(every_core)} cores of {layer.name} ({layer.kind}) are unknown, because its "
            "values and gates are constants in its operator; use 'contribution' or 'rollout'."
        )
    rows, step = block_shape(layer, [core.mixer for core in every_core])
    every, heads = query_rows(trace, layer), every_core[0].mixer.heads
    gradients = [[g[index].unflatten(2, (heads, -1)) for g in factors] for index in range(len(every_core))]
    for start in range(0, every.shape[1], rows):
        span = slice(start, min(start + rows, every.shape[1]))
        total = layer.output.new_zeros(every.shape[0], span.stop - start, every_core[0].value.shape[1])
        for first in range(0, heads, step):
            some = slice(first, min(first + step, heads))
            products = []
            for core, weights in zip(every_core, gradients, strict=True):
                product = core.mixer.tile(span, slice(None), some)
                # Several gradients weight each entry in turn, so one weight of all pairs is held at a time.
                for g in weights:
                    product = product * torch.einsum("bihp,bjhp->bhij", g[:, span, some], core.value[:, :, some])
                products.append(product)
            total += apply_sign(sign, sum_on_first(products)).sum(1)
        yield span, (total / heads).masked_fill(~real_pairs(trace, layer, every[:, span]), 0)


def block_shape(layer: Layer, mixers: Sequence[CoreMixer], subject: str | None = "the weighted map") -> tuple[int, int]:
    """Return the rows and heads of a block of `weighted_blocks` within `max_memory`.

    Raises `MemoryLimitError`, which names `subject`, if one row of one head does not fit; None is for an estimate.
    """
    queries, heads = map_shape(layer)[1], mixers[0].heads
    step, least = heads, min(queries, BLOCK_ROWS)
    while step > 1 and block_bytes(layer, mixers, least, step) > allowed():
        step = max(1, step // 2)
    named = None if subject is None else f"{subject} of {layer.name}"
    return rows_within(lambda rows: block_bytes(layer, mixers, rows, step), min(ROWS, queries), named), step


def block_bytes(layer: Layer, mixers: Sequence[CoreMixer], rows: int, heads: int) -> int:
    """Return the bytes of a block of `weighted_blocks` with `rows` rows of `heads` heads."""
    batch, queries, keys = map_shape(layer)
    pairs = batch * min(rows, queries) * keys
    tiles = max(cost_of(mixer).tile_elements(min(rows, queries), keys, heads) for mixer in mixers)
    products = (COPIES + len(mixers) - 1) * heads * pairs
    return layer.output.element_size() * (max(tiles, products) + 3 * pairs)


def core_mixers(layer: Layer) -> list[CoreMixer]:
    """Return the parallel cores of a layer; raise `UncoveredError` for cores in series and complex ones."""
    op = only_port(layer)
    mixers = _parallel(op.chains[op.ports[0]], layer.name)
    if not mixers:
        # Raises the reason for which there is no map.
        op.scoped_map(port=op.ports[0])
    if any(mixer.is_complex for mixer in mixers):
        raise UncoveredError(
            f"{layer.name} ({layer.kind}): its attention matrices are complex, and a gradient with respect to them has "
            "no sign."
        )
    return mixers


def _parallel(chain: Chain, name: str) -> list[CoreMixer]:
    mixers: list[CoreMixer] = []
    for stage in chain:
        inner = [stage.mixer] if isinstance(stage, Mix) and stage.role == "core" else []
        if isinstance(stage, Branch):
            inner = [mixer for branch in stage.chains for mixer in _parallel(branch, name)]
        if inner and mixers:
            raise UncoveredError(
                f"{name} has several cores in series, so it has no single attention matrix with a gradient."
            )
        mixers += inner
    return mixers


def gradient_rollout_cost(scoring: Composition[GradientMapOptions], *, factors: int, relevance: int = 0) -> Estimate:
    """Return the cost of `gradient_rollout` with weights of `factors` gradients, and of the runs that give them.

    `relevance`: bytes of a frozen run, whose graph is kept while the maps are computed.
    """
    trace, resident = scoring.trace, relevance
    if scoring.target is None and one_scalar(trace, scoring.options.scalar):
        resident += scoring.map_bytes
    resident += factors * sum(
        layer.output[..., 0].numel() * layer.operator.width * layer.output.element_size() for layer in scoring.layers
    )

    def of(layer: Layer) -> int:
        mixers = core_mixers(layer)
        rows, heads = block_shape(layer, mixers, None)
        return block_bytes(layer, mixers, rows, heads)

    return weighted_cost(scoring, of, resident=resident)

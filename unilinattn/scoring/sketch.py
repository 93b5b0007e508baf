"""Estimates of the l2 norms of all pairs by a random projection of the outputs."""

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unilinattn.errors import UncoveredError
from unilinattn.memory import allowed
from unilinattn.operator.cost import tile_elements, tile_rows
from unilinattn.operator.deferred import shapes_only
from unilinattn.operator.pairwise import PairwiseContributions, Tile
from unilinattn.scoring.selection import only_port
from unilinattn.tracing.layer import Layer


def sign_sketch(size: int, width: int, seed: int, like: Tensor) -> Float[Tensor, "size width"]:
    """Return S with entries +-1 / sqrt(size), for which ||S v||^2 is an unbiased estimate of ||v||^2.

    Its relative standard deviation is at most sqrt(2 / size): the variance is 2 / size (||v||^4 - sum_a v_a^4)
    (Achlioptas, 2003). The signs depend on the seed only, not on the device.
    """
    signs = torch.randint(2, (size, width), generator=torch.Generator().manual_seed(seed), device="cpu")
    return (2 * signs - 1).to(like) / size**0.5


def sketched_form(
    layer: Layer, size: int, seed: int
) -> tuple[PairwiseContributions, PairwiseContributions, Float[Tensor, "size out"]]:
    """Return the pairwise form of a layer, that of its outputs times the sketch, and the sketch.

    Raises `UncoveredError` for a layer without a pairwise form, and for one with stages after its output projection.
    """
    form = only_port(layer).pairwise()
    if form is None or form.tail:
        reason = "has stages after its output projection" if form is not None else "has no form in pairs of tokens"
        raise UncoveredError(
            f"latim: {layer.name} {reason}, so its norms cannot be estimated by a sketch; leave sketch out."
        )
    sketch = sign_sketch(size, form.shape[3], seed, form.values)
    return form, form.projected(sketch), sketch


def sketch_cost(layer: Layer, size: int, exact_keys: int) -> int:
    """Return the bytes of estimating the norms of all pairs of a layer, some of them computed again."""
    with shapes_only():
        form, small, _ = sketched_form(layer, size, 0)
    batch, queries = form.shape[:2]
    rows = min(tile_rows(small, subject=None), queries)
    elements = tile_elements(small, rows) + batch * queries * size
    if exact_keys:
        again = min(tile_rows(form, subject=None), queries)
        elements = max(elements, tile_elements(form, again))
    return elements * form.values.element_size()


def exact_norms(
    form: PairwiseContributions, selected: Bool[Tensor, "batch query key"]
) -> Iterator[tuple[Int[Tensor, "3 pair"], Float[Tensor, " pair"]]]:
    """Yield the positions (sequence, query, key) of selected pairs and ||T_ij x_j||, some pairs at a time.

    The values before the output projection are computed for all pairs, the projection for the selected ones only.
    """
    for tile in form.tiles(form.causal):
        selection = selected[:, tile.rows, tile.cols]
        pairs = selection.nonzero().T
        if not pairs.shape[1]:
            continue
        offset = torch.tensor([[0], [tile.rows.start], [tile.cols.start]], device=pairs.device)
        width = form.channels * (form.shape[3] if form.folded is not None else 1) + form.shape[3]
        step = max(1, allowed() // (4 * width * tile.inner.element_size()))
        for some in pairs.split(step, dim=1):
            yield some + offset, _norms_at(tile, some)


def standard_errors(
    norms: Float[Tensor, "batch query key"], estimated: Bool[Tensor, "batch query key"], size: int
) -> Float[Tensor, "batch query"]:
    """Return the root mean square of the standard errors of each row's estimated norms, in the unit of the norms.

    To first order the standard error of ||v|| is at most ||v|| / sqrt(2 size).
    """
    count = estimated.sum(-1).clamp_min(1)
    return ((norms * estimated).square().sum(-1) / count / (2 * size)).sqrt()


def _norms_at(tile: Tile, pairs: Int[Tensor, "3 pair"]) -> Float[Tensor, " pair"]:
    batch, row, col = pairs
    if tile.weight is None or tile.weight.shape[0] == 1:
        v = tile.inner[batch, :, row, col]
        return torch.linalg.vector_norm(v if tile.weight is None else v @ tile.weight[0].mT, dim=-1)
    # One weight for each sequence and key, whose groups have one column.
    keys = len(tile.inner) // len(tile.diagonal)
    group = batch * keys + col
    v = tile.inner[group, :, row, 0]
    return torch.linalg.vector_norm(torch.einsum("nc,noc->no", v, tile.weight[group]), dim=-1)

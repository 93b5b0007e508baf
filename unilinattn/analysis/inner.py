"""The N inner attention matrices of a head, and its query, key and history factors (HMA ACL Eq. 15-20)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.analysis.cores import core_of
from unilinattn.analysis.pictures import Figure, Where, draw, heat_map
from unilinattn.errors import OptionError, UncoveredError, nearest
from unilinattn.kernels.precision import full_precision
from unilinattn.memory import require_result
from unilinattn.mixers import Reversed
from unilinattn.mixers.base import CoreMixer, query_of
from unilinattn.tracing.layer import Layer

MOST_PANELS = 16
"""Largest number of inner matrices in a picture; those with the largest entries are drawn."""


@dataclass(frozen=True, eq=False, repr=False)
class InnerMatrices:
    """The inner attention matrices of one head: matrix n passes through coordinate n of the state.

    Attributes:
        layer: name of the layer.
        head: the head, a channel in Mamba-1.
        matrices: (batch, state, query, key); their sum over `state` is the head's attention matrix.
    """

    layer: str
    head: int
    matrices: Float[Tensor, "batch state query key"]

    def __repr__(self) -> str:
        """Show the layer, the head and the shape."""
        return f"InnerMatrices({self.layer}, head {self.head}, {tuple(self.matrices.shape)})"

    def plot(self, where: Where = None, *, batch: int = 0) -> Figure:
        """Draw the inner matrices of one sequence with the largest entries, one panel each."""
        matrices = self.matrices[batch]
        shown = matrices.abs().amax((1, 2)).topk(min(len(matrices), MOST_PANELS)).indices.sort().values.tolist()
        panels = [heat_map(matrices[n], f"state coordinate {n}", rows="query", columns="key") for n in shown]
        return draw(where, panels, size=(2.6, 2.3))


@dataclass(frozen=True, eq=False, repr=False)
class QueryKeyHistory:
    """The factors of one head's attention matrix: alpha_ij = sum_n query_in history_ijn key_jn (HMA ACL Eq. 20).

    Attributes:
        layer: name of the layer.
        head: the head, a channel in Mamba-1.
        query: Q_i = C_i in Mamba.
        key: K_j = delta_j B_j in Mamba.
        history: H_ij = exp(sum over k from j + 1 to i of the log-decays), 0 for later keys.
    """

    layer: str
    head: int
    query: Float[Tensor, "batch length state"]
    key: Float[Tensor, "batch length state"]
    history: Float[Tensor, "batch query key state"]

    def __repr__(self) -> str:
        """Show the layer, the head and the shape."""
        return f"QueryKeyHistory({self.layer}, head {self.head}, history {tuple(self.history.shape)})"

    @property
    def matrix(self) -> Float[Tensor, "batch query key"]:
        """The product of the factors, the head's attention matrix."""
        return torch.einsum("bin,bijn,bjn->bij", self.query, self.history, self.key)

    def plot(self, where: Where = None, *, batch: int = 0) -> Figure:
        """Draw the queries, the keys, the mean history over coordinates, and their product, for one sequence."""
        panels = [
            heat_map(self.query[batch].T, "query", rows="state coordinate", columns="token"),
            heat_map(self.key[batch].T, "key", rows="state coordinate", columns="token"),
            heat_map(self.history[batch].mean(-1), "history, mean over coordinates", rows="query", columns="key"),
            heat_map(self.matrix[batch], "their product", rows="query", columns="key"),
        ]
        return draw(where, panels, columns=2)


@full_precision()
def inner_matrices(layer: Layer, head: int, *, core: int = 0) -> InnerMatrices:
    """Return the N inner attention matrices of one head: C_i[n] (prod A_k[n]) B_j[n] for S6 (HMA ACL Eq. 16).

    Inner matrix n is the head's matrix with the query's other coordinates set to zero, which defines it for every
    memory that is linear in its query, also for delta rules. Takes N times the time and the memory of the head's
    matrix.

    Args:
        layer: a layer of a trace.
        head: the head of the core, a channel in Mamba-1.
        core: index of the core mixer in a layer with several, such as the directions of ViM.

    Raises `OptionError` for a head or a core out of range, `UncoveredError` for a structure without a query, and
    `MemoryLimitError` if the matrices are larger than `max_memory`.
    """
    mixer = core_of(layer, core).mixer
    heads = _checked_head(layer, mixer, head)
    query = query_of(mixer)
    batch, _, queries, keys = mixer.shape
    count = query.shape[-1]
    _require(layer, (batch, count, queries, keys), query)
    matrices = query.new_empty(batch, count, queries, keys)
    for n in range(count):
        coordinate = torch.zeros_like(query)
        coordinate[..., n] = query[..., n]
        matrices[:, n] = mixer.with_query(coordinate).tile(heads=heads).squeeze(1)
    return InnerMatrices(layer.name, head, matrices)


@full_precision()
def query_key_history(layer: Layer, head: int, *, core: int = 0, step: str = "exact") -> QueryKeyHistory:
    """Return the query, key and history factors of one head (HMA ACL Eq. 17-20).

    `step="exact"` takes the model's step sizes softplus(s), so that the product of the factors is the attention matrix;
    "relu" takes relu(s) instead, the paper's approximation (Eq. 18), where tokens with s <= 0 write nothing and let
    nothing decay. Takes N times the memory of the head's matrix. `head` and `core` are those of `inner_matrices`.

    Raises `OptionError` for a head, core or step that does not exist, `UncoveredError` for a structure whose matrix is
    not such a product and for "relu" without step sizes, and `MemoryLimitError` if the history is larger than
    `max_memory`.
    """
    if step not in ("exact", "relu"):
        raise OptionError(f"unknown step {step!r}" + nearest(step, ("exact", "relu")))
    mixer = core_of(layer, core).mixer
    heads = _checked_head(layer, mixer, head)
    mirrored = isinstance(mixer, Reversed)
    inner = mixer.mixer if isinstance(mixer, Reversed) else mixer
    query, key, decay = (factor.squeeze(2) for factor in inner.factors(heads=heads))
    if step == "relu":
        ratio = _relu_over_softplus(layer, inner, decay, heads)
        key, decay = key * ratio, decay * ratio
    batch, _, queries, keys = mixer.shape
    count = max(query.shape[-1], key.shape[-1], decay.shape[-1])
    _require(layer, (batch, queries, keys, count), query)
    decay = decay.expand(batch, queries, count)
    history = torch.zeros(batch, queries, keys, count, dtype=query.dtype, device=query.device)
    history[:, 0, 0] = 1
    for i in range(1, queries):
        history[:, i] = history[:, i - 1] * decay[:, i, None].exp()
        history[:, i, i] = 1
    query, key = (factor.expand(batch, queries, count) for factor in (query, key))
    if mirrored:
        query, key, history = query.flip(1), key.flip(1), history.flip(1, 2)
    return QueryKeyHistory(layer.name, head, query, key, history)


def _checked_head(layer: Layer, mixer: CoreMixer, head: int) -> slice:
    if not 0 <= head < mixer.heads:
        raise OptionError(f"head={head} is out of range: {layer.name} has {mixer.heads} heads, numbered from 0.")
    return slice(head, head + 1)


def _require(layer: Layer, shape: tuple[int, ...], like: Tensor) -> None:
    require_result(shape, like.element_size(), f"the inner matrices of a head of {layer.name}", "trace fewer tokens")


def _relu_over_softplus(
    layer: Layer, mixer: CoreMixer, decay: Float[Tensor, "batch length state"], heads: slice
) -> Float[Tensor, "batch length 1"]:
    """Return relu(s) / softplus(s) of the step sizes softplus(s).

    Step sizes are key scales by which the log-decays of all tokens are multiples of one rate.
    """
    scale = getattr(mixer, "key_scale", None)
    if isinstance(scale, Tensor):
        delta = scale[:, :, heads]
        rate = decay / delta
        if bool(torch.isfinite(rate).all()) and torch.allclose(rate, rate[:1, :1].expand_as(rate), rtol=1e-4, atol=0):
            # softplus(s) = d gives s = d + log(1 - exp(-d)), without overflow for large steps.
            return (delta + torch.log(-torch.expm1(-delta))).relu() / delta
    raise UncoveredError(
        f"step='relu' replaces the softplus of step sizes, and the decays and key scales of {layer.name} are not made "
        "of common step sizes; use step='exact'."
    )

"""Token vectors inside a layer: the keys that tokens write with, the queries and values, and their similarity."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unilinattn.analysis.cores import core_of
from unilinattn.analysis.pictures import Figure, Where, draw, heat_map
from unilinattn.errors import InputError
from unilinattn.kernels.precision import full_precision
from unilinattn.mixers.base import query_of
from unilinattn.tracing.trace import Trace


@dataclass(frozen=True, eq=False, repr=False)
class TokenVectors:
    """Mean vectors of a layer by token, over the positions where the token stands `lag` positions before.

    Attributes:
        name: the factor and its layer.
        lag: distance from the token to the position of the vector: 1 for the previous token, 0 for the current one.
        tokens: the ids that occur, in ascending order.
        vectors: (token, feature).
        groups: number of key groups in `vectors`.
    """

    name: str
    lag: int
    tokens: Int[Tensor, " token"]
    vectors: Float[Tensor, "token feature"]
    groups: int = 1

    def __repr__(self) -> str:
        """Show the factor, the lag and the shape."""
        return f"TokenVectors({self.name}, lag {self.lag}, {tuple(self.vectors.shape)})"

    @property
    def basis(self) -> Float[Tensor, "token group state"]:
        """The vectors by key group, the S of `Projection.change_basis` if they are keys (Induction Eq. A.1)."""
        return self.vectors.unflatten(1, (self.groups, -1))

    @property
    def centred(self) -> "TokenVectors":
        """The vectors less their mean over tokens, which holds the parts that do not depend on the token."""
        return replace(self, vectors=self.vectors - self.vectors.mean(0))


@dataclass(frozen=True, eq=False, repr=False)
class TokenSimilarity:
    """Cosine similarity between the vectors of tokens.

    Attributes:
        rows, columns: the two sets of vectors.
        tokens: the ids.
        similarity: (row token, column token).
    """

    rows: str
    columns: str
    tokens: Int[Tensor, " token"]
    similarity: Float[Tensor, "token token"]

    @property
    def same(self) -> float:
        """Mean similarity of a token with itself, on the diagonal."""
        return float(self.similarity.diagonal().mean())

    @property
    def different(self) -> float:
        """Mean similarity of two different tokens."""
        count = len(self.tokens)
        return float((self.similarity.sum() - self.similarity.trace()) / (count * (count - 1)))

    @property
    def largest_different(self) -> float:
        """Largest absolute similarity of two different tokens; 0 for orthogonal vectors."""
        return float((self.similarity - torch.diag(self.similarity.diagonal())).abs().max())

    def __repr__(self) -> str:
        """Show both sets of vectors and the mean similarities."""
        return (
            f"TokenSimilarity({self.rows} x {self.columns}: {self.same:.2f} on the diagonal, {self.different:.2f} "
            f"beside it, {len(self.tokens)} tokens)"
        )

    def plot(self, where: Where = None) -> Figure:
        """Draw the matrix (Induction Fig. 3)."""
        labels = [str(token) for token in self.tokens.tolist()] if len(self.tokens) <= 40 else None
        panel = heat_map(
            self.similarity,
            "cosine similarity",
            rows=self.rows,
            columns=self.columns,
            row_labels=labels,
            column_labels=labels,
            limit=1.0,
        )
        return draw(where, [panel], size=(4.2, 3.6))


def token_keys(trace: Trace, layer: int, *, lag: int, core: int = 0) -> TokenVectors:
    """Return the mean key of a layer by the token `lag` positions before: W_b (k_lag * e(w)) of Induction Eq. A.1.

    The paper's model is linear up to the keys, so that W_b times the tap's share of an embedding is the token's part of
    the key. Behind norms, activations and other layers that part is measured: the mean key over the positions where the
    token stands `lag` positions before, which in the paper's model is the same up to a constant. Takes a trace of
    many sequences; time and memory are linear in length.

    Raises `InputError` without token ids, `OptionError` for a core out of range, and `UncoveredError` for a structure
    without queries and keys.
    """
    mixer = core_of(trace.layers[layer], core).mixer
    query_of(mixer)
    # Mixers with queries have keys, which their base class does not declare.
    return _means(trace, f"keys of {trace.layers[layer].name}", mixer.key, lag)  # type: ignore[attr-defined]


def token_queries(trace: Trace, layer: int, *, lag: int = 0, core: int = 0) -> TokenVectors:
    """Return the mean query of a layer by the token `lag` positions before: W_c (k_lag * e(w)), as `token_keys`."""
    mixer = core_of(trace.layers[layer], core).mixer
    return _means(trace, f"queries of {trace.layers[layer].name}", query_of(mixer), lag)


def token_values(trace: Trace, layer: int, *, lag: int = 0, core: int = 0) -> TokenVectors:
    """Return the mean value that the core mixes by the token `lag` positions before: k_lag * e(w), as `token_keys`."""
    return _means(trace, f"values of {trace.layers[layer].name}", core_of(trace.layers[layer], core).value, lag)


def token_similarity(rows: TokenVectors, columns: TokenVectors) -> TokenSimilarity:
    """Return the cosine similarity of two sets of token vectors.

    Between keys by the previous token and queries by the current one it shows the induction head: token w finds the
    value that was written after it. Between a set and itself it shows whether the vectors are orthogonal (Induction
    Fig. 3).

    Raises `InputError` for different tokens or features, fewer than two tokens, and for a vector of zeros.
    """
    if not torch.equal(rows.tokens, columns.tokens) or rows.vectors.shape != columns.vectors.shape:
        raise InputError(f"{rows!r} and {columns!r} differ in tokens or features; take both from the same sequences.")
    if len(rows.tokens) < 2:
        raise InputError("one token has no other to differ from; trace sequences of two or more tokens.")
    left, right = (_unit(vectors) for vectors in (rows, columns))
    names = [f"{x.name}, lag {x.lag}" for x in (rows, columns)]
    return TokenSimilarity(names[0], names[1], rows.tokens, left @ right.T)


def embeddings(vectors: Float[Tensor, "token feature"]) -> TokenVectors:
    """Return the rows of an embedding matrix as token vectors, for `token_similarity`."""
    return TokenVectors("embeddings", 0, torch.arange(len(vectors), device="cpu"), vectors.detach().double())


def _unit(vectors: TokenVectors) -> Float[Tensor, "token feature"]:
    norms = vectors.vectors.norm(dim=1, keepdim=True)
    if bool((norms == 0).any()):
        token = int(vectors.tokens[(norms == 0).flatten().nonzero()[0]])
        raise InputError(f"the vector of token {token} in {vectors!r} is zero and has no direction.")
    return vectors.vectors / norms


@full_precision()
def _means(trace: Trace, name: str, factor: Tensor, lag: int) -> TokenVectors:
    """Return the mean of (batch, position, group, feature) vectors by token, in float64."""
    ids, length = trace.ids, factor.shape[1]
    if ids is None or tuple(ids.shape) != tuple(factor.shape[:2]):
        raise InputError("means by token need the token ids of a traced language model.")
    if not 0 <= lag < length:
        raise InputError(f"lag={lag} is out of range: the sequences have {length} tokens.")
    ids = ids.to(factor.device)[:, : length - lag]
    real = torch.ones_like(ids, dtype=torch.bool)
    if trace.mask is not None:
        mask = trace.mask.to(factor.device)
        real = mask[:, : length - lag] & mask[:, lag:]
    features = factor[:, lag:].flatten(2)[real].double()
    tokens, group = ids[real].unique(return_inverse=True)
    total = features.new_zeros(len(tokens), features.shape[1]).index_add_(0, group, features)
    means = total / group.bincount(minlength=len(tokens)).unsqueeze(1)
    return TokenVectors(name, lag, tokens, means, factor.shape[2])

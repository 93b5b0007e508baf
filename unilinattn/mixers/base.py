"""`CoreMixer`, the base class of every token-mixing structure, and the check of factors."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Inexact, Int
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from unilinattn.errors import FactorError, InputError, UncoveredError
from unilinattn.kernels.reduced_map.dense import Taps, causal_rows, reduced, weighted
from unilinattn.kernels.row_product.naive import Sign
from unilinattn.kernels.row_product.tiled import folded
from unilinattn.memory import parts

ALL = slice(None)

Block = Callable[[slice], Tensor]
"""A block of rows of the matrix, as a function from a slice of columns to (batch, head, row, col)."""


class CoreMixer(ABC):
    """An (L_query x L_key) matrix per head, represented by its factors.

    A subclass defines `shape`, `apply`, `adjoint`, `tile`, `diagonal` and `zeros`; all other operations have defaults
    in terms of these. Each head applies its matrix to every channel of its values. The factors are public attributes
    and must not be modified.
    """

    structure: ClassVar[str]
    """Name of the algebraic structure in the coverage table."""
    causal: ClassVar[bool]
    """Whether the matrix is lower triangular for every input."""
    data_controlled: ClassVar[bool]
    """Whether the matrix depends on the input (HMA ACL Theorem 1)."""
    in_graph: ClassVar[bool] = False
    """Whether the matrix is computed by passes through the graph of a module's run."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, queries, keys)."""

    @abstractmethod
    def apply(self, value: Float[Tensor, "batch key head channel"]) -> Float[Tensor, "batch query head channel"]:
        """Mix values along the key axis: y_i = sum_j alpha_ij v_j for each head."""

    @abstractmethod
    def adjoint(self, grad: Float[Tensor, "batch query head channel"]) -> Float[Tensor, "batch key head channel"]:
        """Apply the transposed matrix of each head: z_j = sum_i alpha_ij g_i."""

    def apply_from(
        self, state: Tensor | None, value: Inexact[Tensor, "batch key head channel"]
    ) -> tuple[Inexact[Tensor, "batch query head channel"], Tensor]:
        """Apply the matrix of consecutive tokens after a state (None at the sequence's first token).

        Returns the outputs and the state after the last token. Raises `UncoveredError` for a structure that has no
        state of constant size, or none that can be carried.
        """
        raise UncoveredError(self._not_continued)

    def adjoint_from(
        self, state: Tensor | None, grad: Inexact[Tensor, "batch query head channel"]
    ) -> tuple[Inexact[Tensor, "batch key head channel"], Tensor]:
        """Apply the transposed matrix of consecutive tokens before a state (None at the sequence's last token).

        Returns the outputs and the state before the first token. Raises `UncoveredError` as `apply_from` does.
        """
        raise UncoveredError(self._not_continued)

    @property
    def _not_continued(self) -> str:
        return (
            f"a mixer of the structure {self.structure!r} ({type(self).__name__}) carries no state from one piece of "
            "the tokens to the next, so its layer cannot be computed in pieces; trace without stream_to=."
        )

    @abstractmethod
    def tile(self, rows: slice = ALL, cols: slice = ALL, heads: slice = ALL) -> Float[Tensor, "batch head row col"]:
        """Return a block of the matrix."""

    def _block(
        self, rows: slice, cols: slice, heads: slice, fill: Callable[[slice, slice], Tensor]
    ) -> Inexact[Tensor, "batch head row col"]:
        """Return `tile` from `fill`, which returns a block of consecutive rows and columns of the heads."""
        batch, total, queries, keys = self.shape
        row, col = range(queries)[rows], range(keys)[cols]
        if not row or not col:
            return self.zeros((batch, len(range(total)[heads]), len(row), len(col)))
        block = fill(slice(row[0], row[-1] + 1), slice(col[0], col[-1] + 1))
        return block[:, :, :: row.step, :: col.step]

    @abstractmethod
    def diagonal(self) -> Float[Tensor, "batch head length"]:
        """Return alpha_ii in linear time."""

    @abstractmethod
    def zeros(self, shape: tuple[int, ...]) -> Tensor:
        """Return zeros with the dtype and device of the matrix."""

    @property
    def heads(self) -> int:
        """Number of heads, each with a separate matrix."""
        return self.shape[1]

    @property
    def is_lower_triangular(self) -> bool:
        """Whether this matrix is lower triangular; always true if `causal` is."""
        return self.causal

    @property
    def is_complex(self) -> bool:
        """Whether the matrix is complex."""
        return self.zeros(()).is_complex()

    def factors(self, tokens: slice = ALL, heads: slice = ALL) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and g of alpha_ij = sum_n q_in exp(g_(j+1)n + ... + g_in) k_jn for j <= i (HMA ACL Eq. 16).

        They broadcast to (batch, token, head, state). Raises `UncoveredError` for a structure of another form.
        """
        raise UncoveredError(
            f"the matrix of the structure {self.structure!r} is no sum of products of a query, decays and a key; "
            "diagonal and scalar decays are."
        )

    def with_query(self, query: Inexact[Tensor, "batch length group state"]) -> "CoreMixer":
        """Return a mixer that reads the same memory with another query; all other factors stay frozen.

        The matrix is linear in the query. With the n-th unit vector as query of every token, `apply` returns
        coordinate n of the memory H_t that token t reads, y_t = H_t^T q_t (Induction Eq. 7).

        Raises `UncoveredError` for a structure without a query, and `InputError` for a query of another shape.
        """
        frozen = query_of(self)
        if query.shape != frozen.shape:
            raise InputError(f"query has shape {tuple(query.shape)}, and this mixer's has {tuple(frozen.shape)}.")
        other = copy(self)
        vars(other)["query"] = query
        return other

    def rows(self, index: Int[Tensor, "batch row"]) -> Float[Tensor, "batch head row key"]:
        """Return the rows at the positions `index` of each sequence, by an adjoint pass over one-hot vectors."""
        batch, heads, queries, _ = self.shape
        probe = self.zeros((batch, queries, 1, index.shape[1]))
        probe.scatter_(1, index[:, None, None, :], 1.0)
        columns = self.adjoint(probe.expand(-1, -1, heads, -1))
        return columns.permute(0, 2, 3, 1)

    def materialize(self) -> Inexact[Tensor, "batch head query key"]:
        """Return the whole matrix."""
        return self.tile()

    def mean_map(self) -> Float[Tensor, "batch query key"] | None:
        """Return the mean over heads as a new tensor without subnormal numbers, None if it needs blocks of rows.

        A structure defines it if it can be written at once, in the memory of the result.
        """
        return None

    def blocks(self, rows: int) -> Iterator[tuple[slice, Block]]:
        """Yield the rows in order, in blocks of at most `rows` rows."""
        for tokens in parts(self.shape[2], rows):
            yield tokens, partial(self.tile, tokens)

    def weighted_blocks(self, rows: int, left: Tensor | None, taps: Taps) -> Iterator[tuple[slice, Block]]:
        """Yield left_ic sum_lag alpha[i, j + lag] tap_lag[j + lag, c] in blocks of (batch, channel, row, col).

        `left` and each of `taps`, which is indexed by lag, are (batch or 1, length or 1, channel).
        """
        for tokens, block in self.blocks(rows):
            yield tokens, partial(self._weighted, tokens, block, left, taps)

    def _weighted(self, tokens: slice, block: Block, left: Tensor | None, taps: Taps, cols: slice) -> Tensor:
        # The tap of lag d moves column j + d to j: columns 0 to 9 with lags up to 3 need the matrix's columns 0 to 12.
        landed = slice(cols.start, min(cols.stop + max(taps), self.shape[3]))
        return weighted(block(landed), tokens, landed, cols.stop - cols.start, left, taps)

    def reduced_rows(
        self, rows: int, left: Tensor | None = None, taps: Taps | None = None
    ) -> Iterator[Float[Tensor, "batch row key"]]:
        """Yield the map m_ij = sum_c left_ic sum_lag alpha[i, j + lag] tap_lag[j + lag, c] in blocks of `rows` rows.

        Without `left` and `taps`, m is the sum over heads. Takes time O(heads x queries x keys).
        """
        return self.reduced_parts(parts(self.shape[2], rows), left, taps)

    def reduced_parts(
        self, blocks: Iterable[slice], left: Tensor | None = None, taps: Taps | None = None
    ) -> Iterator[Float[Tensor, "batch row key"]]:
        """Yield the map of `reduced_rows` in the given blocks of rows, in any order.

        Of a lower triangular matrix, few rows at a time are computed up to the last one's diagonal.
        """
        if self.is_lower_triangular:
            yield from causal_rows(self.tile, self.zeros, (self.shape[0], self.shape[3]), blocks, left, taps)
        else:
            yield from (reduced(self.tile(tokens), tokens, left, taps) for tokens in blocks)

    def row_product(
        self,
        row: Float[Tensor, "batch query"],
        weight: Float[Tensor, "batch query"],
        sign: Sign,
        rows: int,
        left: Tensor | None = None,
        taps: Taps | None = None,
    ) -> Float[Tensor, "batch key"]:
        """Return sum_i row_i sign(weight_i m_ij) for the map m of `reduced_rows`, in the memory of `rows` rows of m."""
        return folded(self.reduced_rows(rows, left, taps), self.shape[3], row, weight, sign)


def query_of(mixer: CoreMixer) -> Inexact[Tensor, "batch length group state"]:
    """Return the factor that reads a mixer's memory; raise `UncoveredError` for a structure without one."""
    query = getattr(mixer, "query", None)
    if isinstance(query, Tensor):
        return query
    raise UncoveredError(
        f"the structure {mixer.structure!r} has no factor `query` that reads a memory; recurrent memories with queries "
        "have one, such as selective state spaces and linear attention."
    )


def split_heads(heads: slice, total: int, count: int) -> list[slice]:
    """Split a selection of `total` heads into slices of at most `count` heads; an empty selection is one slice."""
    indices = range(total)[heads]
    pieces = [indices[start : start + count] for start in range(0, max(1, len(indices)), count)]
    return [slice(piece.start, piece.stop, piece.step) for piece in pieces]


def checked_factors(**factors: Tensor | None) -> tuple[Any, ...]:
    """Return the factors that a mixer is constructed from, after `check_factors`.

    A `TorchFunctionMode` sees this call like one of a function of torch. A frozen run replaces the factors by constants
    there, so that neither the mixer nor what its constructor computes, such as a normaliser, has a gradient.
    """
    values = tuple(factors.values())
    if has_torch_function(values):
        constants: tuple[Any, ...] = handle_torch_function(checked_factors, values, **factors)
        return constants
    check_factors(**factors)
    return values


def check_factors(**factors: Tensor | None) -> None:
    """Raise `FactorError`, which names the factor, if one has NaN or infinite entries or lies on another device.

    Infinite log-decays are refused too: a segment boundary is given by `reset`.
    """
    devices = {name: str(factor.device) for name, factor in factors.items() if factor is not None}
    if len(set(devices.values())) > 1:
        named = ", ".join(f"{name!r} on {device}" for name, device in devices.items())
        raise FactorError(f"factors lie on several devices: {named}; one is needed.")
    for name, factor in factors.items():
        # A finite sum shows that every entry is finite; an infinite one may be an overflow.
        if factor is None or torch.isfinite(factor.sum()):
            continue
        if not torch.isfinite(factor).all():
            count = int((~torch.isfinite(factor)).sum())
            raise FactorError(
                f"factor {name!r} of shape {tuple(factor.shape)} holds {count} NaN or infinite numbers; "
                "finite numbers are needed. Check the model's weights and its inputs for NaN."
            )

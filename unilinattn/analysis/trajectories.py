"""The states H_t of recurrent memories, and their projections on token vectors (Induction, sections 4-5 and A.1)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.analysis.cores import core_of
from unilinattn.analysis.pictures import Figure, Where, draw, heat_map
from unilinattn.errors import InputError
from unilinattn.kernels.precision import full_precision
from unilinattn.memory import require_result
from unilinattn.mixers.base import query_of
from unilinattn.scoring.cores import Core
from unilinattn.tracing.layer import Layer


@dataclass(frozen=True, eq=False, repr=False)
class States:
    """The memory of a layer after each token, as the token reads it: y_t = H_t^T q_t for each head.

    Attributes:
        layer: name of the layer.
        states: H_t, (batch, token, head, state, channel); in Mamba-1 a head is one channel.
    """

    layer: str
    states: Float[Tensor, "batch token head state channel"]

    def __repr__(self) -> str:
        """Show the layer and the shape."""
        return f"States({self.layer}, {tuple(self.states.shape)})"

    def plot(self, where: Where = None, *, batch: int = 0) -> Figure:
        """Draw the norm of each coordinate of the state over heads and channels, for one sequence."""
        norms = self.states[batch].norm(dim=(1, 3)).T
        title = f"{self.layer}: norm of the state"
        return draw(where, [heat_map(norms, title, rows="state coordinate", columns="token")], size=(5.2, 2.6))


@dataclass(frozen=True, eq=False, repr=False)
class Projection:
    """States projected on vectors of tokens: for each position, how much of each token's vector a coordinate holds.

    Attributes:
        layer: name of the layer.
        values: (batch, position, group, row, token). Rows are state coordinates (Induction Eq. 18), or written tokens
            after `change_basis` (Eq. 19). Heads that share a query form a group, over which the channels are summed.
    """

    layer: str
    values: Float[Tensor, "batch position group row token"]

    def __repr__(self) -> str:
        """Show the layer and the shape."""
        return f"Projection({self.layer}, {tuple(self.values.shape)})"

    def change_basis(self, basis: Float[Tensor, "written group state"]) -> "Projection":
        """Return S^T H_t v, whose rows are the tokens whose keys are the rows of `basis` (Induction Eq. 19).

        A state coordinate belongs to no token; with the columns of S the keys that tokens write with, row i holds what
        was stored under the key of token i (Induction A.1).

        Raises `InputError` if `basis` does not have the groups and coordinates of the states.
        """
        groups, rows = self.values.shape[2:4]
        if tuple(basis.shape[1:]) != (groups, rows):
            raise InputError(
                f"basis has shape {tuple(basis.shape)}; these states need (written token, {groups} groups, {rows} "
                "coordinates), such as the means of `token_keys`."
            )
        return Projection(self.layer, torch.einsum("wgn,btgnv->btgwv", basis.to(self.values), self.values))

    def plot(
        self, where: Where = None, *, token: int, batch: int = 0, group: int = 0, labels: Sequence[str] | None = None
    ) -> Figure:
        """Draw the projection on one token's vector, rows over positions, which `labels` name (Induction Fig. 6)."""
        values = self.values[batch, :, group, :, token].T
        title = f"{self.layer}: projection on token {token}"
        panel = heat_map(values, title, rows="row", columns="position" if labels is None else "", column_labels=labels)
        return draw(where, [panel], size=(7.2, 2.8))


@full_precision()
def states(layer: Layer, *, core: int = 0) -> States:
    """Return the states H_t of a layer at every token (Induction Eq. 6), for every recurrent memory with a query.

    H_t is the memory that token t reads: coordinate n is the layer's own scan with the n-th unit vector as query of
    every token. A memory that is read before it is written, such as RWKV's, includes the current token by its bonus,
    and xLSTM's is divided by its normaliser. Takes N scans, each linear in length, and L x heads x N x channels
    elements.

    `core` selects the core mixer of a layer with several.

    Raises `OptionError` for a core out of range, `UncoveredError` for a structure without a query (convolutions,
    softmax attention), and `MemoryLimitError` if the states are larger than `max_memory`.
    """
    memory = core_of(layer, core)
    batch, heads, queries, _ = memory.mixer.shape
    count = query_of(memory.mixer).shape[-1]
    shape = (batch, queries, heads, count, memory.value.shape[-1])
    require_result(
        shape, memory.value.element_size(), f"the states of {layer.name}", "project them with `project_states`"
    )
    every = memory.value.new_empty(shape)
    for n, coordinate in enumerate(_coordinates(memory)):
        every[:, :, :, n] = coordinate
    return States(layer.name, every)


@full_precision()
def project_states(layer: Layer, vectors: Float[Tensor, "token channel"], *, core: int = 0) -> Projection:
    """Return H_t v_w for the vector v_w of each token w (Induction Eq. 18), without holding the states.

    `vectors` lie in the space of the values that the core mixes, heads x channels, such as the means of
    `token_values`; the sum over channels is that over the heads that share a query. Takes N scans, linear in length.

    Raises `InputError` for vectors of another width, and the errors of `states`.
    """
    memory = core_of(layer, core)
    batch, heads, queries, _ = memory.mixer.shape
    groups, count = query_of(memory.mixer).shape[2:]
    width = heads * memory.value.shape[-1]
    if vectors.ndim != 2 or vectors.shape[1] != width:
        raise InputError(f"vectors have shape {tuple(vectors.shape)}; {layer.name} needs (token, {width} channels).")
    shape = (batch, queries, groups, count, len(vectors))
    require_result(shape, memory.value.element_size(), f"the projection of {layer.name}", "give fewer vectors")
    values = memory.value.new_empty(shape)
    by_group = vectors.to(values).unflatten(1, (groups, -1))
    for n, coordinate in enumerate(_coordinates(memory)):
        values[:, :, :, n] = torch.einsum("btgc,vgc->btgv", coordinate.flatten(2).unflatten(2, (groups, -1)), by_group)
    return Projection(layer.name, values)


def _coordinates(core: Core) -> Iterator[Float[Tensor, "batch token head channel"]]:
    """Yield each coordinate of the state at every token."""
    query = query_of(core.mixer)
    for n in range(query.shape[-1]):
        unit = torch.zeros_like(query)
        unit[..., n] = 1
        yield core.mixer.with_query(unit).apply(core.value)

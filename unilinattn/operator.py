"""`MixerOperator`: one layer of a model as a frozen linear map between tokens, kept as a chain of stages."""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unilinattn.contributions import contributions, rows_of, split_taps, tap_function, tapwise
from unilinattn.costs import pass_cost, rows_cost
from unilinattn.errors import InputError, OptionError, UncoveredError, nearest
from unilinattn.kernels.reduced_map.tiled import ROWS
from unilinattn.kernels.streamed.naive import Phi, phi_of
from unilinattn.memory import require_result, rows_within
from unilinattn.mixers.base import Cost
from unilinattn.scopes import SCOPES, scoped
from unilinattn.shares import Shares, shares_of
from unilinattn.stages import Branch, Chain, Matrix, Mix, Scale, channel_groups, run, run_adjoint, walk
from unilinattn.terms import reduced_blocks, reduced_operations, reduced_size, streamed, terms

REDUCTIONS = {
    "mean": lambda m: m.mean(1),
    "max": lambda m: m.amax(1),
    "min": lambda m: m.amin(1),
    "abs-mean": lambda m: m.abs().mean(1),
    "product": lambda m: m.prod(1),
}
"""Ways to put the heads of one row into one number (HMA ACL Tables 5 and 9)."""

Heads = Literal["mean", "max", "min", "abs-mean", "product"] | int | slice | Sequence[int] | None
Rows = int | Sequence[int] | Int[Tensor, "..."]

ROW_BUDGET = 1 << 25
"""Elements that one pass over selected rows holds at once."""


class MixerOperator:
    """A layer frozen on one input: y_i = sum_j T_ij x_j + b_i, exact there, linear everywhere.

    The map is held as chains of structured stages, one chain an input port, and never as a matrix. `apply`,
    `adjoint` and `rows` take time linear in length for every structure that has a linear-time pass.

    Args:
        chains: the stages from each port to the output; the ports' outputs are summed.
        inputs: what the host gave each port: (batch, key, channel).
        output: what the host returned: (batch, query, channel).
        mask: real positions of the output (batch, query), None where all are real.
        name: the layer's path, for messages.
        expected: what the host returned for the first tokens alone, where `output` is not the host's own.
    """

    def __init__(
        self,
        chains: Mapping[str, Chain],
        *,
        inputs: Mapping[str, Float[Tensor, "batch key in"]],
        output: Float[Tensor, "batch query out"],
        mask: Bool[Tensor, "batch query"] | None = None,
        name: str = "operator",
        expected: Float[Tensor, "batch prefix out"] | None = None,
    ) -> None:
        """Hold the chains with what the host put in and got out; raise `FactorError` for NaN in a factor."""
        for stage in (stage for chain in chains.values() for stage in walk(chain)):
            if isinstance(stage, Scale):
                stage.check(name)
        self.expected = expected
        self.chains = dict(chains)
        self.inputs = dict(inputs)
        self.output = output
        self.mask = mask
        self.name = name

    def __repr__(self) -> str:
        """Show each port's stages by role."""
        ports = "; ".join(f"{port}: {' -> '.join(s.role for s in chain)}" for port, chain in self.chains.items())
        checked = "" if self.expected is None else f", the host's own on the first {self.expected.shape[1]} tokens"
        return f"MixerOperator({self.name}, {tuple(self.output.shape)}, {ports}{checked})"

    @property
    def ports(self) -> tuple[str, ...]:
        """Names of the tensors that the layer reads."""
        return tuple(self.chains)

    @property
    def width(self) -> int:
        """Most channels that a token has anywhere between the layer's inputs and its output."""
        stages = [stage for chain in self.chains.values() for stage in walk(chain)]
        inner = (max(stage.weight.shape) for stage in stages if isinstance(stage, Matrix))
        return max(self.output.shape[-1], *(x.shape[-1] for x in self.inputs.values()), *inner)

    @property
    def has_residual(self) -> bool:
        """Whether the layer adds its own input to its output, as BERT's attention does."""
        stages = (stage for chain in self.chains.values() for stage in walk(chain))
        return any(isinstance(stage, Branch) and () in stage.chains for stage in stages)

    @property
    def bias(self) -> Float[Tensor, "batch query out"]:
        """b_i: what the layer returns for a zero input, a function of parameters and frozen scales alone."""
        zeros = {port: torch.zeros_like(x) for port, x in self.inputs.items()}
        return self._run(zeros, bias=True)

    def apply(
        self,
        x: Float[Tensor, "batch key in"] | Mapping[str, Float[Tensor, "batch key in"]],
        *,
        bias: bool = True,
    ) -> Float[Tensor, "batch query out"]:
        """Map an input to the layer's output; several ports take a mapping from port to tensor.

        Raises `InputError` if a shape differs from what the operator was frozen on.
        """
        given = dict(x) if isinstance(x, Mapping) else {self.ports[0]: x}
        if given.keys() != self.inputs.keys():
            raise InputError(f"{self.name} reads the ports {list(self.inputs)}, got {list(given)}; give each one once.")
        for port, tensor in given.items():
            self._check(f"port {port!r}", tensor, self.inputs[port])
        return self._run(given, bias=bias)

    def adjoint(self, g: Float[Tensor, "batch query out"], *, port: str | None = None) -> Float[Tensor, "batch key in"]:
        """Apply the transpose of the linear part: from the output's side to one port's input side."""
        self._check("the output side", g, self.output)
        return run_adjoint(self._chain(port), g.to(self._dtype))

    def num_heads(self, scope: str = "core", *, port: str | None = None) -> int:
        """Return the length of the head axis in a scope: heads for `core`, channels for `unified`."""
        _, groups, repeat = self._scoped(scope, port)
        return groups * repeat

    def rows(
        self, index: Rows, *, scope: str = "core", heads: Heads = "mean", port: str | None = None
    ) -> Float[Tensor, "..."]:
        """Return rows of the scope's matrix in time linear in length.

        `index` is a position, a list of positions, or (batch, row) positions of each sequence; padded positions
        count. Returns (batch, [head,] key) for one position, else (batch, [head,] row, key).
        """
        chosen, single = self._positions(index)
        chain, groups, repeat = self._scoped(scope, port)
        _check_heads(heads, groups * repeat)
        step = self._rows_at_once(groups)
        parts = [
            # Of a complex mode the real part is reported: what it passes from real input to real output.
            _reduce(rows_of(chain, groups, part, self.output).real.permute(0, 2, 3, 1), heads, repeat)
            for part in chosen.split(step, dim=1)
        ]
        rows = torch.cat(parts, dim=-2)
        return rows.squeeze(-2) if single else rows

    def row_blocks(
        self, *, scope: str = "core", heads: Heads = "mean", port: str | None = None, beside: int = 0
    ) -> Iterator[tuple[slice, Float[Tensor, "..."]]]:
        """Yield the scope's matrix from its first rows to its last, as many at a time as `max_memory` allows.

        Each is a slice of queries with their (batch, [head,] row, key). The mean over heads is taken without the
        heads' own maps where the structure allows it. `beside`: how many numbers the caller will hold for each
        entry of a block without heads, beside the block.
        """
        chain, groups, repeat = self._scoped(scope, port)
        _check_heads(heads, groups * repeat)
        queries = self.output.shape[1]
        if not queries:
            yield slice(0, 0), self._no_rows(heads, groups * repeat, port)
            return
        what = f"the {scope} map of {self.name}"
        size, _ = self.block_rows(scope=scope, heads=heads, port=port, beside=beside, what=what)
        found = terms(chain) if _is_mean(heads) else None
        if found is not None:
            yield from reduced_blocks(found, self._map_shape(port), size, self.output)
            return
        for start in range(0, queries, size):
            part = slice(start, min(start + size, queries))
            yield part, self.rows(range(part.start, part.stop), scope=scope, heads=heads, port=port)

    def streamed(
        self,
        row: Float[Tensor, "batch query"],
        weight: Float[Tensor, "batch query"],
        phi: Phi,
        *,
        scope: str = "core",
        port: str | None = None,
    ) -> Float[Tensor, "batch key"]:
        """Return sum_i row_i phi(weight_i m_ij), m the mean over heads, without holding m.

        phi is "keep", "clamp" (at zero) or "abs": what attribution makes of signs (HMA ACL Eq. 24, Table 6). Time:
        that of the map; memory: the blocks that `max_memory` allows.
        """
        chain, _, _ = self._scoped(scope, port)
        shape = (*self.output.shape[:2], self.inputs[port or self.ports[0]].shape[1])
        found = terms(chain)
        if found is None:
            blocks = self.row_blocks(scope=scope, port=port)
            parts = (row[:, None, at] @ phi_of(phi, block * weight[:, at, None]) for at, block in blocks)
            return torch.stack([part.squeeze(1) for part in parts]).sum(0)
        width, what = self.output.element_size(), f"the {scope} map of {self.name}"
        size = rows_within(lambda rows: width * reduced_size(found, shape, rows), ROWS, what)
        return streamed(found, shape, size, row, weight, phi)

    def block_rows(
        self,
        *,
        scope: str = "core",
        heads: Heads = "mean",
        port: str | None = None,
        beside: int = 0,
        what: str | None = None,
    ) -> tuple[int, int]:
        """Return how many rows a block of `row_blocks` has within `max_memory`, and the bytes that it then holds.

        Raises `MemoryLimitError` if not even one row of `what` fits; without a name it takes one row all the same.
        """
        chain, groups, repeat = self._scoped(scope, port)
        (batch, queries, keys), width = self._map_shape(port), self.output.element_size()
        found = terms(chain) if _is_mean(heads) else None
        kept = 0 if isinstance(heads, (str, int)) else 2 * _count(heads, groups * repeat)

        def size(rows: int) -> int:
            own = batch * rows * keys * (4 * groups + kept)
            own = own if found is None else reduced_size(found, (batch, queries, keys), rows)
            return width * (own + batch * rows * keys * beside)

        rows = rows_within(size, min(ROWS, queries), what)
        return rows, size(min(rows, queries))

    def map_operations(self, *, scope: str = "core", heads: Heads = "mean", port: str | None = None) -> int:
        """Return how much `row_blocks` multiplies for all rows."""
        chain, _, _ = self._scoped(scope, port)
        shape = self._map_shape(port)
        found = terms(chain) if _is_mean(heads) else None
        if found is not None:
            return reduced_operations(found, shape)
        return sum(stage.mixer.map_operations(1) for stage in walk(chain) if isinstance(stage, Mix))

    def rows_cost(self, rows: int, *, scope: str = "core", port: str | None = None) -> Cost:
        """Return what `rows` costs for so many rows."""
        chain, groups, _ = self._scoped(scope, port)
        return rows_cost(chain, prod(self._map_shape(port)[::2]), groups, rows)

    def left_multiply_cost(self, rows: int, *, scope: str = "core", port: str | None = None) -> Cost:
        """Return what `left_multiply` costs for so many rows."""
        chain, groups, _ = self._scoped(scope, port)
        return pass_cost(chain, prod(self._map_shape(port)[:2]), groups, rows)

    def apply_cost(self) -> Cost:
        """Return what `apply` costs."""
        found = [
            pass_cost(chain, prod(self._map_shape(port)[::2]), self.inputs[port].shape[2])
            for port, chain in self.chains.items()
        ]
        return Cost(max(cost.numbers for cost in found), sum(cost.operations for cost in found))

    def matrix(self, scope: str = "core", heads: Heads = "mean", *, port: str | None = None) -> Float[Tensor, "..."]:
        """Materialize the scope's matrix: (batch, query, key), or (batch, head, query, key) with `heads=None`.

        An index, a slice or a list selects heads; "max", "min", "abs-mean" and "product" reduce over them.
        Raises `OptionError` for an unknown scope or for `layer`, whose entries are matrices: use `contributions`;
        `MemoryLimitError` before it fills a matrix that is larger than `max_memory`.
        """
        _, groups, repeat = self._scoped(scope, port)
        _check_heads(heads, groups * repeat)
        batch, queries, keys = self._map_shape(port)
        of_heads = () if isinstance(heads, (str, int)) else (_count(heads, groups * repeat),)
        shape = (batch, *of_heads, queries, keys)
        what = f"the {scope} matrix of {self.name} with heads={heads!r}"
        instead = "ask for some rows with `rows`, take `row_blocks`, or reduce the heads with heads='mean'"
        require_result(shape, self.output.element_size(), what, instead)
        whole = self.output.new_empty(shape)
        for part, block in self.row_blocks(scope=scope, heads=heads, port=port):
            whole[..., part, :] = block
        return whole

    def left_multiply(
        self, rows: Float[Tensor, "batch row query"], *, scope: str = "core", port: str | None = None
    ) -> Float[Tensor, "batch row key"]:
        """Return rows @ mean_h alpha by one adjoint pass, without the matrix: time linear in length for each row.

        What rollout asks of a layer: r <- r (I + mean_h alpha) (HMA ACL Eq. 21-22).
        """
        batch, queries, _ = self._map_shape(port)
        self._check("rows", rows, self.output.new_empty(()).expand(batch, rows.shape[1], queries))
        chain, groups, _ = self._scoped(scope, port)
        columns = rows.to(self._dtype).transpose(1, 2).unsqueeze(2).expand(-1, -1, groups, -1)
        return run_adjoint(chain, columns).real.mean(2).transpose(1, 2)

    def contributions(self, index: Rows, *, port: str | None = None, activation: str = "exact") -> Float[Tensor, "..."]:
        """Return T_ij x_j, what each token adds to the outputs at selected positions (LaTIM Eq. 22-25).

        With `bias` they sum to y_i when `activation` is "exact"; "silu", "relu", "identity", "taylor1" and
        "taylor2" instead split the convolution's activation over its taps, as the paper does (LaTIM Eq. 19-21).
        Returns (batch, key, out) for one position, else (batch, row, key, out).
        """
        chosen, single = self._positions(index)
        chain, x = self._chain(port), self.inputs[port or self.ports[0]]
        if activation == "exact":
            shares = contributions(chain, chosen, x, self.output, self.name)
        else:
            shares = tapwise(chain, chosen, x, self.output, self.name, tap_function(activation))
        shares = shares.transpose(2, 3)
        return shares.squeeze(1) if single else shares

    def shares(self, *, port: str | None = None) -> Shares | None:
        """Return T_ij x_j of all pairs in tiles, None where rows of `contributions` are the only form."""
        x = self.inputs[port or self.ports[0]].to(self._dtype)
        return shares_of(self._chain(port), x, *self.output.shape[1:])

    def activation_bias(self, activation: str, *, port: str | None = None) -> Float[Tensor, "batch query out"]:
        """Return the bias that goes with `contributions(activation=...)`: sum_p M_ip f(b_c) and what comes later."""
        if activation == "exact":
            return self.bias
        before, conv, rest = split_taps(self._chain(port), self.name)
        x = self.inputs[port or self.ports[0]]
        level = conv.apply(run(before, torch.zeros_like(x), bias=True))
        return run(rest, tap_function(activation)(level))

    def reconstruction_error(self) -> float:
        """Return ||op(x) - y|| / ||y|| against what the host computed: the worst sequence, over real tokens.

        Where `expected` was given, the host computed a prefix alone, and the error is that of the prefix.
        """
        reference = self.output if self.expected is None else self.expected
        prefix = slice(reference.shape[1])
        mask = None if self.mask is None else self.mask[:, prefix]
        return worst_error(self._run(self.inputs, bias=True)[:, prefix], reference, mask)

    def _map_shape(self, port: str | None) -> tuple[int, int, int]:
        """Return (batch, query, key) of a port's map."""
        batch, queries = self.output.shape[:2]
        return batch, queries, self.inputs[port or self.ports[0]].shape[1]

    def _no_rows(self, heads: Heads, total: int, port: str | None) -> Tensor:
        of_heads = () if isinstance(heads, (str, int)) else (_count(heads, total),)
        batch, _, keys = self._map_shape(port)
        return self.output.new_zeros(batch, *of_heads, 0, keys)

    @property
    def _dtype(self) -> torch.dtype:
        return self.output.dtype

    def _chain(self, port: str | None) -> Chain:
        if port is not None and port not in self.chains:
            raise OptionError(f"{self.name} has no port {port!r}" + nearest(port, self.chains))
        return self.chains[port or self.ports[0]]

    def _run(self, inputs: Mapping[str, Tensor], *, bias: bool) -> Tensor:
        return sum(
            (run(chain, inputs[port].to(self._dtype), bias=bias) for port, chain in self.chains.items()),
            start=torch.zeros((), dtype=self._dtype, device=self.output.device),
        )

    def _scoped(self, scope: str, port: str | None) -> tuple[Chain, int, int]:
        """Return the scope's stages, the channels that tell them apart, and how many output channels share one."""
        if scope not in SCOPES:
            raise OptionError(f"unknown scope {scope!r}" + nearest(scope, SCOPES))
        if scope == "layer":
            raise OptionError(
                "scope 'layer' has a matrix for every pair of tokens, not a number; "
                "call `contributions(i)` for the vectors T_ij x_j, or the methods 'latim' and 'alti' for their norms."
            )
        chain, channels = scoped(self._chain(port), scope, self.inputs[port or self.ports[0]].shape[2])
        groups = channel_groups(chain)
        if groups is None:
            raise UncoveredError(f"{self.name}: a stage inside scope {scope!r} mixes channels; use `contributions`.")
        return chain, groups, channels // groups if scope == "unified" else 1

    def _rows_at_once(self, groups: int) -> int:
        batch, queries = self.output.shape[:2]
        return max(1, ROW_BUDGET // max(1, batch * queries * groups))

    def _positions(self, index: Rows) -> tuple[Int[Tensor, "batch row"], bool]:
        batch, length = self.output.shape[:2]
        chosen = torch.as_tensor(list(index) if isinstance(index, range) else index, device=self.output.device)
        if chosen.is_floating_point() or chosen.dtype == torch.bool or chosen.ndim > 2:
            raise InputError(
                f"positions are integers or (batch, row) integers, got {chosen.dtype} of {tuple(chosen.shape)}."
            )
        if chosen.numel() and not (-length <= int(chosen.min()) and int(chosen.max()) < length):
            raise InputError(f"position {chosen.tolist()} is out of range: {self.name} has {length} output positions.")
        chosen = chosen % length
        single = chosen.ndim == 0
        if chosen.ndim == 2 and chosen.shape[0] != batch:
            raise InputError(
                f"(batch, row) positions need one row a sequence: got {chosen.shape[0]}, batch is {batch}."
            )
        return (chosen if chosen.ndim == 2 else chosen.reshape(1, -1)).expand(batch, -1), single

    def _check(self, what: str, got: Tensor, expected: Tensor) -> None:
        if got.shape != expected.shape:
            raise InputError(
                f"{self.name} was frozen on shape {tuple(expected.shape)} for {what}, got {tuple(got.shape)}; "
                "an operator applies to that shape only. Trace again for other inputs."
            )
        if got.device != expected.device:
            raise InputError(f"{self.name} is on {expected.device}, got {what} on {got.device}; move it there.")


def worst_error(
    got: Float[Tensor, "batch query out"],
    reference: Float[Tensor, "batch query out"],
    mask: Bool[Tensor, "batch query"] | None = None,
) -> float:
    """Return ||got - reference|| / ||reference||, the worst sequence, over positions that a mask tells real."""
    # A norm over many numbers leaves float16.
    wide = torch.promote_types(reference.dtype, torch.float32)
    got, reference = got.to(wide), reference.to(wide)
    difference = got - reference
    if mask is not None:
        difference, reference = difference * mask[..., None], reference * mask[..., None]
    norms = difference.flatten(1).norm(dim=1), reference.flatten(1).norm(dim=1)
    return float((norms[0] / norms[1].clamp_min(torch.finfo(reference.dtype).tiny)).max())


def _is_mean(heads: Heads) -> bool:
    return isinstance(heads, str) and heads == "mean"


def _count(heads: slice | Sequence[int] | None, total: int) -> int:
    """Return how many of the heads are selected."""
    return (
        len(range(total)[slice(None) if heads is None else heads])
        if heads is None or isinstance(heads, slice)
        else len(heads)
    )


def _check_heads(heads: Heads, total: int) -> None:
    """Refuse an unknown reduction and heads that do not exist."""
    if isinstance(heads, str):
        if heads not in REDUCTIONS:
            raise OptionError(f"unknown reduction over heads {heads!r}" + nearest(heads, REDUCTIONS))
        return
    if heads is None or isinstance(heads, slice):
        return
    wanted = [heads] if isinstance(heads, int) else list(heads)
    if any(not -total <= head < total for head in wanted):
        raise OptionError(f"heads {wanted} are out of range: this scope has {total} heads, 0 to {total - 1}.")


def _reduce(rows: Float[Tensor, "batch head row key"], heads: Heads, repeat: int) -> Tensor:
    """Reduce or select the head axis, each of whose entries stands for `repeat` equal ones."""
    if isinstance(heads, str):
        reduced = REDUCTIONS[heads](rows)
        return reduced**repeat if heads == "product" else reduced
    rows = rows.repeat_interleave(repeat, dim=1) if repeat > 1 else rows
    if heads is None:
        return rows
    if isinstance(heads, slice):
        return rows[:, heads]
    picked = rows[:, [heads] if isinstance(heads, int) else list(heads)]
    return picked.squeeze(1) if isinstance(heads, int) else picked

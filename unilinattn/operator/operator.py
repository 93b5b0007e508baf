"""`MixerOperator`: one layer of a model as a frozen linear map between tokens, kept as a chain of stages."""

from collections.abc import Iterator, Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unilinattn.errors import InputError, OptionError, UncoveredError, nearest
from unilinattn.kernels.precision import full_precision, in_full_precision
from unilinattn.kernels.reduced_map.tiled import ROWS
from unilinattn.kernels.row_product.naive import Sign, apply_sign
from unilinattn.memory import require_result, rows_within
from unilinattn.operator.contributions import contributions, split_taps, tap_function, tapwise
from unilinattn.operator.cost import block_cut, map_cut, reduced_elements
from unilinattn.operator.factored import factored, reduced_blocks, row_product
from unilinattn.operator.pairwise import PairwiseContributions, pairwise_of
from unilinattn.operator.rows import by_head, reduced_block, reduced_rows, rows_of
from unilinattn.operator.scopes import SCOPES, ScopedMap, scoped
from unilinattn.operator.selection import (
    Checked,
    Heads,
    Rows,
    as_slice,
    checked_heads,
    checked_rows,
    count_heads,
    is_mean,
)
from unilinattn.operator.stages import Branch, Chain, Matrix, Scale, channel_groups, run, run_adjoint, walk


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
    @full_precision()
    def bias(self) -> Float[Tensor, "batch query out"]:
        """b_i: what the layer returns for a zero input, a function of parameters and frozen scales alone."""
        zeros = {port: torch.zeros_like(x) for port, x in self.inputs.items()}
        return self._run(zeros, bias=True)

    @full_precision()
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

    @full_precision()
    def adjoint(self, g: Float[Tensor, "batch query out"], *, port: str | None = None) -> Float[Tensor, "batch key in"]:
        """Apply the transpose of the linear part: from the output's side to one port's input side."""
        self._check("the output side", g, self.output)
        return run_adjoint(self._chain(port), g.to(self._dtype))

    def num_heads(self, scope: str = "core", *, port: str | None = None) -> int:
        """Return the length of the head axis in a scope: heads for `core`, channels for `unified`."""
        return self.scoped_map(scope, port=port).heads

    @full_precision()
    def rows(
        self, index: Rows, *, scope: str = "core", heads: Heads = "mean", port: str | None = None
    ) -> Float[Tensor, "..."]:
        """Return rows of the scope's matrix in time linear in length.

        `index` is a position, a list of positions, or (batch, row) positions of each sequence; padded positions
        count. Returns (batch, [head,] key) for one position, else (batch, [head,] row, key).
        """
        chosen, single = checked_rows(index, self.output, self.name)
        found = self.scoped_map(scope, port=port)
        picked = checked_heads(heads, found.heads)
        count, channels, _ = block_cut(found, 0, chosen.shape[1], None)
        parts = []
        for part in chosen.split(count, dim=1):
            block = as_slice(part)
            if block is None:
                rows = by_head(rows_of(found.chain, found.groups, part, self.output))
                parts.append(reduced_rows(rows, picked, found.repeat))
            else:
                parts.append(self._block(found, block, picked, channels))
        rows = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)
        return rows.squeeze(-2) if single else rows

    def row_blocks(
        self, *, scope: str = "core", heads: Heads = "mean", port: str | None = None, beside: int = 0
    ) -> Iterator[tuple[slice, Float[Tensor, "..."]]]:
        """Yield the scope's matrix from its first rows to its last, as many at a time as `max_memory` allows.

        Each is a slice of queries with their (batch, [head,] row, key). The mean over heads is taken without the
        heads' own maps where the structure allows it. `beside`: elements that the caller holds for each entry of a
        block without heads, beside the block.
        """
        found = self.scoped_map(scope, port=port)
        picked = checked_heads(heads, found.heads)
        batch, queries, keys = found.shape
        if not queries:
            of_heads = () if isinstance(heads, (str, int)) else (count_heads(heads, found.heads),)
            yield slice(0, 0), self.output.new_zeros(batch, *of_heads, 0, keys)
            return
        size, channels, _ = map_cut(found, heads, beside=beside, what=f"the {scope} map of {self.name}")
        terms = factored(found.chain) if is_mean(heads) else None
        if terms is not None:
            yield from in_full_precision(reduced_blocks(terms, found.shape, size, self.output))
            return
        for start in range(0, queries, size):
            part = slice(start, min(start + size, queries))
            yield part, self._block(found, part, picked, channels)

    @full_precision()
    def row_product(
        self,
        row: Float[Tensor, "batch query"],
        weight: Float[Tensor, "batch query"],
        sign: Sign,
        *,
        scope: str = "core",
        port: str | None = None,
    ) -> Float[Tensor, "batch key"]:
        """Return sum_i row_i sign(weight_i m_ij), m the mean over heads, without holding m.

        sign is "keep", "clamp" (at zero) or "abs": what attribution makes of signs (HMA ACL Eq. 24, Table 6). Time:
        that of the map; memory: the blocks that `max_memory` allows.
        """
        found = self.scoped_map(scope, port=port)
        terms = factored(found.chain)
        if terms is None:
            blocks = self.row_blocks(scope=scope, port=port)
            parts = (row[:, None, at] @ apply_sign(sign, block * weight[:, at, None]) for at, block in blocks)
            return torch.stack([part.squeeze(1) for part in parts]).sum(0)
        width, what = self.output.element_size(), f"the {scope} map of {self.name}"
        size = rows_within(lambda rows: width * reduced_elements(terms, found.shape, rows), ROWS, what)
        return row_product(terms, found.shape, size, row, weight, sign)

    @full_precision()
    def matrix(self, scope: str = "core", heads: Heads = "mean", *, port: str | None = None) -> Float[Tensor, "..."]:
        """Materialize the scope's matrix: (batch, query, key), or (batch, head, query, key) with `heads=None`.

        An index, a slice or a list selects heads; "max", "min", "abs-mean" and "product" reduce over them.
        Raises `OptionError` for an unknown scope or for `layer`, whose entries are matrices: use `contributions`;
        `MemoryLimitError` before it fills a matrix that is larger than `max_memory`.
        """
        found = self.scoped_map(scope, port=port)
        picked = checked_heads(heads, found.heads)
        batch, queries, keys = found.shape
        of_heads = () if isinstance(picked, (str, int)) else (count_heads(picked, found.heads),)
        shape = (batch, *of_heads, queries, keys)
        what = f"the {scope} matrix of {self.name} with heads={heads!r}"
        instead = "ask for some rows with `rows`, take `row_blocks`, or reduce the heads with heads='mean'"
        require_result(shape, self.output.element_size(), what, instead)
        whole = self.output.new_empty(shape)
        for part, block in self.row_blocks(scope=scope, heads=heads, port=port):
            whole[..., part, :] = block
        return whole

    @full_precision()
    def left_multiply(
        self, rows: Float[Tensor, "batch row query"], *, scope: str = "core", port: str | None = None
    ) -> Float[Tensor, "batch row key"]:
        """Return rows @ mean_h alpha by one adjoint pass, without the matrix: time linear in length for each row.

        What rollout asks of a layer: r <- r (I + mean_h alpha) (HMA ACL Eq. 21-22).
        """
        batch, queries = self.output.shape[:2]
        self._check("rows", rows, self.output.new_empty(()).expand(batch, rows.shape[1], queries))
        found = self.scoped_map(scope, port=port)
        columns = rows.to(self._dtype).transpose(1, 2).unsqueeze(2).expand(-1, -1, found.groups, -1)
        return run_adjoint(found.chain, columns).real.mean(2).transpose(1, 2)

    @full_precision()
    def contributions(self, index: Rows, *, port: str | None = None, activation: str = "exact") -> Float[Tensor, "..."]:
        """Return T_ij x_j, what each token adds to the outputs at selected positions (LaTIM Eq. 22-25).

        With `bias` they sum to y_i when `activation` is "exact"; "silu", "relu", "identity", "taylor1" and
        "taylor2" instead split the convolution's activation over its taps, as the paper does (LaTIM Eq. 19-21).
        Returns (batch, key, out) for one position, else (batch, row, key, out).
        """
        chosen, single = checked_rows(index, self.output, self.name)
        chain, x = self._chain(port), self.inputs[port or self.ports[0]]
        if activation == "exact":
            shares = contributions(chain, chosen, x, self.output, self.name)
        else:
            shares = tapwise(chain, chosen, x, self.output, self.name, tap_function(activation))
        shares = shares.transpose(2, 3)
        return shares.squeeze(1) if single else shares

    @full_precision()
    def pairwise(self, *, port: str | None = None) -> PairwiseContributions | None:
        """Return T_ij x_j of all pairs in tiles, None where rows of `contributions` are the only form."""
        x = self.inputs[port or self.ports[0]].to(self._dtype)
        return pairwise_of(self._chain(port), x, *self.output.shape[1:])

    @full_precision()
    def activation_bias(self, activation: str, *, port: str | None = None) -> Float[Tensor, "batch query out"]:
        """Return the bias that goes with `contributions(activation=...)`: sum_p M_ip f(b_c) and what comes later."""
        if activation == "exact":
            return self.bias
        before, conv, rest = split_taps(self._chain(port), self.name)
        x = self.inputs[port or self.ports[0]]
        level = conv.apply(run(before, torch.zeros_like(x), bias=True))
        return run(rest, tap_function(activation)(level))

    @full_precision()
    def reconstruction_error(self) -> float:
        """Return ||op(x) - y|| / ||y|| against what the host computed: the worst sequence, over real tokens.

        Where `expected` was given, the host computed a prefix alone, and the error is that of the prefix.
        """
        reference = self.output if self.expected is None else self.expected
        prefix = slice(reference.shape[1])
        mask = None if self.mask is None else self.mask[:, prefix]
        return worst_error(self._run(self.inputs, bias=True)[:, prefix], reference, mask)

    def scoped_map(self, scope: str = "core", *, port: str | None = None) -> ScopedMap:
        """Return the scope's stages with the shape of their matrix.

        Raises `OptionError` for an unknown scope and for `layer`, `UncoveredError` if a stage in it mixes channels.
        """
        if scope not in SCOPES:
            raise OptionError(f"unknown scope {scope!r}" + nearest(scope, SCOPES))
        if scope == "layer":
            raise OptionError(
                "scope 'layer' has a matrix for every pair of tokens, not a number; "
                "call `contributions(i)` for the vectors T_ij x_j, or the methods 'latim' and 'alti' for their norms."
            )
        whole, x = self._chain(port), self.inputs[port or self.ports[0]]
        chain, channels = scoped(whole, scope, x.shape[2])
        groups = channel_groups(chain)
        if groups is None:
            raise UncoveredError(f"{self.name}: a stage inside scope {scope!r} mixes channels; use `contributions`.")
        shape = (*self.output.shape[:2], x.shape[1])
        repeat = channels // groups if scope == "unified" else 1
        return ScopedMap(chain, groups, repeat, shape, tuple(self.chains.values()), self.output.element_size())

    def _block(self, found: ScopedMap, rows: slice, heads: Checked, channels: int) -> Tensor:
        return reduced_block(found.chain, found.groups, found.repeat, rows, heads, self.output, channels)

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

    def _check(self, what: str, got: Tensor, expected: Tensor) -> None:
        if not isinstance(got, Tensor):
            raise InputError(f"{self.name} takes a tensor for {what}, got {type(got).__name__}.")
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

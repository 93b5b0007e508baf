"""`MixerOperator`: one layer of a model as a frozen linear map between tokens, stored as a chain of stages."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unilinattn.errors import OptionError, UncoveredError, nearest
from unilinattn.kernels.precision import full_precision, in_full_precision
from unilinattn.kernels.row_product.naive import Sign
from unilinattn.memory import require_result
from unilinattn.operator.contributions import contributions, split_taps, sum_of_contributions, tap_function
from unilinattn.operator.maps import fill_heads, map_blocks, map_row_product, map_rows, map_shape, mean_map
from unilinattn.operator.pairwise import PairwiseContributions, pairwise_of
from unilinattn.operator.reconstruction import worst_error
from unilinattn.operator.scopes import ScopedMap, check_scope, has_core, scoped
from unilinattn.operator.selection import Heads, Rows, check_input, checked_inputs, checked_rows
from unilinattn.operator.stages import (
    WHOLE,
    Branch,
    Chain,
    Matrix,
    Scale,
    Stage,
    channel_groups,
    run,
    run_adjoint,
    run_on_zeros,
    walk,
)


class MixerOperator:
    """A layer frozen on one input: y_i = sum_j T_ij x_j + b_i, linear, and exact on that input.

    The map is stored as chains of structured stages, one chain per input port. `apply`, `adjoint` and `rows` take time
    linear in length for every structure with a linear-time pass.

    Args:
        chains: the stages from each port to the output; the outputs of all ports are summed.
        inputs: the host's input of each port, (batch, key, channel).
        output: the host's output, (batch, query, channel).
        mask: True for real positions of the output, (batch, query); None if all are real.
        name: the layer's path, for messages.
        expected: the host's output for the first tokens, if `output` is not computed by the host.

    Raises `FactorError` if a factor has NaN or infinite entries.
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
        """Store the chains with the host's inputs and output."""
        self.chains, self.inputs, self.output = dict(chains), dict(inputs), output
        self.mask, self.name, self.expected = mask, name, expected
        for stage in self._stages():
            if isinstance(stage, Scale):
                stage.check(name)

    def __repr__(self) -> str:
        """Show the roles of each port's stages."""
        ports = "; ".join(f"{port}: {' -> '.join(s.role for s in chain)}" for port, chain in self.chains.items())
        checked = "" if self.expected is None else f", the host's own on the first {self.expected.shape[1]} tokens"
        return f"MixerOperator({self.name}, {tuple(self.output.shape)}, {ports}{checked})"

    @property
    def ports(self) -> tuple[str, ...]:
        """Names of the layer's input tensors."""
        return tuple(self.chains)

    @property
    def width(self) -> int:
        """Largest number of channels between the layer's inputs and its output."""
        inner = (max(stage.shape) for stage in self._stages() if isinstance(stage, Matrix))
        return max(self.output.shape[-1], *(x.shape[-1] for x in self.inputs.values()), *inner)

    @property
    def has_residual(self) -> bool:
        """Whether the layer adds its input to its output, as BERT's attention does."""
        return any(isinstance(stage, Branch) and () in stage.chains for stage in self._stages())

    @property
    @full_precision()
    def bias(self) -> Float[Tensor, "batch query out"]:
        """b_i: the output for a zero input, a function of parameters and frozen scales only."""
        if not any(stage.has_bias for stage in self._stages()):
            return torch.zeros_like(self.output)
        return self._sum(run_on_zeros(chain, self.inputs[port].to(self.output)) for port, chain in self.chains.items())

    @full_precision()
    def apply(
        self,
        x: Float[Tensor, "batch key in"] | Mapping[str, Float[Tensor, "batch key in"]],
        *,
        bias: bool = True,
    ) -> Float[Tensor, "batch query out"]:
        """Map an input, or a mapping from port to input, to the layer's output.

        Raises `InputError` if a shape differs from that of the frozen input.
        """
        return self._run(checked_inputs(self.name, x, self.inputs), bias=bias)

    @full_precision()
    def adjoint(self, g: Float[Tensor, "batch query out"], *, port: str | None = None) -> Float[Tensor, "batch key in"]:
        """Apply the transpose of the linear part, from the output to one port's input."""
        check_input(self.name, "the output side", g, self.output)
        return run_adjoint(self._port(port)[0], g.to(self.output.dtype))

    def num_heads(self, scope: str = "core", *, port: str | None = None) -> int:
        """Return the length of the head axis in a scope: heads for `core`, channels for `unified`."""
        return self.scoped_map(scope, port=port).heads

    @full_precision()
    def rows(
        self, index: Rows, *, scope: str = "core", heads: Heads = "mean", port: str | None = None
    ) -> Float[Tensor, "..."]:
        """Return rows of the scope's matrix, in time linear in length per row.

        `index` is a position, a list of positions, or positions of each sequence, (batch, row); padding counts.
        Returns (batch, [head,] key) for one position, else (batch, [head,] row, key).
        """
        positions, single = checked_rows(index, self.output, self.name)
        rows = map_rows(self.scoped_map(scope, port=port), positions, heads)
        return rows.squeeze(-2) if single else rows

    def row_blocks(
        self, *, scope: str = "core", heads: Heads = "mean", port: str | None = None, extra_elements: int = 0
    ) -> Iterator[tuple[slice, Float[Tensor, "..."]]]:
        """Yield slices of queries and their rows (batch, [head,] row, key), as many as `max_memory` allows.

        `extra_elements`: elements that the caller holds for each entry of a block without heads.
        """
        scoped_map, subject = self.scoped_map(scope, port=port), f"the {scope} map of {self.name}"
        return in_full_precision(map_blocks(scoped_map, heads, subject, extra_elements))

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
        """Return sum_i row_i sign(weight_i m_ij) for the mean m over heads, which is computed in blocks.

        `sign` is "keep", "clamp" (negative values to 0) or "abs" (HMA ACL Eq. 24, Table 6). Takes the time of the map,
        and the memory of the blocks that `max_memory` allows.
        """
        return map_row_product(self.scoped_map(scope, port=port), row, weight, sign, f"the {scope} map of {self.name}")

    @full_precision()
    def matrix(self, scope: str = "core", heads: Heads = "mean", *, port: str | None = None) -> Float[Tensor, "..."]:
        """Return the scope's matrix: (batch, query, key), or (batch, head, query, key) with `heads=None`.

        An index, a slice or a list selects heads; "max", "min", "abs-mean", "product" and "geometric-mean" reduce
        over them. The product of many heads underflows; the geometric mean is its root, with its sign.
        Raises `OptionError` for an unknown scope or for `layer`, whose entries are matrices: use `contributions`;
        `MemoryLimitError` before allocation if the matrix is larger than `max_memory`.
        """
        scoped_map = self.scoped_map(scope, port=port)
        shape = map_shape(scoped_map, heads)
        subject = f"the {scope} matrix of {self.name} with heads={heads!r}"
        instead = "ask for some rows with `rows`, take `row_blocks`, or reduce the heads with heads='mean'"
        require_result(shape, self.output.element_size(), subject, instead)
        if isinstance(heads, str) and heads == "mean" and (mean := mean_map(scoped_map)) is not None:
            return mean
        whole = self.output.new_empty(shape)
        for tokens, block in map_blocks(scoped_map, heads, f"the {scope} map of {self.name}"):
            whole[..., tokens, :] = block
        return whole

    @full_precision()
    def fill_heads(self, out: Float[Tensor, "batch head query key"], heads: Sequence[int], scope: str = "core") -> None:
        """Write the matrices of some heads, counted from 0, into `out`, block by block as `max_memory` allows."""
        fill_heads(out, self.scoped_map(scope), heads, f"the {scope} map of {self.name}")

    @full_precision()
    def left_multiply(
        self, rows: Float[Tensor, "batch row query"], *, scope: str = "core", port: str | None = None
    ) -> Float[Tensor, "batch row key"]:
        """Return rows @ mean_h alpha by one adjoint pass, in time linear in length per row.

        Rollout of selected rows takes one call per layer: r <- r (I + mean_h alpha) (HMA ACL Eq. 21-22).
        """
        batch, queries = self.output.shape[:2]
        check_input(self.name, "rows", rows, self.output.new_empty(()).expand(batch, rows.shape[1], queries))
        scoped_map = self.scoped_map(scope, port=port)
        columns = rows.to(self.output.dtype).transpose(1, 2).unsqueeze(2).expand(-1, -1, scoped_map.groups, -1)
        return run_adjoint(scoped_map.chain, columns).real.mean(2).transpose(1, 2)

    @full_precision()
    def contributions(self, index: Rows, *, port: str | None = None, activation: str = "exact") -> Float[Tensor, "..."]:
        """Return T_ij x_j, the contribution of each token j to the outputs at positions i (LaTIM Eq. 22-25).

        With `activation="exact"` they and `bias` sum to y_i; "silu", "relu", "identity", "taylor1" and "taylor2" apply
        the activation to each tap of the convolution, as the paper does (LaTIM Eq. 19-21).
        Returns (batch, key, out) for one position, else (batch, row, key, out).
        """
        positions, single = checked_rows(index, self.output, self.name)
        chain, x = self._port(port)
        vectors = contributions(chain, positions, x, self.output, self.name, activation).transpose(2, 3)
        return vectors.squeeze(1) if single else vectors

    @full_precision()
    def pairwise(self, *, port: str | None = None) -> PairwiseContributions | None:
        """Return T_ij x_j of all pairs in tiles, None if only `contributions` can compute them."""
        chain, x = self._port(port)
        return pairwise_of(chain, x.to(self.output.dtype), *self.output.shape[1:])

    @full_precision()
    def activation_bias(self, activation: str, *, port: str | None = None) -> Float[Tensor, "batch query out"]:
        """Return the bias of `contributions(activation=...)`: sum_p M_ip f(b_c), and the biases of later stages."""
        if activation == "exact":
            return self.bias
        chain, x = self._port(port)
        before, conv, after = split_taps(chain, self.name)
        level = conv.apply(run(before, torch.zeros_like(x), bias=True))
        return run(after, tap_function(activation)(level))

    @full_precision()
    def decomposed_output(self, activation: str, *, port: str | None = None) -> Float[Tensor, "batch query out"]:
        """Return the sum of `contributions(activation=...)` over the tokens and `activation_bias`, in linear time."""
        chain, x = self._port(port)
        if activation == "exact":
            return run(chain, x, bias=True)
        return sum_of_contributions(chain, x, self.name, activation) + self.activation_bias(activation, port=port)

    @full_precision()
    def reconstruction_error(self) -> float:
        """Return ||op(x) - y|| / ||y|| of the worst sequence, over real tokens, for the host's output y.

        If `expected` is given, y is that prefix.
        """
        return self.error_of(self._run(self.inputs, bias=True))

    def error_of(self, output: Float[Tensor, "batch query out"]) -> float:
        """Return the `reconstruction_error` of an output."""
        reference = self.output if self.expected is None else self.expected
        prefix = slice(reference.shape[1])
        mask = None if self.mask is None else self.mask[:, prefix]
        return worst_error(output[:, prefix], reference, mask)

    def scoped_map(self, scope: str = "core", *, port: str | None = None) -> ScopedMap:
        """Return the stages of a scope with the shape of their matrix.

        Raises `OptionError` for an unknown scope and for `layer`, `UncoveredError` if a stage in it mixes channels.
        """
        check_scope(scope)
        if port is None:
            # A port may only add to the output, such as the queries' stream of a cross-attention with a residual.
            port = next((name for name, chain in self.chains.items() if has_core(chain)), None)
        whole, x = self._port(port)
        single = next((stage for stage in walk(whole) if stage.role == WHOLE), None)
        if single is not None:
            raise UncoveredError(
                f"{self.name} is one stage as a whole, so no matrix of numbers mixes its tokens "
                f"({getattr(single, 'reason', WHOLE)}): use `contributions`, or a method that reads its vectors."
            )
        chain, channels = scoped(whole, scope, x.shape[2])
        groups = channel_groups(chain)
        if groups is None:
            raise UncoveredError(f"{self.name}: a stage inside scope {scope!r} mixes channels; use `contributions`.")
        shape = (*self.output.shape[:2], x.shape[1])
        repeat = channels // groups if scope == "unified" else 1
        width = channels // (groups * repeat)
        return ScopedMap(chain, groups, repeat, width, shape, tuple(self.chains.values()), self.output)

    def _stages(self) -> Iterator[Stage]:
        return (stage for chain in self.chains.values() for stage in walk(chain))

    def _port(self, port: str | None) -> tuple[Chain, Tensor]:
        """Return the chain and the frozen input of a port, by default the first."""
        port = self.ports[0] if port is None else port
        if port not in self.chains:
            raise OptionError(f"{self.name} has no port {port!r}" + nearest(port, self.chains))
        return self.chains[port], self.inputs[port]

    def _run(self, inputs: Mapping[str, Tensor], *, bias: bool) -> Tensor:
        dtype = self.output.dtype
        return self._sum(run(chain, inputs[port].to(dtype), bias=bias) for port, chain in self.chains.items())

    def _sum(self, by_port: Iterable[Tensor]) -> Tensor:
        return sum(by_port, start=torch.zeros((), dtype=self.output.dtype, device=self.output.device))

"""`PiecewiseOperator`: the operator of a layer whose factors are computed for one piece of the tokens at a time."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from unilinattn.errors import UncoveredError
from unilinattn.kernels.precision import full_precision
from unilinattn.operator.carry import Carry, States, carried_by
from unilinattn.operator.deferred import Deferred
from unilinattn.operator.flow import Flow
from unilinattn.operator.operator import MixerOperator
from unilinattn.operator.scopes import check_scope, scoped
from unilinattn.operator.selection import check_input
from unilinattn.operator.stages import Scale, walk


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of a layer.

    Attributes:
        tokens: their positions.
        read: returns the layer's input at these tokens, (batch, token, in).
        states: states of the layer's token mixers at the first of them.
    """

    tokens: slice
    read: Callable[[], Float[Tensor, "batch token in"]]
    states: States


class PiecewiseOperator(MixerOperator):
    """A layer's frozen linear map on consecutive pieces of the tokens, whose token mixers carry their states.

    `left_multiply` computes the factors of each piece and drops them: it takes the memory of one piece in addition to
    its argument and its result. Every other operation raises `UncoveredError`.

    Args:
        pieces: all tokens of the layer, in order.
        build: the adapter's flow on the input of a piece.
        output: the layer's output, (batch, query, out).
        name: the layer's path, for messages.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        build: Callable[[Float[Tensor, "batch token in"]], Flow],
        *,
        output: Float[Tensor, "batch query out"],
        name: str,
    ) -> None:
        """Store the pieces; nothing is computed."""
        self._pieces, self._build, self.output, self.name = tuple(pieces), build, output, name

    def __getattr__(self, attribute: str) -> Any:
        """Raise `UncoveredError` for the factors and inputs, which exist for one piece at a time."""
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        raise UncoveredError(
            f"{self.name} was traced with stream_to=, so its operator exists for one piece of its "
            f"{self.output.shape[1]} tokens at a time: it multiplies rows (`left_multiply`, or method 'rollout' with a "
            "target and the default sign, discard and normalize). Trace without stream_to= for any other operation."
        )

    def __repr__(self) -> str:
        """Show the number of pieces."""
        return f"PiecewiseOperator({self.name}, {tuple(self.output.shape)}, {len(self._pieces)} pieces)"

    def pieces(self, scope: str = "core") -> Iterator[tuple[slice, MixerOperator]]:
        """Yield the tokens of each piece, in order, and the operator on them for maps of one scope."""
        check_scope(scope)
        return (self._piece(piece, scope) for piece in self._pieces)

    @full_precision()
    def left_multiply(
        self, rows: Float[Tensor, "batch row query"], *, scope: str = "core", port: str | None = None
    ) -> Float[Tensor, "batch row key"]:
        """Return rows @ mean_h alpha by one adjoint pass from the last piece to the first."""
        check_scope(scope)
        batch, length = self.output.shape[:2]
        check_input(self.name, "rows", rows, self.output.new_empty(()).expand(batch, rows.shape[1], length))
        product, carry = self.output.new_zeros(rows.shape), Carry()
        for piece in reversed(self._pieces):
            piece_rows = rows[..., piece.tokens]
            if not carry.states and not bool(piece_rows.any()):
                # Rows of causal layers are zero after their position.
                continue
            _, operator = self._piece(piece, scope)
            with carried_by(carry):
                product[..., piece.tokens] = operator.left_multiply(piece_rows, scope=scope, port=port).to(product)
        return product

    def _piece(self, piece: Piece, scope: str) -> tuple[slice, MixerOperator]:
        """Return a piece's tokens and operator; factors inside the scope are computed."""
        x = piece.read()
        with carried_by(Carry(piece.states)):
            flow = self._build(x)
            chain, _ = scoped(flow.chain, scope, x.shape[2])
            if any(isinstance(stage, Scale) and isinstance(stage.factor, Deferred) for stage in walk(chain)):
                # The states of mixers are in the order of the whole layer, which computes every factor.
                _ = flow.value
        output = self.output.new_empty(()).expand(x.shape[0], x.shape[1], self.output.shape[2]).to(x)
        return piece.tokens, MixerOperator(flow.chains, inputs=flow.inputs, output=output, name=self.name)

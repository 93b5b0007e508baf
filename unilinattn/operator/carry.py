"""`Carry`: the states of a chain's token mixers between consecutive pieces of the tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from jaxtyping import Inexact
from torch import Tensor

from unilinattn.mixers import CoreMixer

States = tuple[Tensor, ...]
"""The state of each token mixer, in the order in which they are applied."""


class Carry:
    """Carries the states of token mixers from one piece of the tokens to the next one.

    Every piece applies the same mixers in the same order, which identifies their states. A pass applies either
    matrices, from the first piece to the last, or their transposes, from the last piece to the first.
    """

    def __init__(self, states: States = ()) -> None:
        """Start from the `states` at the border of a piece; without them the pass starts at the end of the sequence."""
        self._states = states
        self._next: list[Tensor] = []

    @property
    def states(self) -> States:
        """The states at the last border."""
        return self._states

    def end_piece(self) -> None:
        """Make the states after the present piece those of the next one."""
        self._states, self._next = tuple(self._next), []

    def apply(
        self, mixer: CoreMixer, value: Inexact[Tensor, "batch key head channel"]
    ) -> Inexact[Tensor, "batch query head channel"]:
        """Apply a mixer's matrix from its state on.

        Raises `UncoveredError` for a mixer without a state of constant size.
        """
        output, state = mixer.apply_from(self._state(), value)
        self._next.append(state)
        return output

    def adjoint(
        self, mixer: CoreMixer, grad: Inexact[Tensor, "batch query head channel"]
    ) -> Inexact[Tensor, "batch key head channel"]:
        """Apply the transpose of a mixer's matrix from its state on, backward in time.

        Raises `UncoveredError` for a mixer without a state of constant size.
        """
        output, state = mixer.adjoint_from(self._state(), grad)
        self._next.append(state)
        return output

    def _state(self) -> Tensor | None:
        return self._states[len(self._next)] if self._states else None


# No argument can take its place: an adapter reads values while it builds its flow, such as keys after a short
# convolution, and these mixers continue from their states too. It gets a host's call only.
_carry: ContextVar[Carry | None] = ContextVar("unilinattn.carry", default=None)


@contextmanager
def carried_by(carry: Carry) -> Iterator[None]:
    """Run one piece: chains in this context begin at the states of `carry`, which moves to the next border."""
    token = _carry.set(carry)
    try:
        yield
        carry.end_piece()
    finally:
        _carry.reset(token)


def current_carry() -> Carry | None:
    """Return the carry of the current context, None outside of `carried_by`."""
    return _carry.get()

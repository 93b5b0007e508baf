"""`Continued`, the base class of recurrences that continue from a state of constant size."""

from abc import abstractmethod
from collections.abc import Callable

import torch
from jaxtyping import Inexact
from torch import Tensor

from unilinattn.mixers.base import CoreMixer


class Continued(CoreMixer):
    """A recurrence whose state (batch, state, head, channel) enters and leaves through tokens added at the ends.

    The first added tokens write the state's coordinates, one each, and the last ones read them. A subclass has a
    `query` and defines `with_ends`.
    """

    query: Inexact[Tensor, "batch length group state"]

    @property
    def state_size(self) -> int:
        """Number of coordinates of a head's state."""
        return self.query.shape[-1]

    def zeros(self, shape: tuple[int, ...]) -> Tensor:
        """Return zeros with the dtype and device of the matrix."""
        return self.query.new_zeros(shape)

    @abstractmethod
    def with_ends(self) -> CoreMixer:
        """Return the mixer with `state_size` tokens more at each end, without decay."""

    def apply_from(
        self, state: Tensor | None, value: Inexact[Tensor, "batch key head channel"]
    ) -> tuple[Inexact[Tensor, "batch query head channel"], Tensor]:
        """Run the recurrence forward in time from a state (None for zero)."""
        outputs = self._extended_pass(self.with_ends().apply, value, state, None)
        # A slice would keep the outputs of all tokens.
        return outputs[:, self.state_size : -self.state_size], outputs[:, -self.state_size :].clone()

    def adjoint_from(
        self, state: Tensor | None, grad: Inexact[Tensor, "batch query head channel"]
    ) -> tuple[Inexact[Tensor, "batch key head channel"], Tensor]:
        """Run the transposed recurrence backward in time from the gradient of the last state (None for zero)."""
        outputs = self._extended_pass(self.with_ends().adjoint, grad, None, state)
        return outputs[:, self.state_size : -self.state_size], outputs[:, : self.state_size].clone()

    def _extended_pass(
        self, run: Callable[[Tensor], Tensor], vectors: Tensor, first: Tensor | None, last: Tensor | None
    ) -> Tensor:
        zeros = vectors.new_zeros(vectors.shape[0], self.state_size, *vectors.shape[2:])
        return run(torch.cat([zeros if first is None else first, vectors, zeros if last is None else last], dim=1))


def extended(
    factor: Inexact[Tensor, "batch token *group"],
    *,
    first: Inexact[Tensor, "size state"] | float,
    last: Inexact[Tensor, "size state"] | float,
    size: int,
) -> Inexact[Tensor, "batch extended *group"]:
    """Add `size` tokens at each end of a factor, with a vector for each token or one number for all."""
    shape = (factor.shape[0], size, *factor.shape[2:])
    ends = [
        factor.new_full(shape, end) if isinstance(end, float) else end.to(factor)[None, :, None].expand(shape)
        for end in (first, last)
    ]
    return torch.cat([ends[0], factor, ends[1]], dim=1)

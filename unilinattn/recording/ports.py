"""`Ports`: the arguments of a recorded module that carry tokens, as the vectors of an operator's ports."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from unilinattn.call import Call
from unilinattn.call.axes import as_tokens, in_shape, joined_heads, split_heads


@dataclass(frozen=True, eq=False)
class Ports:
    """The tensors that carry tokens into a module.

    Attributes:
        call: the call of the module; its input is the port x.
        inputs: the tensors by port.
        heads: the axis of tokens of those with heads (see `token_axis`), by port.
        transposed: whether the others are (token, batch, channel).
    """

    call: Call
    inputs: Mapping[str, Tensor]
    heads: Mapping[str, int]
    transposed: bool

    def vectors(self, port: str) -> Float[Tensor, "batch token channel"]:
        """Return the vectors of a port."""
        if port == "x":
            return self.call.input
        tensor = self.inputs[port].detach()
        if port in self.heads:
            return joined_heads(tensor, self.heads[port])
        if tensor.ndim == 2 < self.call.input.ndim and len(tensor) == len(self.call.input):
            return tensor[:, None]
        return as_tokens(tensor.transpose(0, 1) if self.transposed else tensor, axis=self.call.axes.inputs)

    def argument(self, port: str, vectors: Float[Tensor, "batch token channel"]) -> Tensor:
        """Return vectors in the shape of the module's argument."""
        shape = self.inputs[port].shape
        if port in self.heads:
            return split_heads(vectors, shape, self.heads[port])
        return in_shape(vectors.transpose(0, 1) if self.transposed else vectors, shape, self.call.axes.inputs)

    def output(self, output: Tensor) -> Float[Tensor, "batch token channel"]:
        """Return the vectors of the module's output."""
        is_transposed = self.transposed and output.ndim == 3
        return as_tokens(output.transpose(0, 1) if is_transposed else output, axis=self.call.axes.output)

"""`Stored`: a matrix in the memory of a model's weight, cast at each use instead of copied."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Inexact
from torch import Tensor

from unilinattn.errors import ModelStateError

Form = Callable[[Tensor], Tensor]


class Stored:
    """A matrix (out, in) made from a weight where the model stores it, so that an operator holds no copy of it.

    A call computes the matrix, which the caller drops after use: a cast, then `forms`. A copy by `copy.deepcopy` is an
    ordinary tensor, which does not depend on the model.
    """

    def __init__(self, weight: Tensor, like: Tensor, forms: tuple[Form, ...] = ()) -> None:
        """Refer to a weight, or a view of one; the matrix has the device and the precision of `like`."""
        self._weight, self._forms = weight, forms
        self.dtype = like.dtype.to_complex() if weight.is_complex() else like.dtype
        # Without the numbers of `like`; the functions of a traced host do not see it.
        self._like = torch.empty(0, dtype=like.dtype, device=like.device)
        self._version = None if weight.is_inference() else weight._version
        shape = torch.empty(weight.shape, device="meta")
        for form in forms:
            shape = form(shape)
        self.shape = shape.shape

    def __repr__(self) -> str:
        """Show the shape and the dtype in the model."""
        return f"Stored({tuple(self.shape)}, {self._weight.dtype})"

    def __len__(self) -> int:
        """Return the number of outputs."""
        return self.shape[0]

    def is_complex(self) -> bool:
        """Whether the matrix is complex."""
        return self.dtype.is_complex

    def __call__(self) -> Inexact[Tensor, "out in"]:
        """Compute the matrix; with gradients enabled it is in the graph of a weight that requires a gradient.

        Raises `ModelStateError` if the weight changed since the operator was built.
        """
        if self._version is not None and self._weight._version != self._version:
            raise ModelStateError(
                f"a weight {tuple(self._weight.shape)} that the operator reads in the model changed since the trace; "
                "trace the model again, or take copy.deepcopy(operator), which holds copies, before it changes."
            )
        # A tensor made in inference mode passes no gradients; its copy does.
        matrix = self._weight.to(self._like.device, self.dtype, copy=self._weight.is_inference())
        for form in self._forms:
            matrix = form(matrix)
        return matrix

    def view(self, form: Form) -> "Stored":
        """Return the same of a view of the weight, such as some of its rows."""
        return self.then(form) if self._forms else Stored(form(self._weight), self._like)

    def then(self, form: Form) -> "Stored":
        """Return the matrix after a function that copies, which is applied at each use."""
        return Stored(self._weight, self._like, (*self._forms, form))

    def __getitem__(self, rows: Any) -> "Stored":
        """Return some of the outputs, by a slice or by their numbers."""
        return self.view(lambda weight: weight[rows]) if isinstance(rows, slice) else self.then(_selected(rows))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a tensor that does not depend on the model."""
        return self().detach().clone()

    @contextmanager
    def saved(self, matrix: Tensor) -> Iterator[None]:
        """Save no cast for a backward pass inside the block: it is computed again from the weight.

        `matrix` is the result of a call.
        """
        storage = matrix.untyped_storage()._cdata

        def pack(tensor: Tensor) -> Any:
            if tensor.untyped_storage()._cdata != storage:
                return tensor
            return tensor.size(), tensor.stride(), tensor.storage_offset()

        def unpack(packed: Any) -> Tensor:
            return packed if isinstance(packed, Tensor) else self().as_strided(*packed)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield


def _selected(rows: Tensor) -> Form:
    return lambda matrix: matrix[rows.to(matrix.device)]


def matrix_of(weight: Tensor | Stored) -> Tensor:
    """Return a matrix as a tensor."""
    return weight() if isinstance(weight, Stored) else weight

"""Choices by the values of tokens, such as the best queries of a detector: a perturbed run makes those of the first.

All that the input decides is frozen in a layer's map, and so are they. Otherwise each vector after a choice would move
with all tokens, of which any may be chosen.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

CHOOSING = frozenset({"topk", "sort", "max", "min", "kthvalue", "median", "argsort", "argmax", "argmin", "multinomial"})
"""Functions of torch that return the indices of some elements, those along one axis after the elements."""


class Selections:
    """The indices of the elements that functions choose in a run, by the call.

    Args:
        first: those of the first run, None in that run.
    """

    def __init__(self, first: "Selections | None" = None) -> None:
        """Begin a run."""
        self._first = first
        self._indices: dict[object, Tensor] = {}

    def of_first_run(self, call: object, name: str, args: Any, kwargs: Mapping[str, Any], result: Any) -> Any:
        """Return the result of a function, for the indices that it returned at this call in the first run."""
        returned = list(result) if isinstance(result, tuple) else [result]
        if name not in CHOOSING or not isinstance(returned[-1], Tensor) or returned[-1].is_floating_point():
            return result
        indices = self._indices[call] = returned[-1]
        first = None if self._first is None else self._first._indices.get(call)
        if first is None or first.shape != indices.shape or torch.equal(first, indices):
            return result
        if not isinstance(result, tuple):
            return first.clone()
        x = args[0] if args else kwargs["input"]
        axis = kwargs.get("dim", next((value for value in args[2 if name in ("topk", "kthvalue") else 1 :]), -1))
        keeps = first.ndim == x.ndim
        elements = x.gather(axis, first if keeps else first.unsqueeze(axis))
        return type(result)((elements if keeps else elements.squeeze(axis), first.clone()))

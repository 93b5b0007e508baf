"""`LayerCalls`: the calls of a trace's layers in another run of its model."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unilinattn.call.axes import joined
from unilinattn.call.nested import tensors
from unilinattn.host.observer import Inputs, Observer
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.token_streams import OWN


class LayerCalls(Observer[str]):
    """Follows a run by the names of layers; a subclass inspects and changes what the layers read and write.

    Attributes:
        layers: the layers by name.
    """

    def __init__(self, model: nn.Module, layers: Sequence[Layer]) -> None:
        """Prepare for one run."""
        super().__init__(model)
        self.layers = {layer.name: layer for layer in layers}
        self._calls = Counter[str]()

    def frame(self, path: str, module: nn.Module, inputs: Inputs) -> str:
        """Return the name of a layer that is this call of the module (see `Layer.name`)."""
        name = path or type(module).__name__
        self._calls[name] += 1
        return name if self._calls[name] == 1 else f"{name}#{self._calls[name]}"

    def read(self, layer: Layer, inputs: Inputs, port: str = OWN) -> Tensor | None:
        """Return the vectors that a port of a layer reads among the inputs of its call, if any does."""
        if port == OWN:
            return _same(layer.arguments, inputs, layer.input_shape, lambda t: _read(layer, t), layer.input)
        vectors = layer.operator.inputs[port]
        shapes = dict.fromkeys(t.shape for t in tensors(layer.arguments) if t.numel() == vectors.numel())
        by_shape = (
            _same(layer.arguments, inputs, shape, lambda t: joined(t, vectors.shape).to(vectors), vectors)
            for shape in shapes
        )
        return next((each for each in by_shape if each is not None), None)


def _same(traced: Any, now: Any, shape: torch.Size, read: Callable[[Tensor], Tensor], vectors: Tensor) -> Tensor | None:
    """Return what is read now where the traced values, of which `shape` is one, had these vectors."""
    before, after = (
        [t for t in tensors(values) if t.shape == shape and t.is_floating_point()] for values in (traced, now)
    )
    number = next((n for n, t in enumerate(before) if torch.equal(read(t), vectors)), None)
    return None if number is None or len(after) != len(before) else read(after[number]).clone()


def _read(layer: Layer, tensor: Tensor) -> Tensor:
    return layer.as_read(tensor, layer.input.shape).to(layer.input)

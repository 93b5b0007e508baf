"""`LayerCalls`: the calls of a trace's layers in another run of its model."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unilinattn.call.nested import tensors
from unilinattn.host.observer import Inputs, Observer
from unilinattn.tracing.layer import Layer


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

    def read(self, layer: Layer, inputs: Inputs) -> Tensor | None:
        """Return the vectors that a layer reads among the inputs of its call, (batch, token, channel), if any does."""
        traced, now = _alike(layer.arguments, layer.input_shape), _alike(inputs, layer.input_shape)
        number = next((n for n, t in enumerate(traced) if torch.equal(_read(layer, t), layer.input)), None)
        return None if number is None or len(now) != len(traced) else _read(layer, now[number]).clone()


def _alike(values: Any, shape: torch.Size) -> list[Tensor]:
    return [t for t in tensors(values) if t.shape == shape and t.is_floating_point()]


def _read(layer: Layer, tensor: Tensor) -> Tensor:
    return layer.as_read(tensor, layer.input.shape).to(layer.input)

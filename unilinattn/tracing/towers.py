"""Parts of a model with equal numbers of tokens: of one sequence, as stages are, or of two, as patches and words."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from unilinattn.call.nested import mapped, tensors
from unilinattn.host.inputs import call_host, ids_name
from unilinattn.host.isolation import runs_in_gradient_mode
from unilinattn.host.observer import Inputs, Observer
from unilinattn.host.run import run
from unilinattn.tracing.changed_inputs import changed_input, perturbed
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.token_streams import tower_of


@runs_in_gradient_mode(False)
def separate_towers(model: nn.Module, arguments: Mapping[str, Any], layers: Sequence[Layer], seed: Tensor) -> None:
    """Set the towers of layers, and leave the padding mask to those whose tokens move with the ids.

    Layers in another part of the model than earlier ones of as many tokens continue their sequence if a change of the
    vectors that these write at every token changes each token that the later layers read: one run for each such part.
    Models with one part for each number of tokens are not run. `seed` is the state of the random number generator
    before the run of the layers.
    """
    for shape in dict.fromkeys(tuple(layer.output.shape[:2]) for layer in layers):
        alike = [layer for layer in layers if tuple(layer.output.shape[:2]) == shape]
        # By the part of the model its sequence, and of each sequence the layer that wrote it last.
        sequences: dict[str, str] = {}
        latest: dict[str, Layer] = {}
        for layer in alike:
            part = tower_of(layer.name)
            if part not in sequences:
                earlier = (name for name, last in latest.items() if _continues(model, arguments, last, layer, seed))
                sequences[part] = next(earlier, part)
            latest[sequences[part]] = layer
        if len(latest) > 1:
            for layer in alike:
                layer.tower = sequences[tower_of(layer.name)]
            _leave_mask(model, arguments, alike, seed)


def _continues(model: nn.Module, arguments: Mapping[str, Any], earlier: Layer, later: Layer, seed: Tensor) -> bool:
    """Whether each real token that a layer reads moves with those that another one wrote."""
    moved = _moved(model, arguments, later, seed, earlier)
    if moved is None:
        return True
    # A layer may read another number of tokens than it writes.
    if later.mask is not None and later.mask.shape == moved.shape:
        moved = moved[later.mask.to(moved.device)]
    return bool(moved.all())


def _leave_mask(model: nn.Module, arguments: Mapping[str, Any], layers: Sequence[Layer], seed: Tensor) -> None:
    """Remove the mask of the layers of each sequence of which no token moves with the ids."""
    name = ids_name(arguments)
    if name is None or all(layer.mask is None for layer in layers):
        return
    others = changed_input(model, arguments, name)
    first = {layer.tower: layer for layer in reversed(layers)}
    # The model may accept no other ids.
    with suppress(Exception):
        moved = {tower: _moved(model, others, layer, seed) for tower, layer in first.items()}
        for layer in layers:
            if (tokens := moved[layer.tower]) is not None and not bool(tokens.any()):
                layer.mask = None


def _moved(
    model: nn.Module, arguments: Mapping[str, Any], layer: Layer, seed: Tensor, changed: Layer | None = None
) -> Bool[Tensor, "batch token"] | None:
    """Return which tokens that a layer reads are others than those of the trace, in a run on some arguments.

    The vectors that `changed` returns in that run are others too. None if the layer's input is not found.
    """
    change = _Change(model, changed, layer)
    run(model, lambda: call_host(model, arguments), observer=change.attached(), seed=seed)
    return change.moved


class _Change(Observer[str]):
    """Changes the output of a layer's module, if one is given, and notes which tokens of another one's input move.

    Attributes:
        moved: these tokens (batch, token), None if the input is not found.
    """

    def __init__(self, model: nn.Module, earlier: Layer | None, later: Layer) -> None:
        super().__init__(model)
        self.moved: Bool[Tensor, "batch token"] | None = None
        self._earlier, self._later = earlier, later

    def frame(self, path: str, module: nn.Module, inputs: Inputs) -> str:
        """Return the path of the module."""
        return path

    def entering(self, frame: str, module: nn.Module, inputs: Inputs) -> Inputs | None:
        """Compare the input of the later layer with that of the traced run."""
        layer = self._later
        if frame == layer.name and self.moved is None:
            before, after = _alike(layer.arguments, layer.input_shape), _alike(inputs, layer.input_shape)
            number = next((n for n, t in enumerate(before) if torch.equal(_read(layer, t), layer.input)), None)
            if number is not None and len(after) == len(before):
                self.moved = (_read(layer, after[number]) != layer.input).any(-1)
        return None

    def leaving(self, frame: str, module: nn.Module, inputs: Inputs, output: Any) -> Any:
        """Change the vectors that the earlier layer returns."""
        if self._earlier is None or frame != self._earlier.name.partition("#")[0]:
            return None
        shape = self._earlier.output_shape
        return mapped(output, lambda t: perturbed(t) if t.shape == shape and t.is_floating_point() else t)


def _alike(values: Any, shape: torch.Size) -> list[Tensor]:
    return [t for t in tensors(values) if t.shape == shape and t.is_floating_point()]


def _read(layer: Layer, tensor: Tensor) -> Tensor:
    return layer.as_read(tensor, layer.input.shape).to(layer.input)

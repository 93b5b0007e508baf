"""Parts of a model with equal numbers of tokens: of one sequence, as stages are, or of two, as patches and words."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from jaxtyping import Bool
from torch import Tensor, nn

from unilinattn.call.nested import mapped
from unilinattn.host.inputs import call_host, ids_name
from unilinattn.host.isolation import runs_in_gradient_mode
from unilinattn.host.observer import Inputs
from unilinattn.host.run import run
from unilinattn.tracing.changed_inputs import changed_input, perturbed
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.layer_calls import LayerCalls
from unilinattn.tracing.token_streams import tower_of


@runs_in_gradient_mode(False)
def separate_towers(model: nn.Module, arguments: Mapping[str, Any], layers: Sequence[Layer], seed: Tensor) -> None:
    """Set the towers of layers, and leave the padding mask to those whose tokens move with the ids.

    Layers in another part of the model than earlier ones of as many tokens, or in another call of a part, such as an
    encoder of two texts, continue their sequence if a change of the vectors that the first of these writes at every
    token changes each token that the later ones read. In one run the first layer of each sequence is changed; which of
    several sequences a part continues is told by a run for each. Models with one part for each number of tokens are not
    run. `seed` is the state of the random number generator before the run of the layers.
    """
    for shape in dict.fromkeys(tuple(layer.output.shape[:2]) for layer in layers):
        alike = [layer for layer in layers if tuple(layer.output.shape[:2]) == shape]
        firsts: dict[str, Layer] = {}
        for layer in alike:
            firsts.setdefault(_part(layer), layer)
        if len(firsts) == 1:
            continue
        runs = _Runs(model, arguments, seed, list(firsts.values()))
        sequences = _sequences(firsts, runs)
        if len({*sequences.values()}) > 1:
            for layer in alike:
                layer.tower = sequences[_part(layer)]
            _leave_mask(alike, runs)


def _part(layer: Layer) -> str:
    """Return the part of the model in which a layer is, with "#2" for its second call."""
    _, separator, call = layer.name.partition("#")
    return f"{tower_of(layer.name)}{separator}{call}"


def _sequences(firsts: Mapping[str, Layer], runs: "_Runs") -> dict[str, str]:
    """Return the part that begins the sequence of each part, by their first layers."""
    begun = runs.beginning()
    starts: dict[str, Layer] = {}
    sequences: dict[str, str] = {}
    for part, layer in firsts.items():
        earlier = starts if layer.name not in begun else {}
        if len(earlier) > 1:
            earlier = {start: first for start, first in starts.items() if _continues(layer, runs.changed(first))}
        sequences[part] = next(iter(earlier), part)
        if sequences[part] == part:
            starts[part] = layer
    return sequences


def _leave_mask(layers: Sequence[Layer], runs: "_Runs") -> None:
    """Remove the mask of the layers of each sequence of which no token moves with the ids."""
    if ids_name(runs.arguments) is None or all(layer.mask is None for layer in layers):
        return
    first = {layer.tower: layer.name for layer in reversed(layers)}
    # The model may accept no other ids.
    with suppress(Exception):
        moved = runs.of_other_ids()
        for layer in layers:
            if (tokens := moved.get(first[layer.tower])) is not None and not bool(tokens.any()):
                layer.mask = None


Moved = Mapping[str, Bool[Tensor, "batch token"]]
"""The tokens that layers read and that are others than in another run, by layer, if the layer's input was seen."""


def _continues(layer: Layer, moved: Moved) -> bool:
    """Whether each real token that a layer reads moved."""
    tokens = moved.get(layer.name)
    if tokens is None:
        return True
    # A layer may read another number of tokens than it writes.
    if layer.mask is not None and layer.mask.shape == tokens.shape:
        tokens = tokens[layer.mask.to(tokens.device)]
    return bool(tokens.all())


class _Runs:
    """Runs of a model in which the outputs of some layers are changed, or the ids, and the tokens that move in them."""

    def __init__(self, model: nn.Module, arguments: Mapping[str, Any], seed: Tensor, layers: Sequence[Layer]) -> None:
        self.arguments = arguments
        self._model, self._seed, self._layers = model, seed, layers
        # The run of a trace may round otherwise.
        self._inputs = self._run((), {}, arguments).inputs
        self._by_change: dict[str, Moved] = {}

    def beginning(self) -> Collection[str]:
        """Return the layers that read tokens of no earlier one of these: each one's output is changed."""
        return self._run(None, self._inputs, self.arguments).changed

    def changed(self, layer: Layer) -> Moved:
        """Return the tokens that move with those that a layer writes."""
        if layer.name not in self._by_change:
            self._by_change[layer.name] = self._run({layer.name}, self._inputs, self.arguments).moved
        return self._by_change[layer.name]

    def of_other_ids(self) -> Moved:
        """Return the tokens that move with the ids."""
        name = ids_name(self.arguments)
        assert name is not None
        return self._run((), self._inputs, changed_input(self._model, self.arguments, name)).moved

    def _run(
        self, changed: Collection[str] | None, inputs: Mapping[str, Tensor], arguments: Mapping[str, Any]
    ) -> "_Changes":
        changes = _Changes(self._model, self._layers, changed, inputs)
        run(self._model, lambda: call_host(self._model, arguments), observer=changes.attached(), seed=self._seed)
        return changes


class _Changes(LayerCalls):
    """Changes the outputs of layers, and notes the inputs of layers and which of their tokens are others than before.

    Attributes:
        inputs: the vectors that each layer reads.
        moved: the tokens that are others than those of an earlier run.
        changed: the layers whose outputs are changed; without names, those of which not every token moved.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[Layer], changed: Collection[str] | None, before: Mapping[str, Tensor]
    ) -> None:
        super().__init__(model, layers)
        self.inputs: dict[str, Tensor] = {}
        self.moved: dict[str, Bool[Tensor, "batch token"]] = {}
        self.changed = set(changed or ())
        self._adds, self._before = changed is None, before

    def entering(self, frame: str, module: nn.Module, inputs: Inputs) -> Inputs | None:
        """Compare the input of a layer with that of the earlier run."""
        if (layer := self.layers.get(frame)) is None:
            return None
        if (vectors := self.read(layer, inputs)) is not None:
            self.inputs[frame] = vectors
            if frame in self._before:
                self.moved[frame] = (vectors != self._before[frame]).any(-1)
        if self._adds and not (self.changed and _continues(layer, self.moved)):
            self.changed.add(frame)
        return None

    def leaving(self, frame: str, module: nn.Module, inputs: Inputs, output: Any) -> Any:
        """Change the vectors that a layer returns."""
        if frame not in self.changed:
            return None
        shape = self.layers[frame].output_shape
        return mapped(output, lambda t: perturbed(t) if t.shape == shape and t.is_floating_point() else t)

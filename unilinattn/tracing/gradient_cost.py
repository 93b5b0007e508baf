"""Estimate the bytes of a gradient and of a frozen run without running the model."""

from collections.abc import Mapping, Sequence
from math import prod

from torch import nn

from unilinattn.host.recomputation import is_block
from unilinattn.operator.cost import apply_elements, gradient_elements
from unilinattn.operator.stages import Branch, Chain, Matrix
from unilinattn.registry import architecture_of
from unilinattn.tracing.layer import Layer

TOKENWISE = 2
"""Elements held for each element that enters or leaves a weight matrix outside the mixers: activation and gradient."""

HELD = 1.5
"""Elements held per element of a stage's output while the flow of a layer is built."""

KEPT = 2.0
"""Elements that a frozen run keeps for each one that enters or leaves a layer or a weight matrix between layers."""

SIGNED = 1.7
"""Elements that a run by the gamma rule keeps for each one by the half rule: products of both signs."""

VOCABULARY = 16
"""A weight matrix this many times longer than the stream is wide embeds or unembeds tokens."""


def gradient_cost(model: nn.Module, layers: Sequence[Layer], logits: int) -> int:
    """Estimate the peak bytes of a gradient with respect to every layer's output, over the segments of `recomputation`.

    `layers` are in order of execution; `logits` is the number of elements of the model's output that are computed, with
    their gradients.
    """
    operators = {layer.name: layer.operator for layer in layers if not layer.opaque}
    first = next(iter(operators.values()))
    tokens, width = prod(first.output.shape[:2]), first.output.element_size()
    modules = dict(model.named_modules())
    retained = 0
    elements_by_segment: dict[str, int] = {}
    mixers: dict[str, set[str]] = {}
    for name, op in operators.items():
        path = name.partition("#")[0]
        segment = _segment(modules, path)
        around = path.rpartition(".")[0] if segment is None else segment
        mixers.setdefault(around, set()).add(path)
        elements = gradient_elements(next(iter(op.chains.values())), tokens, next(iter(op.inputs.values())).shape[2])
        # Each call of a module that is called several times is a segment.
        elements_by_segment[around] = elements_by_segment.get(around, 0) + (elements if name == path else 0)
        retained += 3 * op.output.numel() + (elements if segment is None else 0)
    for around, paths in mixers.items():
        weights = _weights(modules[around], [modules[path] for path in paths])
        elements_by_segment[around] += TOKENWISE * tokens * sum(map(sum, weights))
    return width * (retained + max(elements_by_segment.values()) + 3 * logits)


def frozen_cost(model: nn.Module, layers: Sequence[Layer], logits: int, *, rule: str) -> int:
    """Estimate the peak bytes of a frozen run, which keeps the factors of the code between the layers.

    The arguments are those of `gradient_cost`. By a `rule` other than "freeze" the run evaluates the layers' flows, by
    "live" it keeps the steps of their cores, whose factors have gradients, and by "gamma" the parts of all products.
    """
    operators = [layer.operator for layer in layers]
    first = operators[0]
    tokens, width = prod(first.output.shape[:2]), first.output.element_size()
    weights = _weights(model, [layer.module for layer in layers])
    tokenwise = [shape for shape in weights if max(shape) < VOCABULARY * first.output.shape[2]]
    retained = sum(op.output.numel() for op in operators) + tokens * sum(map(sum, tokenwise))
    # By the rules of relevance the host's code runs in place of operators that are read from its run.
    applied = (layer.operator for layer in layers if rule != "live" or not layer.needs_capture)
    peak = KEPT * retained + max((apply_elements(op.chains, op.inputs) for op in applied), default=0) + 4 * logits
    if rule == "live":
        peak += sum(
            apply_elements(layer.operator.chains, layer.operator.inputs) for layer in layers if not layer.needs_capture
        )
    if rule != "freeze":
        chains = [(chain, op.inputs[port].shape[2]) for op in operators for port, chain in op.chains.items()]
        peak += HELD * sum(_values(chain, tokens, channels) for chain, channels in chains)
    return int(width * peak * (SIGNED if rule == "gamma" else 1))


def _values(chain: Chain, tokens: int, channels: int) -> int:
    """Return the elements of the outputs of all stages, those inside of branches included."""
    elements = 0
    for stage in chain:
        if isinstance(stage, Branch):
            elements += sum(_values(inner, tokens, channels) for inner in stage.chains)
        channels = stage.shape[0] if isinstance(stage, Matrix) else channels
        elements += tokens * channels
    return elements


def _segment(modules: Mapping[str, nn.Module], path: str) -> str | None:
    """Return the path of the outermost recomputed module that contains a layer, None if there is none."""
    names = path.split(".")
    for count in range(len(names)):
        name = ".".join(names[: count + 1])
        architecture = architecture_of(type(modules[name]))
        if is_block(modules[name]) or (architecture is not None and not architecture.needs_capture):
            return name
    return None


def _weights(around: nn.Module, without: Sequence[nn.Module]) -> list[tuple[int, int]]:
    """Return the shapes of a module's weight matrices outside of its submodules `without`."""
    inside = {id(parameter) for module in without for parameter in module.parameters()}
    matrices = (parameter for parameter in around.parameters() if parameter.ndim == 2)
    return [(m.shape[0], m.shape[1]) for m in matrices if id(m) not in inside]

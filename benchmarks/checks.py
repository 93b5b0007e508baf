"""Check of each timed operation against its definition, on a narrow layer."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks import models, plain
from benchmarks.cases import OPERATIONS, last_weights
from benchmarks.machine import as_for_large_inputs
from benchmarks.rivals import Place
from unilinattn.testing import relative_error

LENGTH = 160
"""Tokens: more than a chunk and a tile have, and a multiple of neither."""

TOLERANCE = 1e-4
"""Largest relative error, in float32."""


def checked(pairs: Iterator[tuple[str, str]], place: Place) -> Iterator[dict[str, object]]:
    """Yield the relative error of each (operation, structure); raise `ArithmeticError` above `TOLERANCE`."""
    for operation, structure in pairs:
        with torch.no_grad(), as_for_large_inputs(place.device):
            got = OPERATIONS[operation](structure, LENGTH, place).call().double().squeeze()
            expected = REFERENCES[operation](structure, place).squeeze()
        assert got.shape == expected.shape, (operation, structure, got.shape, expected.shape)
        error = relative_error(got[None], expected[None])
        if not error <= TOLERANCE:
            raise ArithmeticError(f"{operation} of {structure} is off its definition by {error:.1e} (relative)")
        yield {"operation": operation, "structure": structure, "length": LENGTH, "error": float(f"{error:.1e}")}


def _map(structure: str, place: Place) -> Tensor:
    if structure == "softmax":
        layer = place.traced(structure, LENGTH).layers[0]
        attention = models.build(structure, place.sizes, place.device).get_submodule("transformer.h.0.attn")
        return plain.softmax_map(attention, layer.input, place.sizes.softmax_heads)
    return plain.mean_map(place.operator(structure, LENGTH))


def _rollout(structure: str, place: Place) -> Tensor:
    mixer = models.mixer_of(structure, place.sizes, place.device)
    row = plain.mean_map(models.frozen(mixer, models.hidden(LENGTH, place.sizes, place.device)))[0, -1]
    row[-1] += 1
    return row


def _adjoint(structure: str, place: Place) -> Tensor:
    mixer = models.mixer_of(structure, place.sizes, place.device)
    core = plain.core_of(models.frozen(mixer, models.hidden(LENGTH, place.sizes, place.device)))
    return plain.head_maps(core)[:, -1].T


def _attribution(structure: str, place: Place) -> Tensor:
    weight = last_weights(place.traced(structure, LENGTH)).values.double()
    row = (weight[0, -1] * plain.mean_map(place.operator(structure, LENGTH))[0, -1]).clamp_min(0)
    row[-1] += 1
    return row


def _gradient(structure: str, place: Place) -> Tensor:
    """The host's backward pass, to the first of two layers."""
    model = models.build(structure, place.sizes, place.device, 2)
    return plain.host_gradient(model, model.backbone.layers[0].mixer, models.tokens(LENGTH, place.device)).double()


def _latim(structure: str, place: Place) -> Tensor:
    return plain.vectors(place.operator(structure, LENGTH)).norm(dim=-1)


def _contributions(structure: str, place: Place) -> Tensor:
    return plain.vectors(place.operator(structure, LENGTH))[-1]


def _alti(structure: str, place: Place) -> Tensor:
    layer = place.traced(structure, LENGTH).layers[0]
    assert layer.residual is not None
    stream = layer.residual[0].double()
    output, shares = stream + layer.output[0].double(), plain.vectors(layer.operator)
    shares.diagonal(dim1=0, dim2=1).add_(stream.T)
    gain = (output.abs().sum(-1)[:, None] - (output[:, None] - shares).abs().sum(-1)).clamp_min(0)
    # The map is causal: keys after the query have no score.
    gain = gain.tril()
    return gain / gain.sum(-1, keepdim=True)


def _logit(structure: str, place: Place) -> Tensor:
    """The host's own logit, to which shares and biases sum, twice."""
    model = models.build(structure, place.sizes, place.device, 2)
    return model(models.tokens(LENGTH, place.device)).logits[0, -1].amax().double().expand(2)


REFERENCES: dict[str, Callable[[str, Place], Tensor]] = {
    "map": _map,
    "rollout": _rollout,
    "adjoint": _adjoint,
    "attribution": _attribution,
    "gradient": _gradient,
    "logit": _logit,
    "next logit": _logit,
    "latim": _latim,
    "contributions": _contributions,
    "alti": _alti,
}

"""Checksums tell a tensor from one with other numbers, also where all of them changed in the same way."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from unilinattn.errors import ModelStateError
from unilinattn.host.weights import Weights

CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "twice": lambda weight: 2 * weight,
    "half": lambda weight: weight / 2,
    "negative": lambda weight: -weight,
    "reversed": lambda weight: weight.flip(0),
    "two rows exchanged": lambda weight: torch.cat([weight[1:2], weight[:1], weight[2:]]),
    "one number": lambda weight: weight.index_fill(0, torch.tensor([3]), 0),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("shape", [(8, 1), (64, 64), (7, 3), (512, 512)])
def test_a_changed_weight_is_noticed(
    shape: tuple[int, int], change: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    layer = nn.Linear(shape[1], shape[0], bias=False).to(dtype)
    weights = Weights(layer)
    weights.require_same(layer, "Linear", "nothing is left")
    layer.weight.data.copy_(change(layer.weight.data))
    with pytest.raises(ModelStateError, match=r"the weights of Linear changed since the trace \(weight\)"):
        weights.require_same(layer, "Linear", "nothing is left")


@pytest.mark.long
def test_weights_of_any_length_that_are_doubled_are_noticed() -> None:
    unnoticed = []
    # A sum of the words modulo 2^64, in which only high bits differ, would miss one length of 4,096.
    for length in range(2, 16000, 2):
        layer = nn.ParameterList([torch.ones(length, dtype=torch.float64)])
        weights = Weights(layer)
        layer[0].data.mul_(2)
        try:
            weights.require_same(layer, "List", "nothing is left")
        except ModelStateError:
            continue
        unnoticed.append(length)
    assert not unnoticed


def test_a_weight_that_begins_inside_a_word_of_a_buffer_has_the_checksum_of_its_copy() -> None:
    buffer = torch.randn(9)
    layers = [nn.ParameterList([weight]) for weight in (buffer[1:], buffer[1:].clone())]
    for weights in map(Weights, layers):
        for layer in layers:
            weights.require_same(layer, "List", "nothing is left")
    buffer[8] = 0
    with pytest.raises(ModelStateError, match="the weights of List changed"):
        Weights(layers[1]).require_same(layers[0], "List", "nothing is left")

"""The delta-rule hybrids: gradients and errors."""

import pytest
import torch
from torch import Tensor

from tests.hosts import named
from unilinattn import trace
from unilinattn.architectures import Call
from unilinattn.architectures.delta_rule import kimi_delta
from unilinattn.errors import UncoveredError
from unilinattn.host.substitution import through_operators
from unilinattn.testing import promoted, relative_error


@pytest.mark.parametrize(
    "name", ["qwen3 next", "qwen3.5", "olmo hybrid", "kimi linear", "bailing hybrid", "glm 5 next"]
)
def test_the_gradient_through_operators_is_that_of_the_host(name: str) -> None:
    host = named(name)
    model = host.model().double()
    embedded = model.get_input_embeddings()(host.inputs()).detach()

    def gradient() -> Tensor:
        x = embedded.clone().requires_grad_()
        out = model(inputs_embeds=x, use_cache=False)
        return torch.autograd.grad(out[0].pow(2).sum(), x)[0]

    with promoted():
        reference = gradient()
        with through_operators(model):
            assert relative_error(gradient(), reference) <= 1e-9


def test_an_unknown_output_gate_is_refused() -> None:
    host = named("kimi linear")
    model = host.model()
    model.model.layers[0].self_attn.o_norm.activation = "tanh"
    with pytest.raises(UncoveredError, match="'tanh' is not covered"):
        trace(model, host.inputs()).layers[0].operator  # noqa: B018  the property builds it


def test_a_missing_attribute_is_refused_with_the_version() -> None:
    module = named("bailing hybrid").model().model.layers[0].self_attn
    del module.forget_gate.dt_bias
    with pytest.raises(UncoveredError, match="has no attribute 'dt_bias' in transformers"):
        kimi_delta(Call(module, "layer", {}, torch.zeros(1, 3, 16)))

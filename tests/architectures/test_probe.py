"""The affine maps of an attention module, read off its linear layers, equal the images of basis vectors."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.hosts import named
from unilinattn import trace
from unilinattn.architectures.linear_maps import linear_maps
from unilinattn.architectures.probe import images
from unilinattn.call import Call
from unilinattn.call.copies import EMPTY, without_numbers
from unilinattn.call.exactness import layer_tolerance
from unilinattn.call.stored import Stored
from unilinattn.testing import relative_error, tolerance
from unilinattn.testing.hosts import host
from unilinattn.tracing.layer import Layer


def first_attention(name: str, edit: Any = None) -> tuple[Layer, Call]:
    """Trace a host in float64 and return its first attention layer with the call that its adapter gets."""
    model = host(name).model().double()
    with torch.no_grad():
        for weight in model.parameters():
            # Biases start as zero, and norms as one.
            weight += 0.1 * torch.randn(weight.shape, dtype=weight.dtype)
    if edit is not None:
        edit(model)
    layer = next(one for one in trace(model, host(name).inputs()).layers if one.architecture == "attention")
    return layer, Call(layer.module, layer.name, layer.arguments, layer.input, layer.output, layer.seen)


ENDS_EARLY = "the attention module of ViT ends before its output projection in transformers 5.6.2, so it is probed"


@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "gpt neox, parallel",
        "llama, grouped queries",
        "llama, wide heads, one token",
        "opt",
        pytest.param("vit", marks=pytest.mark.skipif(transformers.__version__ == "5.6.2", reason=ENDS_EARLY)),
    ],
)
def test_the_weights_are_the_images_of_basis_vectors(name: str) -> None:
    layer, call = first_attention(name)
    (seen,) = layer.seen
    read, computed = linear_maps(call, seen, "hidden_states"), images(call, seen, layer.input, "hidden_states")
    for affine, (matrix, bias) in zip(read, computed, strict=True):
        assert affine is not None and isinstance(affine[0], Stored)
        torch.testing.assert_close(affine[0](), matrix, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(affine[1], bias, rtol=1e-12, atol=1e-12)


class Doubled(nn.Linear):
    """A subclass of a linear layer, which may compute anything."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def make(kind: type[nn.Linear], name: str) -> Any:
    """Return a function that replaces a projection of every attention by one of another kind, of the same weights."""

    def edit(model: nn.Module) -> None:
        for attention in (module for module in model.modules() if hasattr(module, name)):
            given = getattr(attention, name)
            other = kind(given.in_features, given.out_features, given.bias is not None, dtype=given.weight.dtype)
            other.load_state_dict(given.state_dict())
            setattr(attention, name, other)

    return edit


@pytest.mark.parametrize("projection", ["v_proj", "o_proj"])
def test_other_modules_are_probed(projection: str) -> None:
    layer, call = first_attention("llama, grouped queries", make(Doubled, projection))
    (seen,) = layer.seen
    assert None in linear_maps(call, seen, "hidden_states")
    assert layer.reconstruction_error() < 1e-12
    # The same edit with torch's own class is read.
    layer, call = first_attention("llama, grouped queries", make(nn.Linear, projection))
    (seen,) = layer.seen
    assert None not in linear_maps(call, seen, "hidden_states")
    assert layer.reconstruction_error() < 1e-12


def padded_in_half_precision(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a float16 host, ids, and a mask with two padding tokens on the left of the first sequence."""
    entry = named(name)
    model, ids = entry.model().half(), entry.inputs()
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    return model, ids, mask


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        "llama, grouped queries",
        "qwen3.5",
        "deepseek 2",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt neox, parallel", "opt", "jamba", "falcon h1")),
    ],
)
def test_queries_without_keys_decide_nothing(name: str) -> None:
    """In float16 the scores of a padding query are all the mask's number, in the operator's float32 they differ."""
    model, ids, mask = padded_in_half_precision(name)
    limit = tolerance("layer", torch.float16)
    padded = trace(model, {"input_ids": ids, "attention_mask": mask})
    alone = trace(model, ids[:1, 2:])
    for layer, single in zip(padded.layers, alone.layers, strict=True):
        assert layer.reconstruction_error() <= limit
        parts = layer.operator.contributions(-1)[:1, 2:]
        assert relative_error(parts, single.operator.contributions(-1)) <= limit


def test_queries_with_keys_are_compared_beside_padding() -> None:
    model, ids, mask = padded_in_half_precision("llama, grouped queries")
    model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda module, args: (args[0].sin(),))
    layer = trace(model, {"input_ids": ids, "attention_mask": mask}).layers[0]
    # A function between the attention's result and the projection is no matrix, and is recorded with a frozen slope.
    assert "act" in {stage.role for stage in layer.operator.chains["x"]}
    assert layer.reconstruction_error() < layer_tolerance(torch.float16)


def test_the_layers_are_located_anew_for_other_arguments_and_modules() -> None:
    layer, call = first_attention("opt")
    (seen,) = layer.seen
    assert None not in linear_maps(call, seen, "hidden_states")
    other = replace(seen, arguments={**seen.arguments, "other": seen.arguments["hidden_states"]})
    assert linear_maps(call, other, "other")[0] is None
    projection: Any = seen.module.out_proj
    seen.module.out_proj = Doubled(projection.in_features, projection.out_features)
    assert linear_maps(call, seen, "hidden_states")[1] is None


class Counting(nn.Module):
    """A layer that writes into a container, a buffer and a tied weight's module while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.tied = nn.Linear(3, 3)
        self.register_buffer("offset", torch.ones(3))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return self.tied(self.inner(x)) + self.offset


def test_a_run_without_numbers_leaves_the_module_unchanged() -> None:
    module = Counting()
    calls: list[nn.Module] = []
    module.inner.register_forward_hook(lambda layer, *_: calls.append(layer))
    empty = without_numbers(module)
    output = empty(torch.zeros(2, 3, device=EMPTY))
    assert output.shape == (2, 3) and output.is_meta
    assert module.seen == [] and calls == [] and empty.inner is empty.tied is not module.inner
    assert not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))

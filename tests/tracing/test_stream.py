"""The residual stream of each layer of real hosts, identified from the inputs of modules."""

from typing import Any

import pytest
import torch
import transformers

import unilinattn as ula
from unilinattn.testing import TOLERANCES, tolerance
from unilinattn.tracing.sums import FEW, Candidate, fit_factors, possible_sums

SMALL = dict(
    vocab_size=50,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=32,
    num_key_value_heads=2,
    head_dim=8,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
OPT = dict(ffn_dim=32, word_embed_proj_dim=32)


def traced(name: str, dtype: torch.dtype = torch.float32, **settings: Any) -> ula.Trace:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **settings})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(3)
    return ula.trace(model.to(dtype), torch.randint(3, 50, (2, 13)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("name", "settings", "multiplier"),
    [
        ("Llama", {}, 1.0),
        ("GPTNeoX", {}, 1.0),
        ("GPTNeoX", dict(use_parallel_residual=False), 1.0),
        ("OPT", OPT, 1.0),
        ("Cohere", {}, 1.0),
        ("Granite", dict(residual_multiplier=0.3), 0.3),
        ("Mamba", {}, 1.0),
        ("Mamba2", dict(num_heads=8), 1.0),
    ],
)
def test_the_stream_and_its_multiplier_are_identified(
    name: str, settings: Any, multiplier: float, dtype: torch.dtype
) -> None:
    trace = traced(name, dtype, **settings)
    close = 5e-3 if dtype == torch.bfloat16 else 1e-5
    assert [len(step.layers) for step in trace.steps] == [1, 1]
    for layer in trace.layers:
        assert layer.residual is not None
        assert layer.multiplier == pytest.approx(multiplier, rel=close)
    errors = [step.stream_error() for step in trace.steps]
    assert all(e is not None and e <= step.stream_tolerance() for e, step in zip(errors, trace.steps, strict=True))
    # Mamba stores the stream of a half-precision model in float32.
    in_float32 = name.startswith("Mamba") and dtype == torch.bfloat16
    allowed = tolerance("stream", torch.float32 if in_float32 else dtype)
    assert {step.stream_tolerance() for step in trace.steps} == {allowed}
    # The first layer's stream is the embedded input.
    ids = trace.ids
    if name not in ("OPT", "Granite"):
        embedded = trace.host.get_input_embeddings()(ids).to(trace.layers[0].residual)
        assert torch.allclose(trace.layers[0].residual, embedded, rtol=close)


@pytest.mark.parametrize("name", ["Gemma2", "Olmo2", "Glm4"])
def test_a_norm_between_output_and_stream_is_part_of_what_is_added(name: str) -> None:
    trace = traced(name)
    for layer, step in zip(trace.layers, trace.steps, strict=True):
        assert layer.residual is not None and layer.added is not layer
        assert layer.added.operator.reconstruction_error() < TOLERANCES["layer", torch.float32]
        error = step.stream_error()
        assert error is not None and error <= step.stream_tolerance()


def test_a_module_with_an_internal_residual_has_a_stream_of_zeros() -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(**{k: v for k, v in SMALL.items() if k not in ("head_dim", "num_key_value_heads")})
    trace = ula.trace(transformers.BertModel(config).eval(), torch.randint(3, 50, (2, 7)))
    assert all(layer.residual is not None and not layer.residual.any() for layer in trace.layers)


@pytest.mark.parametrize("multiplier", [1.0, 0.22, 1e-6, -30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_elements_rule_out_no_sum(dtype: torch.dtype, multiplier: float) -> None:
    """Of a sum with parts that are zero on these elements, and of tensors in another order in memory."""
    generator = torch.Generator().manual_seed(0)
    stream, output, other = (torch.randn(2, 50, 40, generator=generator).to(dtype) for _ in range(3))
    elements = output.flatten()
    elements[:: output.numel() // FEW | 1] = 0
    sums = [(stream + multiplier * output, stream, None), (stream + multiplier * output + other, stream, other)]
    turned = [(total.mT.contiguous().mT, x, y) for total, x, y in sums]
    no_sums: list[Candidate] = [(stream, stream, None), (other, stream, None)]
    assert [*possible_sums(iter((*sums, *turned)), output)] == [*sums, *turned]
    whole = torch.randn(2, 50, 40, generator=generator).to(dtype)
    assert not [*possible_sums(iter(no_sums), whole)]


def test_a_part_below_the_rounding_of_the_other_makes_no_sum() -> None:
    x = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    assert fit_factors(x + x.flip(0), [x, x.flip(0)]) == [1.0, 1.0]
    for parts in ([x, 1e-12 * x.flip(0)], [1e-12 * x.flip(0), x]):
        assert torch.equal(parts[0] + parts[1], x) and fit_factors(x, parts) is None

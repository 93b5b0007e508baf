"""Attention with latent values or gated outputs: outputs, stages, and refused hosts."""

import pytest
import torch

from tests.hosts import named
from unilinattn import trace
from unilinattn.errors import UncoveredError
from unilinattn.operator.stages import Matrix, Mix, Scale
from unilinattn.testing import promoted
from unilinattn.testing.hosts import randomize, transformers_model


def test_values_pass_the_frozen_norm_of_the_latent() -> None:
    host = named("deepseek 3")
    model = host.model().double()
    with promoted(), torch.no_grad():
        layer = trace(model, host.inputs()).layers[0]
        op, module = layer.operator, model.model.layers[0].self_attn
        latent = module.kv_a_proj_with_mqa(layer.input)[..., : module.kv_lora_rank]
        scale = (latent.pow(2).mean(-1, keepdim=True) + module.kv_a_layernorm.variance_epsilon).rsqrt()
    assert [stage.role for stage in op.chains["x"]] == ["input", "norm", "norm", "input", "core", "output"]
    assert isinstance(op.chains["x"][1], Scale)
    torch.testing.assert_close(op.chains["x"][1].scale, scale)
    assert op.matrix("unified").shape == op.matrix("core").shape


def test_an_output_gate_is_a_stage_before_the_projection() -> None:
    host = named("qwen3 next")
    model = host.model().double()
    with promoted(), torch.no_grad():
        layer = trace(model, host.inputs()).layers[1]
        op, module = layer.operator, model.model.layers[1].self_attn
        heads = module.q_proj(layer.input).unflatten(-1, (-1, 2 * module.head_dim))
        gate = torch.sigmoid(heads[..., module.head_dim :].flatten(2))
    assert [stage.role for stage in op.chains["x"]] == ["input", "core", "gate", "output"]
    assert isinstance(op.chains["x"][2], Scale)
    torch.testing.assert_close(op.chains["x"][2].scale, gate)
    assert isinstance(op.chains["x"][3], Matrix)
    torch.testing.assert_close(op.chains["x"][3].weight, module.o_proj.weight.detach())


def test_a_gate_per_head_with_a_latent() -> None:
    host = named("bailing hybrid")
    model = host.model().double()
    with promoted(), torch.no_grad():
        layer = trace(model, host.inputs()).layers[1]
        op, module = layer.operator, model.model.layers[1].self_attn
        gate = torch.sigmoid(module.g_proj(layer.input)).repeat_interleave(module.v_head_dim, dim=-1)
    assert [stage.role for stage in op.chains["x"]] == ["input", "norm", "norm", "input", "core", "gate", "output"]
    assert isinstance(op.chains["x"][5], Scale)
    torch.testing.assert_close(op.chains["x"][5].scale, gate)


def test_only_selected_keys_have_weight() -> None:
    host = named("deepseek 3.2, selected keys")
    for layer in trace(host.model(), host.inputs()).layers:
        mix = next(stage for stage in layer.operator.chains["x"] if isinstance(stage, Mix))
        assert int((mix.mixer.materialize() > 0).sum(-1).max()) == 4


def test_a_norm_on_the_output_is_a_recorded_stage() -> None:
    build = transformers_model(
        "BitNetForCausalLM",
        "BitNetConfig",
        vocab_size=31,
        hidden_size=16,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=None,
    )
    layer = trace(randomize(build().eval()), torch.arange(7)[None]).layers[0]
    assert layer.operator.matrix("core").shape == (1, 7, 7)
    total = layer.operator.contributions(-1).sum(1) + layer.operator.bias[:, -1]
    torch.testing.assert_close(total, layer.output[:, -1])


def test_values_not_from_the_latent_are_refused_when_the_operator_is_built() -> None:
    host = named("deepseek 3")
    model = host.model()
    # DeepSeek does not scale its latent; hosts with this attribute do.
    model.model.layers[0].self_attn.kv_lora_scale = 2.0
    layer = trace(model, host.inputs()).layers[0]
    assert layer.operator.matrix("core").shape == (2, 11, 11)
    with pytest.raises(UncoveredError, match="differ from those of its latent"):
        layer.operator.contributions(-1)


def test_a_latent_of_another_layer_is_refused_when_the_operator_is_built() -> None:
    named("mistral large 4, selected keys").model()
    from transformers.models.mistral_large4.configuration_mistral_large4 import MistralLarge4TextConfig
    from transformers.models.mistral_large4.modeling_mistral_large4 import MistralLarge4TextModel

    settings = dict(hidden_size=16, intermediate_size=12, num_hidden_layers=2, num_attention_heads=4, vocab_size=31)
    latent = dict(num_key_value_heads=4, kv_lora_rank=6, qk_rope_head_dim=2, qk_nope_head_dim=3, v_head_dim=5)
    index = dict(index_topk=4, index_head_dim=6, index_n_heads=8, kv_source_layers=[0, 0], no_rope_layers=[1, 1])
    config = MistralLarge4TextConfig(**settings, **latent, **index, mlp_layer_types=["dense"] * 2, pad_token_id=None)
    reference, shared = trace(randomize(MistralLarge4TextModel(config).eval()), torch.arange(7)[None]).layers
    assert reference.operator.reconstruction_error() <= 1e-5
    assert shared.operator.matrix("core").shape == (1, 7, 7)
    with pytest.raises(UncoveredError, match="is_kv_shared_layer"):
        shared.operator.contributions(-1)

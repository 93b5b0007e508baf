"""Tiny models whose modules are rewritten by the rules of AttnLRP, with plain autograd and detached constants.

Sources: Achtibat et al., "AttnLRP" (ICML 2024), in its efficient form as gradient x input; Jafari et al., "MambaLRP"
(2024), for slopes and gates.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    DogeConfig,
    DogeForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from tests.frozen.detached import convolved, gpt2_model, llama_model, mamba_model, rms, token_ids
from unilinattn.testing import promoted


class Weights(NamedTuple):
    """The parts of the relevance of a product that a value and its factor get, and values and the matrix that mixes."""

    value: float
    factor: float
    values: float
    matrix: float


PASSES = {
    "halves": {
        "tokens": Weights(1 / 2, 1 / 2, 1 / 2, 1 / 2),
        "sent": Weights(1 / 2, 0.0, 1 / 2, 0.0),
        "content": Weights(1.0, 0.0, 1.0, 0.0),
    },
    "thirds": {
        "tokens": Weights(1 / 2, 1 / 2, 1 / 3, 2 / 3),
        "sent": Weights(1 / 2, 0.0, 1 / 3, 0.0),
        "content": Weights(1.0, 0.0, 1.0, 0.0),
    },
}
"""The weights of each backward pass, by the split of the product of a matrix and values."""


def scaled(x: Tensor, weight: float) -> Tensor:
    """Return `x`, whose gradient is multiplied by `weight`."""
    return weight * x + (x - weight * x).detach()


def product(value: Tensor, factor: Tensor, weights: Weights) -> Tensor:
    return scaled(value, weights.value) * scaled(factor, weights.factor)


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x).detach()


def sigmoid(x: Tensor) -> Tensor:
    return 0.5 + x * ((torch.sigmoid(x) - 0.5) / x).detach()


def _unit(x: Tensor, eps: float) -> Tensor:
    """Divide by the norm over the last dimension, a constant."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps).detach()


def _rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps).detach()


def _layer_norm(norm: nn.LayerNorm, weights: Weights, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + norm.eps).detach()
    return norm.weight * (centred * scale) + norm.bias


def _rms_norm(norm: nn.Module, weights: Weights, x: Tensor) -> Tensor:
    return rms(norm, x)


def _rms_norm_from_one(norm: nn.Module, weights: Weights, x: Tensor) -> Tensor:
    return _rms(x, norm.eps) * (1 + norm.weight)


def _gated_mlp(mlp: nn.Module, weights: Weights, x: Tensor) -> Tensor:
    return mlp.down_proj(product(mlp.up_proj(x), silu(mlp.gate_proj(x)), weights))


def _gelu_mlp(mlp: nn.Module, weights: Weights, x: Tensor) -> Tensor:
    inner = mlp.c_fc(x)
    return mlp.c_proj(inner * (functional.gelu(inner, approximate="tanh") / inner).detach())


def _mixed(query: Tensor, key: Tensor, value: Tensor, weights: Weights) -> Tensor:
    """Return causal softmax attention over (batch, head, token, channel); query and key share the matrix's part."""
    query, key = (scaled(x, weights.matrix / 2) for x in (query, key))
    heads, length = query.shape[1], query.shape[2]
    key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, scaled(value, weights.values)))
    scores = query @ key.mT / query.shape[-1] ** 0.5
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    return (torch.softmax(scores.masked_fill(future, -torch.inf), -1) @ value).transpose(1, 2).flatten(2)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first channels of (batch, head, token, channel) by positions."""
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    left, right = turned.chunk(2, -1)
    return torch.cat([turned * cos[:, None] + torch.cat([-right, left], -1) * sin[:, None], rest], -1)


def _gpt2_attention(attention: nn.Module, weights: Weights, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    query, key, value = (
        part.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2) for part in attention.c_attn(x).chunk(3, -1)
    )
    return attention.c_proj(_mixed(query, key, value, weights)), None


def _llama_attention(
    attention: nn.Module, weights: Weights, hidden_states: Tensor, position_embeddings: Any, **kwargs: Any
) -> Any:
    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)

    query, key, value = (
        heads(project(hidden_states)) for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    query, key = (_rotated(part, *position_embeddings) for part in (query, key))
    return attention.o_proj(_mixed(query, key, value, weights)), None


def _gated_attention(
    attention: nn.Module, weights: Weights, hidden_states: Tensor, position_embeddings: Any, **kwargs: Any
) -> Any:
    """Return the attention of Qwen3-Next, with normed queries and keys and a sigmoid gate."""
    size = attention.head_dim
    query, gate = attention.q_proj(hidden_states).unflatten(-1, (-1, 2 * size)).chunk(2, -1)
    key, value = (project(hidden_states).unflatten(-1, (-1, size)) for project in (attention.k_proj, attention.v_proj))
    query, key = attention.q_norm(query), attention.k_norm(key)
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    query, key = (_rotated(part, *position_embeddings) for part in (query, key))
    mixed = _mixed(query, key, value, weights)
    return attention.o_proj(product(mixed, sigmoid(gate.flatten(2)), weights)), None


def _step(step: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
    """Return a step size as the rate of decays, and as the scale of a key, whose part it shares."""
    return scaled(step, weights.matrix), scaled(step, weights.matrix / 4)


def _mamba(mixer: Any, weights: Weights, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    inner, gate = mixer.in_proj(x).chunk(2, -1)
    u = silu(convolved(inner, mixer.conv1d))
    sizes = [mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size]
    steps, key, query = mixer.x_proj(u).split(sizes, -1)
    step, scale = _step(functional.softplus(mixer.dt_proj(steps)), weights)
    key, query = scaled(key, weights.matrix / 4), scaled(query, weights.matrix / 2)
    decay, value = torch.exp(step[..., None] * -torch.exp(mixer.A_log)), scaled(u, weights.values)
    state, outputs = torch.zeros_like(decay[:, 0]), []
    for t in range(x.shape[1]):
        state = decay[:, t] * state + (scale[:, t] * value[:, t])[..., None] * key[:, t, None]
        outputs.append((state * query[:, t, None]).sum(-1))
    return mixer.out_proj(product(torch.stack(outputs, 1) + mixer.D * u, silu(gate), weights))


def _mamba2(mixer: Any, weights: Weights, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    inner, heads, groups, size = mixer.intermediate_size, mixer.num_heads, mixer.n_groups, mixer.ssm_state_size
    gate, mixed, step = mixer.in_proj(x).split([inner, mixer.conv_dim, heads], -1)
    u, key, query = silu(convolved(mixed, mixer.conv1d)).split([inner, groups * size, groups * size], -1)
    key, query = (
        scaled(part, share * weights.matrix).unflatten(-1, (groups, size)).repeat_interleave(heads // groups, 2)
        for part, share in ((key, 0.25), (query, 0.5))
    )
    u = u.unflatten(-1, (heads, -1))
    step, scale = _step(functional.softplus(step + mixer.dt_bias), weights)
    decay, value = torch.exp(step * -torch.exp(mixer.A_log)), scaled(u, weights.values)
    state, outputs = x.new_zeros(len(x), heads, u.shape[-1], size), []
    for t in range(x.shape[1]):
        written = (scale[:, t, :, None] * value[:, t])[..., None] * key[:, t, :, None]
        state = decay[:, t, :, None, None] * state + written
        outputs.append((state * query[:, t, :, None]).sum(-1))
    read = (torch.stack(outputs, 1) + mixer.D[:, None] * u).flatten(2)
    # Versions whose norm has no `group_size` normalise over all channels.
    channels = getattr(mixer.norm, "group_size", inner)
    grouped = product(read, silu(gate), weights).unflatten(-1, (-1, channels))
    return mixer.out_proj(mixer.norm.weight * _rms(grouped, mixer.norm.variance_epsilon).flatten(2))


def _delta_rule(mixer: Any, weights: Weights, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """Return the gated delta rule of Qwen3-Next."""
    x = hidden_states
    query, key, value, gate, strength, step = mixer.fix_query_key_value_ordering(
        mixer.in_proj_qkvz(x), mixer.in_proj_ba(x)
    )
    mixed = silu(convolved(torch.cat([part.flatten(2) for part in (query, key, value)], -1), mixer.conv1d))
    query, key, value = mixed.split([mixer.key_dim, mixer.key_dim, mixer.value_dim], -1)
    heads, size = mixer.num_v_heads, mixer.head_k_dim
    query, key = (
        scaled(_unit(part.unflatten(-1, (-1, size)), 1e-6), weights.matrix / 2).repeat_interleave(
            heads // mixer.num_k_heads, 2
        )
        for part in (query, key)
    )
    value = scaled(value, weights.values).unflatten(-1, (heads, -1))
    strength = scaled(sigmoid(strength), weights.matrix)
    log_decay = -mixer.A_log.exp() * functional.softplus(step + mixer.dt_bias)
    decay = torch.exp(scaled(log_decay, weights.matrix))
    state, outputs = x.new_zeros(len(x), heads, size, value.shape[-1]), []
    for t in range(x.shape[1]):
        state = decay[:, t, :, None, None] * state
        stored = (state * key[:, t, :, :, None]).sum(2)
        correction = strength[:, t, :, None] * (value[:, t] - stored)
        state = state + key[:, t, :, :, None] * correction[:, :, None]
        outputs.append((state * query[:, t, :, :, None]).sum(2) / size**0.5)
    normed = mixer.norm.weight * _rms(torch.stack(outputs, 1), mixer.norm.variance_epsilon)
    return mixer.out_proj(product(normed, silu(gate), weights).flatten(2))


def _experts(block: Any, weights: Weights, x: Tensor) -> Tensor:
    """Return the mixture of experts of Qwen3-Next: the chosen experts by renormalised softmax, and a gated one."""
    probabilities = torch.softmax(functional.linear(x, block.gate.weight), -1)
    chosen, index = probabilities.topk(block.gate.top_k, -1)
    chosen = chosen / chosen.sum(-1, keepdim=True)
    outputs = product(block.shared_expert(x), sigmoid(block.shared_expert_gate(x)), weights)
    for number in range(block.gate.num_experts):
        gate, up = functional.linear(x, block.experts.gate_up_proj[number]).chunk(2, -1)
        expert = functional.linear(product(up, silu(gate), weights), block.experts.down_proj[number])
        # An expert that was not chosen has the weight zero.
        weight = (chosen * (index == number)).sum(-1, keepdim=True)
        outputs = outputs + product(expert, weight, weights)
    return outputs


_RULES: dict[str, Callable[..., Any]] = {
    "LayerNorm": _layer_norm,
    "LlamaRMSNorm": _rms_norm,
    "MambaRMSNorm": _rms_norm,
    "Mamba2RMSNorm": _rms_norm,
    "Qwen3NextRMSNorm": _rms_norm_from_one,
    "LlamaMLP": _gated_mlp,
    "Qwen3NextMLP": _gated_mlp,
    "GPT2MLP": _gelu_mlp,
    "GPT2Attention": _gpt2_attention,
    "LlamaAttention": _llama_attention,
    "Qwen3NextAttention": _gated_attention,
    "MambaMixer": _mamba,
    "Mamba2Mixer": _mamba2,
    "Qwen3NextGatedDeltaNet": _delta_rule,
    "Qwen3NextSparseMoeBlock": _experts,
}
"""The forward of each class by the rules."""


def _drawn(model: Any) -> Any:
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


def grouped_llama() -> Any:
    """Return a Llama whose two query heads share a key, with biases."""
    model = llama_model()
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    return model


def mamba2_model() -> Mamba2ForCausalLM:
    torch.manual_seed(0)
    config = Mamba2Config(
        vocab_size=17, hidden_size=8, expand=2, head_dim=4, num_heads=4, n_groups=2, state_size=3, num_hidden_layers=2
    )
    return _drawn(Mamba2ForCausalLM(config))


def qwen3_next_model(*layer_types: str, experts: bool = False) -> Qwen3NextForCausalLM:
    torch.manual_seed(0)
    layers = len(layer_types)
    config = Qwen3NextConfig(
        vocab_size=17,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=layers,
        layer_types=[f"{name}_attention" for name in layer_types],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        linear_key_head_dim=3,
        linear_value_head_dim=5,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        mlp_only_layers=[] if experts else list(range(layers)),
        num_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=4,
        shared_expert_intermediate_size=5,
        norm_topk_prob=True,
        experts_implementation="eager",
    )
    return _drawn(Qwen3NextForCausalLM(config))


def doge_model() -> DogeForCausalLM:
    """Return a Doge, whose values decide a mask that is added to the scores of attention."""
    torch.manual_seed(0)
    config = DogeConfig(
        vocab_size=17,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        keep_window_size=64,
    )
    return _drawn(DogeForCausalLM(config))


MODELS: dict[str, Callable[[], Any]] = {
    "llama": grouped_llama,
    "gpt2": gpt2_model,
    "mamba": mamba_model,
    "mamba2": mamba2_model,
    "qwen3 next, hybrid": partial(qwen3_next_model, "linear", "full"),
    "qwen3 next, experts": partial(qwen3_next_model, "full", "linear", experts=True),
    "doge": doge_model,
}


def relevance(model: Any, weights: Weights, token: int = 3) -> Tensor:
    """Return gradient x stream of the last position's logit of a `token`, in a model rewritten by the rules."""
    x = model.get_input_embeddings()(token_ids()).detach()
    positions = model.transformer.wpe.weight[: x.shape[1]].detach() if hasattr(model, "transformer") else 0
    # The stream of the first block is the leaf: the vectors of the tokens and of their positions.
    stream = (x + positions).requires_grad_()
    with promoted():
        expected = model(token_ids(), use_cache=False).logits.detach()
        with pytest.MonkeyPatch.context() as patch:
            for module in model.modules():
                if (rule := _RULES.get(type(module).__name__)) is not None:
                    patch.setattr(module, "forward", partial(rule, module, weights))
            logits = model(inputs_embeds=stream - positions, use_cache=False).logits
    # The rules change gradients, and no value.
    torch.testing.assert_close(logits.detach(), expected, rtol=1e-9, atol=1e-9)
    (grad,) = torch.autograd.grad(logits[:, -1, token].sum(), stream)
    return (grad * stream).sum(-1).detach()

"""Small models in float64, and their logits with the frozen factors detached by hand."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

import unilinattn as ula
from unilinattn.frozen.passes import FrozenPass
from unilinattn.frozen.run import frozen
from unilinattn.testing import promoted

LENGTH = 13


def scalar_of(trace: ula.Trace) -> Any:
    """Return a logit of the trace's model, or a linear function of its output for a model without logits."""
    output = trace.output
    if isinstance(output, Tensor) or hasattr(output, "logits"):
        return 1
    return lambda out: out.last_hidden_state[:, -1, :3].sum(-1)


def mamba_model(layers: int = 2) -> MambaForCausalLM:
    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=17, hidden_size=8, state_size=4, num_hidden_layers=layers, use_bias=True, residual_in_fp32=False
    )
    model = MambaForCausalLM(config).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def llama_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=17,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        attention_bias=True,
        mlp_bias=True,
    )
    model = LlamaForCausalLM(config).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def gpt2_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    model = (
        GPT2LMHeadModel(GPT2Config(vocab_size=17, n_embd=8, n_layer=2, n_head=2, n_positions=LENGTH)).double().eval()
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def token_ids() -> Tensor:
    return torch.randint(17, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def rms(norm: nn.Module, x: Tensor) -> Tensor:
    scale = torch.rsqrt(x.detach().pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    return norm.weight * (x * scale)


def convolved(x: Tensor, conv: nn.Conv1d) -> Tensor:
    """Return the causal convolution of (batch, token, channel)."""
    padded = functional.pad(x.mT, (conv.kernel_size[0] - 1, 0))
    return functional.conv1d(padded, conv.weight, conv.bias, groups=conv.groups).mT


def selective_scan(mixer: Any, inner: Tensor) -> Tensor:
    """Return what the gate of a Mamba mixer multiplies; slopes, step sizes, B and C are detached by hand."""
    taps = convolved(inner, mixer.conv1d)
    u = taps * torch.sigmoid(taps.detach())
    sizes = [mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size]
    steps, key, query = mixer.x_proj(u.detach()).split(sizes, -1)
    step = functional.softplus(mixer.dt_proj(steps))
    decay = torch.exp(step[..., None] * -torch.exp(mixer.A_log))
    state, outputs = torch.zeros_like(decay[:, 0]), []
    for t in range(inner.shape[1]):
        state = decay[:, t] * state + (step[:, t] * u[:, t])[..., None] * key[:, t, None]
        outputs.append((state * query[:, t, None]).sum(-1))
    return torch.stack(outputs, 1) + mixer.D * u


class Steps(NamedTuple):
    """The stream that enters each block, and the input and output of each mixer, of a model detached by hand."""

    streams: list[Tensor]
    inputs: list[Tensor]
    outputs: list[Tensor]


def _frozen_mamba(model: MambaForCausalLM, x: Tensor, steps: Steps) -> Tensor:
    """Return the logits of the last token with step sizes, B, C, slopes, gates and scales detached by hand."""
    for block in model.backbone.layers:
        mixer = block.mixer
        steps.streams.append(x)
        steps.inputs.append(rms(block.norm, x))
        inner, gate = mixer.in_proj(steps.inputs[-1]).chunk(2, -1)
        steps.outputs.append(mixer.out_proj(selective_scan(mixer, inner) * functional.silu(gate.detach())))
        x = x + steps.outputs[-1]
    return model.lm_head(rms(model.backbone.norm_f, x)[:, -1])


def _frozen_llama(model: LlamaForCausalLM, x: Tensor, steps: Steps) -> Tensor:
    """Return the logits of the last token with attention weights, activated halves and scales detached by hand."""
    with torch.no_grad():
        weights = model(token_ids(), output_attentions=True).attentions
    for block, attention in zip(model.model.layers, weights, strict=True):
        steps.streams.append(x)
        steps.inputs.append(rms(block.input_layernorm, x))
        value = block.self_attn.v_proj(steps.inputs[-1])[:, None]
        steps.outputs.append(block.self_attn.o_proj((attention @ value).transpose(1, 2).flatten(2)))
        x = x + steps.outputs[-1]
        normed = rms(block.post_attention_layernorm, x)
        active = functional.silu(block.mlp.gate_proj(normed)).detach()
        x = x + block.mlp.down_proj(active * block.mlp.up_proj(normed))
    return model.lm_head(rms(model.model.norm, x)[:, -1])


def _frozen_gpt2(model: GPT2LMHeadModel, x: Tensor, steps: Steps) -> Tensor:
    """Return the logits of the last token with attention weights, GELU's slopes and deviations detached by hand."""
    with torch.no_grad():
        weights = model(token_ids(), output_attentions=True).attentions
    for block, attention in zip(model.transformer.h, weights, strict=True):
        steps.streams.append(x)
        steps.inputs.append(_layer_norm(block.ln_1, x))
        value = block.attn.c_attn(steps.inputs[-1])[..., 16:].unflatten(-1, (2, 4)).transpose(1, 2)
        steps.outputs.append(block.attn.c_proj((attention @ value).transpose(1, 2).flatten(2)))
        x = x + steps.outputs[-1]
        inner = block.mlp.c_fc(_layer_norm(block.ln_2, x))
        x = x + block.mlp.c_proj(inner * (block.mlp.act(inner) / inner).detach())
    return model.lm_head(_layer_norm(model.transformer.ln_f, x)[:, -1])


def _layer_norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return norm.weight * centred * torch.rsqrt(centred.detach().square().mean(-1, keepdim=True) + norm.eps) + norm.bias


class _ByHand(NamedTuple):
    """A model, its frozen form, and the constants in that form by the module whose share they are."""

    build: Callable[[], Any]
    logits: Callable[[Any, Tensor, Steps], Tensor]
    biases: Callable[[Any], dict[str, list[Tensor]]]


def _mamba_biases(model: MambaForCausalLM) -> dict[str, list[Tensor]]:
    blocks = enumerate(model.backbone.layers)
    return {
        f"backbone.layers.{k}.mixer": [getattr(block.mixer, name).bias for name in ("in_proj", "conv1d", "out_proj")]
        for k, block in blocks
    }


def _llama_biases(model: LlamaForCausalLM) -> dict[str, list[Tensor]]:
    biases = {}
    for k, block in enumerate(model.model.layers):
        biases[f"model.layers.{k}.self_attn"] = [block.self_attn.v_proj.bias, block.self_attn.o_proj.bias]
        for name in ("up_proj", "down_proj"):
            biases[f"model.layers.{k}.mlp.{name}"] = [getattr(block.mlp, name).bias]
    return biases


def _gpt2_biases(model: GPT2LMHeadModel) -> dict[str, list[Tensor]]:
    biases = {"transformer.ln_f": [model.transformer.ln_f.bias]}
    for k, block in enumerate(model.transformer.h):
        biases[f"transformer.h.{k}.attn"] = [block.attn.c_attn.bias, block.attn.c_proj.bias]
        for name in ("ln_1", "ln_2"):
            biases[f"transformer.h.{k}.{name}"] = [getattr(block, name).bias]
        for name in ("c_fc", "c_proj"):
            biases[f"transformer.h.{k}.mlp.{name}"] = [getattr(block.mlp, name).bias]
    return biases


BY_HAND = {
    "mamba": _ByHand(mamba_model, _frozen_mamba, _mamba_biases),
    "llama": _ByHand(llama_model, _frozen_llama, _llama_biases),
    "gpt2": _ByHand(gpt2_model, _frozen_gpt2, _gpt2_biases),
}


def detached_model(name: str) -> tuple[Any, Tensor, Tensor, Tensor, Steps]:
    """Return a model, the logit of its form detached by hand, the tokens' vectors, their positions' part, and steps."""
    model = BY_HAND[name].build()
    model.config._attn_implementation = "eager"
    x = model.get_input_embeddings()(token_ids()).detach()
    positions = model.transformer.wpe.weight[:LENGTH].detach() if name == "gpt2" else torch.zeros(())
    x = (x + positions).requires_grad_()
    steps = Steps([], [], [])
    with promoted():
        logit = BY_HAND[name].logits(model, x, steps)[:, 3]
    return model, logit, x, positions.expand(x.shape), steps


def worst(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


def misses(name: str) -> float:
    """Return the largest difference of shares and biases from those of the detached model, relative to the largest."""
    model, logit, x, positions, _ = detached_model(name)
    (grad,) = torch.autograd.grad(logit.sum(), x)
    expected = (grad * x).sum(-1).detach()
    with promoted():
        shares = frozen(ula.trace(model, token_ids(), progress=False)).shares(-1, 3)
    assert torch.allclose(logit.detach(), shares.value, rtol=1e-9)
    bias = logit.detach() - expected.sum(1)
    parts = torch.cat([expected, bias[:, None], (grad * positions).sum(-1)], 1)
    return worst(torch.cat([shares.tokens, shares.bias[:, None], shares.embedding], 1), parts)


def run_by_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the mixers by the rules of the frozen run instead of their operators."""

    def by_the_rules(run: FrozenPass, layer: Any, arguments: Any) -> Any:
        return type(layer.module).forward(layer.module, **arguments)

    monkeypatch.setattr(FrozenPass, "_layer", by_the_rules)

"""The delta-rule hybrids: order of layers, token-by-token recurrences, gradients, and errors."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests import hosts
from tests.architectures.padding import padded_inputs
from tests.architectures.recurrences import act, convolve, host_mask
from tests.hosts import named
from unilinattn import trace
from unilinattn.architectures import Call
from unilinattn.architectures.delta_rule import kimi_delta
from unilinattn.errors import UncoveredError
from unilinattn.host.substitution import through_operators
from unilinattn.testing import Host, promoted, relative_error, tolerance
from unilinattn.testing.hosts.delta import HOSTS

every_host = hosts.every_host(HOSTS, usual=("glm 5 next",))
one_of_each = pytest.mark.parametrize(
    "name",
    ["qwen3 next", "qwen3.5", "olmo hybrid", "kimi linear", "bailing hybrid", "glm 5 next"],
)

KINDS = {
    "qwen3_next": ("gated DeltaNet", "softmax attention"),
    "qwen3_5": ("gated DeltaNet", "softmax attention"),
    "olmo_hybrid": ("gated DeltaNet", "softmax attention"),
    "kimi_delta": ("Kimi delta attention (KDA)", "multi-head latent attention (MLA)"),
}
"""Kinds of the linear and the full layers of each adapter's hosts."""


@every_host
@pytest.mark.parametrize("side", [None, "left"])
def test_recurrence_operator_and_host_agree(host: Host, side: str | None) -> None:
    model, ids = host.model().double(), host.inputs()
    inputs = padded_inputs(ids, side)
    modules = dict(model.named_modules())
    linear, full = KINDS[host.architecture]
    kinds = [linear if kind == "linear_attention" else full for kind in model.config.layer_types]
    with promoted(), torch.no_grad():
        layers = trace(model, inputs).layers
        assert [layer.kind for layer in layers] == kinds and linear in kinds
        for layer in layers:
            if layer.kind != linear:
                continue
            op, limit = layer.operator, tolerance("reconstruction", torch.float64)
            real = torch.ones(ids.shape, dtype=torch.bool) if layer.mask is None else layer.mask
            # The hosts ignore the mask of a single token.
            shown = host_mask(modules[layer.name], real) if ids.shape[1] > 1 else torch.ones_like(real)
            paper = delta_rule(modules[layer.name], layer.input, layer.input, shown) * real[..., None]
            materialized = (op.contributions(range(ids.shape[1])).sum(2) + op.bias) * real[..., None]
            assert relative_error(paper, layer.output * real[..., None]) <= limit
            assert relative_error(materialized, layer.output * real[..., None]) <= limit
            fresh = torch.randn(layer.input.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
            frozen = delta_rule(modules[layer.name], layer.input, fresh, shown)
            assert relative_error(op.apply(fresh), frozen) <= limit


@one_of_each
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


def test_a_trace_runs_without_a_cache() -> None:
    host = named("qwen3 next")
    for layer in trace(host.model(), {"input_ids": host.inputs(), "use_cache": True}).layers:
        assert layer.reconstruction_error() <= tolerance("reconstruction", torch.float32)


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


def delta_rule(module: nn.Module, deciding: Tensor, carried: Tensor, mask: Tensor) -> Tensor:
    """Gated delta rule (Yang, Kautz and Hatamizadeh, 2025, Eq. 10) and KDA (Kimi Linear, 2025, Eq. 1), frozen.

    The deciding stream determines queries, keys, strengths, decays, slopes, norm and gate; see `recurrences`.
    """
    project = PROJECTIONS[type(module).__name__]
    # The first version of one host has separate convolutions for queries, keys and values.
    first = [module.q_conv1d, module.k_conv1d, module.v_conv1d] if hasattr(module, "v_conv1d") else [module.conv1d]
    kernel = torch.cat([conv.weight for conv in first]).squeeze(1)
    # Older versions use SiLU regardless of the configuration.
    activation = "silu" if hasattr(module, "causal_conv1d_fn") else getattr(module, "activation", "silu")
    norm = module.norm if hasattr(module, "norm") else module.o_norm
    decided, carries, outputs, memories = [], [], [], None
    for t in range(deciding.shape[1]):
        real = mask[:, t, None].to(deciding.dtype)
        query, key, value, strength, log_decay, gate = project(module, deciding[:, t] * real)
        decided.append(torch.cat([query, key, value], dim=-1))
        carries.append(torch.cat([query, key, project(module, carried[:, t] * real)[2]], dim=-1))
        convolved = convolve(kernel, None, decided)
        sizes = [query.shape[-1], key.shape[-1], value.shape[-1]]
        q, k, u = act(activation, convolved, convolved).split(sizes, dim=-1)
        v = act(activation, convolved, convolve(kernel, None, carries)).split(sizes, dim=-1)[2]
        heads = strength.shape[-1]
        state = log_decay.shape[-1] if log_decay.ndim == 3 else module.head_k_dim
        q, k = (x.unflatten(-1, (-1, state)) for x in (q, k))
        # Consecutive value heads have the same query and key.
        serves = [head * q.shape[1] // heads for head in range(heads)]
        q, k = (x[:, serves] / (x[:, serves].pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        decay = torch.exp(log_decay if log_decay.ndim == 3 else log_decay[..., None])[..., None]
        reads = []
        memories = memories or [torch.zeros(*k.shape, value.shape[-1] // heads, dtype=k.dtype) for _ in "12"]
        for which, stream in enumerate((u, v)):
            memory = memories[which] * decay
            read = (memory * k[..., None]).sum(-2)
            correction = strength[..., None] * (stream.unflatten(-1, (heads, -1)) - read)
            memories[which] = memory + k[..., None] * correction[..., None, :]
            reads.append((memories[which] * q[..., None]).sum(-2) / state**0.5)
        rms = (reads[0].pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
        normed = (norm.weight * reads[1] / rms).flatten(1)
        outputs.append((module.out_proj if hasattr(module, "out_proj") else module.o_proj)(normed * gate))
    return torch.stack(outputs, dim=1)


def head_decay(module: nn.Module, step: Tensor) -> Tensor:
    return -module.A_log.exp() * functional.softplus(step + module.dt_bias)


def qwen3_next(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    parts = module.fix_query_key_value_ordering(module.in_proj_qkvz(x)[:, None], module.in_proj_ba(x)[:, None])
    query, key, value, gate, strength, step = (part.flatten(1) for part in parts)
    return query, key, value, torch.sigmoid(strength), head_decay(module, step), functional.silu(gate)


def qwen3_5(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    query, key, value = module.in_proj_qkv(x).split([module.key_dim, module.key_dim, module.value_dim], dim=-1)
    strength, step = torch.sigmoid(module.in_proj_b(x)), module.in_proj_a(x)
    return query, key, value, strength, head_decay(module, step), functional.silu(module.in_proj_z(x))


def olmo_hybrid(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    strength = torch.sigmoid(module.b_proj(x)) * (1 + module.allow_neg_eigval)
    gate = functional.silu(module.g_proj(x))
    return (*separate(module, x), strength, head_decay(module, module.a_proj(x)), gate)


def kimi_linear(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    forget = module.forget_gate
    step = (forget.f_b_proj(forget.f_a_proj(x)) + forget.dt_bias).unflatten(-1, (module.num_heads, -1))
    rate = forget.A_log.exp().view(-1, 1)
    bound = getattr(forget, "safe_gate_lower_bound", None)
    log_decay = -rate * functional.softplus(step) if bound is None else bound * torch.sigmoid(rate * step)
    gate = torch.sigmoid(module.g_b_proj(module.g_a_proj(x)))
    return (*separate(module, x), torch.sigmoid(module.b_proj(x)), log_decay, gate)


def bailing_hybrid(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    forget = module.forget_gate
    step = (forget.f_proj(x) + forget.dt_bias).unflatten(-1, (module.num_heads, -1))
    rate = forget.A_log.exp().view(-1, 1)
    bounded = forget.lower_bound * torch.sigmoid(rate * step)
    log_decay = bounded if forget.safe_gate else -rate * functional.softplus(step)
    return (*separate(module, x), torch.sigmoid(module.b_proj(x)), log_decay, torch.sigmoid(module.g_proj(x)))


def separate(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    return module.q_proj(x), module.k_proj(x), module.v_proj(x)


PROJECTIONS: dict[str, Callable[[nn.Module, Tensor], tuple[Tensor, ...]]] = {
    "Qwen3NextGatedDeltaNet": qwen3_next,
    "Qwen3_5GatedDeltaNet": qwen3_5,
    "Qwen3_5MoeGatedDeltaNet": qwen3_5,
    "OlmoHybridGatedDeltaNet": olmo_hybrid,
    "KimiLinearDeltaAttention": kimi_linear,
    "Glm5NextTextLinearAttention": kimi_linear,
    "BailingHybridDeltaAttention": bailing_hybrid,
}
"""Query, key, value, strength, log-decay and output gate of one token, from each host's projections."""

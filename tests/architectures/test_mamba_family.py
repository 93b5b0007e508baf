"""Variants of Mamba-1 and Mamba-2 and their hybrids: recurrences, order of layers, and errors."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests import hosts
from tests.architectures import recurrences
from tests.architectures.recurrences import act, convolve, host_mask, s6
from tests.hosts import named
from tools.versions import sides
from unilinattn import trace
from unilinattn.call import Call
from unilinattn.errors import UncoveredError
from unilinattn.mixers import DiagonalDecay
from unilinattn.registry import architecture_of
from unilinattn.testing import Host, check_mixer, promoted, relative_error, tolerance
from unilinattn.testing.hosts.mamba import HOSTS
from unilinattn.tracing.layer import Layer

every_host = hosts.every_host(HOSTS)

S6, NORMED, HEADED = "Mamba-1 (S6)", "Mamba-1 (S6), normalised", "Mamba-1 (S6), several Mamba heads"
SSD, SOFTMAX = "Mamba-2 (SSD)", "softmax attention"


@every_host
def test_recurrence_operator_and_host_agree_on_a_padded_batch(host: Host) -> None:
    model, ids = host.model().double(), host.inputs()
    mask = torch.ones_like(ids)
    pads = ids.shape[1] // 3
    mask[-1, :pads] = 0
    if host.batch > 1:
        mask[0, ids.shape[1] - pads :] = 0
    modules = dict(model.named_modules())
    leaks = pads > 0 and "left" not in sides(host, host.batch)
    with pytest.warns(UserWarning, match="left padding") if leaks else nullcontext(), promoted():
        layers = trace(model, {"input_ids": ids, "attention_mask": mask}).layers
    recurrent = [layer for layer in layers if layer.architecture != "attention"]
    assert recurrent
    for layer in recurrent:
        op, module, real = layer.operator, modules[layer.name], mask.bool()
        paper = frozen(module, layer, layer.input, real)
        every = range(ids.shape[1])
        materialized = (op.contributions(every).sum(2) + op.bias) * real[..., None]
        assert relative_error(paper, layer.output * real[..., None]) <= tolerance("reconstruction", torch.float64)
        assert relative_error(materialized, paper) <= tolerance("law", torch.float64)
        fresh = torch.randn_like(layer.input)
        carried = op.apply(fresh) * real[..., None]
        assert relative_error(carried, frozen(module, layer, fresh, real)) <= tolerance("law", torch.float64)


ORDERS: dict[str, list[tuple[str, str]]] = {
    "falcon mamba": [("layers.0.mixer", NORMED), ("layers.1.mixer", NORMED)],
    "jamba": [
        ("layers.0.mamba", NORMED),
        ("layers.1.self_attn", SOFTMAX),
        ("layers.2.mamba", NORMED),
        ("layers.3.mamba", NORMED),
    ],
    "zamba": [
        ("layers.0.mamba", HEADED),
        ("layers.1.mamba", HEADED),
        ("layers.2.shared_transf.self_attn", SOFTMAX),
        ("layers.2.mamba_decoder.mamba", HEADED),
        ("layers.3.mamba", HEADED),
        ("layers.4.shared_transf.self_attn", SOFTMAX),
        ("layers.4.mamba_decoder.mamba", HEADED),
    ],
    "bamba": [("layers.0.mamba", SSD), ("layers.1.self_attn", SOFTMAX), ("layers.2.mamba", SSD)],
    "granite hybrid": [("layers.0.mamba", SSD), ("layers.1.self_attn", SOFTMAX), ("layers.2.mamba", SSD)],
    "zamba2": [
        ("layers.0.shared_transformer.self_attn", SOFTMAX),
        ("layers.0.mamba_decoder.mamba", SSD),
        ("layers.1.shared_transformer.self_attn", SOFTMAX),
        ("layers.1.mamba_decoder.mamba", SSD),
        ("layers.2.shared_transformer.self_attn", SOFTMAX),
        ("layers.2.mamba_decoder.mamba", SSD),
        ("layers.3.mamba", SSD),
    ],
    # The second block is a mixture of experts, the fourth an MLP.
    "nemotron h": [("layers.0.mixer", SSD), ("layers.2.mixer", SOFTMAX), ("layers.4.mixer", SSD)],
    "falcon h1": [
        ("layers.0.mamba", f"{SSD}, multipliers"),
        ("layers.0.self_attn", SOFTMAX),
        ("layers.1.mamba", f"{SSD}, multipliers"),
        ("layers.1.self_attn", SOFTMAX),
    ],
}


@pytest.mark.parametrize("name", ORDERS)
def test_a_trace_lists_every_layer_in_order(name: str) -> None:
    layers = trace(named(name).model(), named(name).inputs()).layers
    assert [(layer.name.split(".", 1)[1], layer.kind) for layer in layers] == ORDERS[name]


@pytest.mark.parametrize("name", ["zamba", "zamba2"])
def test_each_call_of_a_shared_block_has_a_separate_operator(name: str) -> None:
    model = named(name).model()
    layers = trace(model, named(name).inputs()).layers
    shared = [layer for layer in layers if layer.kind == SOFTMAX]
    modules = dict(model.named_modules())
    weights = [modules[layer.name].v_proj.weight for layer in shared]
    assert len({weight.data_ptr() for weight in weights}) < len(weights)
    width = model.config.hidden_size
    for layer in shared:
        assert layer.input.shape[-1] == 2 * width
        assert layer.output.shape[-1] == width
        assert layer.residual is None
    assert not torch.equal(shared[0].input, shared[-1].input)
    assert not torch.equal(shared[0].operator.matrix(), shared[-1].operator.matrix())


def test_parallel_attention_and_state_space_are_one_step() -> None:
    steps = trace(named("falcon h1").model(), named("falcon h1").inputs()).steps
    assert [[layer.architecture for layer in step.layers] for step in steps] == [["falcon_h1", "attention"]] * 2


@pytest.mark.parametrize("name", ["jamba", "granite hybrid"])
def test_a_host_with_a_default_cache_is_traced_without_it(name: str) -> None:
    layers = trace(named(name).model(), named(name).inputs()).layers
    assert all(layer.arguments.get("past_key_values", layer.arguments.get("cache_params")) is None for layer in layers)


@pytest.mark.parametrize("name", ["zamba", "bamba"])
def test_packed_sequences_are_refused_by_name(name: str) -> None:
    # Without its CUDA kernels the host refuses packed sequences, so it cannot be traced here.
    module = named(name).model().model.layers[0].mamba
    x = torch.randn(2, 5, module.hidden_size)
    call = Call(module, "layers.0.mamba", {"hidden_states": x, "seq_idx": torch.zeros(2, 5, dtype=torch.int32)}, x)
    architecture = architecture_of(type(module))
    assert architecture is not None and architecture.check is not None
    with pytest.raises(UncoveredError, match=r"layers\.0\.mamba .* was called with 'seq_idx'"):
        architecture.check(call)


def test_heads_of_a_group_have_the_same_query_and_key() -> None:
    query, key = torch.randn(2, 2, 7, 3, 4, dtype=torch.float64)
    decay = -torch.rand(2, 7, 6, 4, dtype=torch.float64)
    grouped = DiagonalDecay(query, key, decay)
    check_mixer(grouped)
    repeated = DiagonalDecay(query.repeat_interleave(2, dim=2), key.repeat_interleave(2, dim=2), decay)
    assert torch.equal(grouped.materialize(), repeated.materialize())


def rms(x: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def falcon_mamba(module: nn.Module, deciding: Tensor, carried: Tensor, mask: Tensor) -> Tensor:
    """S6 with step, key and query normalised, without weights."""

    def select(u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sizes = [module.time_step_rank, module.ssm_state_size, module.ssm_state_size]
        step, key, query = (rms(part, module.rms_eps) for part in module.x_proj(u).split(sizes, dim=-1))
        return functional.softplus(module.dt_proj(step)), key[:, None], query[:, None]

    return s6(module, deciding, carried, mask, project=lambda x: module.in_proj(x).chunk(2, dim=-1), select=select)


def jamba(module: nn.Module, deciding: Tensor, carried: Tensor, mask: Tensor) -> Tensor:
    """S6 with step, key and query normalised with weights."""
    norms = (module.dt_layernorm, module.b_layernorm, module.c_layernorm)

    def select(u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sizes = [module.time_step_rank, module.ssm_state_size, module.ssm_state_size]
        parts = zip(module.x_proj(u).split(sizes, dim=-1), norms, strict=True)
        step, key, query = (rms(part, norm.variance_epsilon) * norm.weight for part, norm in parts)
        return functional.softplus(module.dt_proj(step)), key[:, None], query[:, None]

    return s6(module, deciding, carried, mask, project=lambda x: module.in_proj(x).chunk(2, dim=-1), select=select)


def zamba(module: nn.Module, deciding: Tensor, carried: Tensor, mask: Tensor) -> Tensor:
    """S6 per head, with step, key and query from the channels of the head; values and gates alternate."""
    rank, size, width = module.time_step_rank, module.ssm_state_size, module.mamba_head_dim

    def select(u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        deltas, keys, queries = [], [], []
        for head in range(module.n_mamba_heads):
            branch = u[:, head * width : (head + 1) * width]
            step, key, query = (branch @ module.x_proj_weight[head].T).split([rank, size, size], dim=-1)
            step = step @ module.dt_proj_weight[head].T + module.dt_proj_bias[head]
            deltas.append(functional.softplus(step))
            keys += [key] * width
            queries += [query] * width
        return torch.cat(deltas, dim=1), torch.stack(keys, dim=1), torch.stack(queries, dim=1)

    def project(x: Tensor) -> tuple[Tensor, Tensor]:
        value, gate = module.in_proj(x).unflatten(-1, (-1, 2)).unbind(-1)
        return value, gate

    return s6(module, deciding, carried, mask, project=project, select=select)


def falcon_h1(module: nn.Module, deciding: Tensor, carried: Tensor, mask: Tensor) -> Tensor:
    """SSD with multipliers, and the norm before the gate, after it, or nowhere (LaTIM Eq. 13-14 and 24)."""
    kernel, bias = module.conv1d.weight.squeeze(1), module.conv1d.bias
    inner, heads, groups, size = module.intermediate_size, module.num_heads, module.n_groups, module.ssm_state_size
    rate = -torch.exp(module.A_log)
    memories = [torch.zeros(len(deciding), heads, inner // heads, size, dtype=deciding.dtype) for _ in range(2)]
    pasts: list[list[Tensor]] = [[], []]
    group = [head * groups // heads for head in range(heads)]
    outputs = []
    for t in range(deciding.shape[1]):
        real = mask[:, t, None].to(deciding.dtype)
        projected = [
            module.in_proj(x[:, t] * real * module.ssm_in_multiplier) * module.mup_vector[0, 0]
            for x in (deciding, carried)
        ]
        gate, _, step = projected[0].split([inner, module.conv_dim, heads], dim=-1)
        gate = functional.silu(gate)
        for past, whole in zip(pasts, projected, strict=True):
            past.append(whole[:, inner : inner + module.conv_dim])
        convolved = [convolve(kernel, bias, past) for past in pasts]
        streams = [act(module.activation, convolved[0], x) * real for x in convolved]
        key, query = (x.unflatten(-1, (groups, size))[:, group] for x in streams[0][:, inner:].chunk(2, dim=-1))
        delta = functional.softplus(step + module.dt_bias).clamp(*module.time_step_limit)
        reads = []
        for k, stream in enumerate(streams):
            x = stream[:, :inner].unflatten(-1, (heads, -1))
            written = (delta[..., None] * x)[..., None] * key[:, :, None]
            memories[k] = torch.exp(delta * rate)[..., None, None] * memories[k] + written
            reads.append(((memories[k] * query[:, :, None]).sum(-1) + module.D[:, None] * x).flatten(1))
        if not module.mamba_rms_norm:
            outputs.append(module.out_proj(reads[1] * gate))
            continue
        before = module.norm.norm_before_gate
        decides = (reads[0] if before else reads[0] * gate).unflatten(-1, (groups, -1))
        scale = (decides.pow(2).mean(-1, keepdim=True) + module.norm.variance_epsilon).rsqrt()
        # Gate and norm are frozen factors, so their order does not matter to the carried stream.
        normed = (reads[1].unflatten(-1, (groups, -1)) * scale).flatten(1) * module.norm.weight * gate
        outputs.append(module.out_proj(normed))
    return torch.stack(outputs, dim=1)


RECURRENCES = {
    "falcon_mamba": falcon_mamba,
    "jamba": jamba,
    "zamba": zamba,
    "mamba2": recurrences.mamba2,
    "mamba2_floor": recurrences.mamba2,
    "falcon_h1": falcon_h1,
}


def frozen(module: nn.Module, layer: Layer, carried: Tensor, real: Tensor) -> Tensor:
    """Run a layer's recurrence, frozen on its input in a trace; padded positions are zero."""
    run = partial(RECURRENCES[layer.architecture], module, layer.input)
    with torch.no_grad():
        return run(carried, host_mask(module, real)) * real[..., None]

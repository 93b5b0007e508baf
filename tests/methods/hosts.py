"""Tiny hosts in float64, with a reference for each layer that does not use the library's operators."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from tests.architectures.delta_recurrences import delta_rule
from tests.architectures.recurrences import mamba2
from tests.hosts import named
from tests.methods.references import (
    delta_map,
    gpt2_reference,
    llama_reference,
    mamba2_reference,
    mamba_reference,
    recurrence_reference,
    s4d_reference,
)
from unilinattn.models import S4DConfig, S4DForCausalLM
from unilinattn.testing.hosts import randomize, transformers_model
from unilinattn.testing.hosts.basic import causal_model
from unilinattn.testing.promote import promoted
from unilinattn.tracing.trace import Trace, trace

VOCABULARY = 17
LENGTH = 6
BATCH = 2


@dataclass(frozen=True)
class Reference:
    """One layer: alpha (batch, head, query, key), shares T_i(x_j) (batch, query, key, out), and recorded tensors.

    `split_shares` and `split_bias` are the paper's approximation with f = SiLU, None for layers without it.
    """

    alpha: Tensor
    shares: Tensor
    bias: Tensor
    input: Tensor
    output: Tensor
    residual: Tensor
    split_shares: Tensor | None = None
    split_bias: Tensor | None = None


@dataclass(frozen=True)
class Host:
    """A host: its constructor, accessors of its layers and output projections, and its reference."""

    build: Callable[[], nn.Module]
    reference: Callable[[nn.Module, Tensor, Tensor], dict[str, Tensor]]
    mixer: Callable[[nn.Module], nn.Module]
    blocks: Callable[[nn.Module], list[nn.Module]] = lambda model: list(model.model.layers)
    projection: Callable[[nn.Module], nn.Module] = lambda mixer: mixer.out_proj
    positions: bool = False
    norm: Callable[[nn.Module], nn.Module] = lambda model: model.model.norm

    def model(self) -> nn.Module:
        """Build the model with random weights, in float64 and evaluation mode; the same inside of `promoted`."""
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            with torch._C.DisableTorchFunction():
                torch.manual_seed(0)
                return randomize(self.build().eval()).double()
        finally:
            torch.set_default_dtype(default)

    def mixers(self, model: nn.Module) -> list[nn.Module]:
        """Return the token-mixing modules in order."""
        return [self.mixer(block) for block in self.blocks(model)]


def inputs(padding: str = "none") -> dict[str, Tensor]:
    """Return ids, and for 'left' or 'right' a mask with two padding tokens in the second sequence."""
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(3))
    if padding == "none":
        return {"input_ids": ids}
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, : 2 if padding == "left" else LENGTH] = 0
    if padding == "right":
        mask[1, : LENGTH - 2] = 1
    return {"input_ids": ids, "attention_mask": mask}


def host_inputs(name: str, padding: str) -> dict[str, Tensor]:
    """Return the inputs with positions that count real tokens, for a direct call of the host."""
    arguments = inputs(padding)
    if HOSTS[name].positions:
        arguments["position_ids"] = (real_tokens(padding).long().cumsum(1) - 1).clamp_min(0)
    return arguments


def real_tokens(padding: str) -> Tensor:
    """Return the mask of real tokens, all ones without padding."""
    return inputs(padding).get("attention_mask", torch.ones(BATCH, LENGTH, dtype=torch.long)).bool()


def real_map(padding: str) -> Tensor:
    """Return the mask of pairs whose query and key are real, (batch, query, key)."""
    real = real_tokens(padding)
    return real[:, :, None] & real[:, None, :]


@cache
def traced(name: str, padding: str = "none") -> Trace:
    """Trace a host and build its operators, with float32 computations promoted to float64."""
    model = HOSTS[name].model()
    with promoted():
        host_trace = trace(model, inputs(padding))
        for layer in host_trace.layers:
            assert layer.operator.reconstruction_error() < 1e-10
    return host_trace


PART = 0.5
"""The residual multiplier of the host of `part_added`."""


@cache
def part_added() -> Trace:
    """Trace a host with a residual multiplier and biases (Granite)."""
    host = named("granite hybrid")
    model = host.model().double()
    assert model.config.residual_multiplier == PART
    with promoted():
        host_trace = trace(model, inputs())
        assert all(layer.operator.reconstruction_error() < 1e-10 for layer in host_trace.layers)
    assert host_trace.layers[0].operator.bias.abs().max() > 0.01
    return host_trace


@cache
def leaking() -> Trace:
    """Trace a host that lets padding on the left through to real tokens (RWKV-4)."""
    model = named("rwkv").model().double()
    with promoted(), pytest.warns(UserWarning, match="left padding reaches real tokens"):
        host_trace = trace(model, inputs("left"))
        padding = ~real_tokens("left")[:, None, :, None]
        assert (host_trace.layers[0].operator.contributions(range(LENGTH)) * padding).abs().max() > 0.1
    return host_trace


@cache
def references(name: str, padding: str = "none") -> tuple[Reference, ...]:
    """Return the reference of each layer, from tensors recorded by hooks on the host."""
    host = HOSTS[name]
    model = host.model()
    records: list[dict[str, Tensor]] = []
    hooks = []
    for block in host.blocks(model):
        record: dict[str, Tensor] = {}
        records.append(record)

        def residual(_: nn.Module, args: tuple, kwargs: dict, record: dict = record) -> None:
            record["residual"] = args[0] if args else kwargs["hidden_states"]

        def mixed(_: nn.Module, args: tuple, kwargs: dict, output, record: dict = record) -> None:
            record["input"] = args[0] if args else kwargs["hidden_states"]
            record["output"] = output[0] if isinstance(output, tuple) else output
            record["weights"] = output[1] if isinstance(output, tuple) else torch.empty(0)

        hooks.append(block.register_forward_pre_hook(residual, with_kwargs=True))
        hooks.append(host.mixer(block).register_forward_hook(mixed, with_kwargs=True))
    with torch.no_grad(), promoted():
        model(**host_inputs(name, padding))
        layers = []
        for mixer, record in zip(host.mixers(model), records, strict=True):
            weights = record.pop("weights")
            extra = {"weights": weights} if weights.numel() else {"mask": real_tokens(padding)}
            layers.append(Reference(**record, **host.reference(mixer, record["input"], *extra.values())))
    return tuple(layers)


IDS = dict(vocab_size=VOCABULARY, pad_token_id=None, bos_token_id=None, eos_token_id=None)

_TWO = dict(num_hidden_layers=2, **IDS)
_HYBRID = dict(hidden_size=8, intermediate_size=8, num_attention_heads=2, num_key_value_heads=1, **_TWO)


def _attention_or(reference: Callable[..., dict[str, Tensor]]) -> Callable[..., dict[str, Tensor]]:
    """Return the reference of a hybrid, whose attention layers have a value projection."""
    return lambda mixer, *given: (llama_reference if hasattr(mixer, "v_proj") else reference)(mixer, *given)


HOSTS = {
    "mamba": Host(
        causal_model("Mamba", hidden_size=6, state_size=3, residual_in_fp32=False, **_TWO),
        mamba_reference,
        mixer=lambda block: block.mixer,
        blocks=lambda model: list(model.backbone.layers),
        norm=lambda model: model.backbone.norm_f,
    ),
    "mamba2": Host(
        causal_model(
            "Mamba2",
            hidden_size=8,
            state_size=3,
            num_heads=4,
            head_dim=4,
            n_groups=2,
            chunk_size=4,
            residual_in_fp32=False,
            **_TWO,
        ),
        mamba2_reference,
        mixer=lambda block: block.mixer,
        blocks=lambda model: list(model.backbone.layers),
        norm=lambda model: model.backbone.norm_f,
    ),
    "s4d": Host(
        lambda: S4DForCausalLM(S4DConfig(vocab_size=VOCABULARY, d_model=6, n_layers=2, d_state=4)),
        s4d_reference,
        mixer=lambda block: block.mixer,
        blocks=lambda model: list(model.layers),
        projection=lambda mixer: mixer.output_linear[0],
        norm=lambda model: model.norm_f,
    ),
    "llama": Host(
        causal_model(
            "Llama",
            hidden_size=8,
            intermediate_size=8,
            num_attention_heads=4,
            num_key_value_heads=2,
            attn_implementation="eager",
            **_TWO,
        ),
        llama_reference,
        mixer=lambda block: block.self_attn,
        projection=lambda mixer: mixer.o_proj,
        positions=True,
    ),
    "gpt2": Host(
        transformers_model(
            "GPT2LMHeadModel",
            "GPT2Config",
            n_embd=8,
            n_layer=2,
            n_head=2,
            n_positions=16,
            attn_implementation="eager",
            **IDS,
        ),
        gpt2_reference,
        mixer=lambda block: block.attn,
        blocks=lambda model: list(model.transformer.h),
        projection=lambda mixer: mixer.c_proj,
        positions=True,
        norm=lambda model: model.transformer.ln_f,
    ),
    "delta rule": Host(
        causal_model(
            "Qwen3Next",
            head_dim=4,
            layer_types=["linear_attention", "linear_attention"],
            linear_key_head_dim=3,
            linear_value_head_dim=4,
            linear_num_key_heads=1,
            linear_num_value_heads=2,
            num_experts=0,
            use_cache=False,
            **_HYBRID,
        ),
        recurrence_reference(delta_rule, delta_map),
        mixer=lambda block: block.linear_attn,
    ),
    "hybrid": Host(
        causal_model(
            "Bamba",
            attn_layer_indices=[1],
            mamba_n_heads=4,
            mamba_d_head=4,
            mamba_n_groups=2,
            mamba_d_state=3,
            mamba_chunk_size=4,
            attn_implementation="eager",
            **_HYBRID,
        ),
        _attention_or(recurrence_reference(mamba2, lambda *given: mamba2_reference(*given)["alpha"])),
        mixer=lambda block: block.mamba if hasattr(block, "mamba") else block.self_attn,
        projection=lambda mixer: mixer.o_proj if hasattr(mixer, "o_proj") else mixer.out_proj,
        positions=True,
        norm=lambda model: model.model.final_layernorm,
    ),
}


def close(actual: Tensor, expected: Tensor) -> bool:
    """Whether two tensors agree to float64's rounding, relative to the largest expected entry."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype == torch.float64
    return bool((actual - expected).abs().max() <= 1e-10 * expected.abs().max())


CASES = [
    (name, padding)
    for name in HOSTS
    for padding in ("none", "left", "right")
    if padding != "right" or name not in ("delta rule", "hybrid")
]
"""Every host without padding and with padding on the left, and most with padding on the right."""

"""Tiny hosts in float64, and what their papers say about each layer: maps and vectors by plain loops over tokens.

Nothing here uses the library's operators: each reference reads the host's parameters and what its own hooks saw.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from unilinattn.models import S4DConfig, S4DForCausalLM
from unilinattn.testing.hosts import randomize
from unilinattn.testing.hosts.mamba import HOSTS as MAMBA_HOSTS
from unilinattn.testing.promote import promoted
from unilinattn.tracing.trace import Trace, trace

VOCABULARY = 17
LENGTH = 6
BATCH = 2


@dataclass(frozen=True)
class Reference:
    """One layer: alpha (batch, head, query, key), shares T_i(x_j) (batch, query, key, out), and what hooks saw.

    `split_shares` and `split_bias` are the paper's approximation with f = SiLU, None where nothing is split.
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
    """A host: how to build it, where its layers and their output projections are, and its reference."""

    build: Callable[[], nn.Module]
    blocks: Callable[[nn.Module], list[nn.Module]]
    mixer: Callable[[nn.Module], nn.Module]
    projection: Callable[[nn.Module], nn.Module]
    reference: Callable[[nn.Module, Tensor, Tensor], dict[str, Tensor]]
    positions: bool = False

    def model(self) -> nn.Module:
        """Build it with random weights, in float64 and evaluation mode."""
        torch.manual_seed(0)
        return randomize(self.build().eval()).double()

    def mixers(self, model: nn.Module) -> list[nn.Module]:
        """Return its token-mixing modules in order."""
        return [self.mixer(block) for block in self.blocks(model)]


def inputs(padding: str = "none") -> dict[str, Tensor]:
    """Return ids, and for 'left' or 'right' a mask that leaves two real tokens fewer in the second sequence."""
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(3))
    if padding == "none":
        return {"input_ids": ids}
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, : 2 if padding == "left" else LENGTH] = 0
    if padding == "right":
        mask[1, : LENGTH - 2] = 1
    return {"input_ids": ids, "attention_mask": mask}


def host_inputs(name: str, padding: str) -> dict[str, Tensor]:
    """Return the inputs with positions that count real tokens, for a run of the host by itself."""
    given = inputs(padding)
    if HOSTS[name].positions:
        given["position_ids"] = (real_tokens(padding).long().cumsum(1) - 1).clamp_min(0)
    return given


def real_tokens(padding: str) -> Tensor:
    """Return the mask of real tokens, all ones without padding."""
    return inputs(padding).get("attention_mask", torch.ones(BATCH, LENGTH, dtype=torch.long)).bool()


def real_map(padding: str) -> Tensor:
    """Return which pairs of query and key are real."""
    real = real_tokens(padding)
    return real[:, :, None] & real[:, None, :]


@cache
def traced(name: str, padding: str = "none") -> Trace:
    """Trace a host and build its operators; its own float32 places run in float64, as in everything here."""
    model = HOSTS[name].model()
    with promoted():
        found = trace(model, inputs(padding))
        for layer in found.layers:
            assert layer.operator.reconstruction_error() < 1e-10
    return found


PART = 0.5
"""Share of each layer's output that the host of `part_added` adds to its stream, by its configuration."""


@cache
def part_added() -> Trace:
    """Trace a host that adds a part of its layers' outputs to the stream, biases included (Granite)."""
    host = next(host for host in MAMBA_HOSTS if host.name == "granite hybrid")
    model = host.model().double()
    assert model.config.residual_multiplier == PART
    with promoted():
        found = trace(model, inputs())
        assert all(layer.operator.reconstruction_error() < 1e-10 for layer in found.layers)
    assert found.layers[0].operator.bias.abs().max() > 0.01
    return found


@cache
def references(name: str, padding: str = "none") -> tuple[Reference, ...]:
    """Return the reference of each layer, from a run of the host under hooks of our own."""
    host = HOSTS[name]
    model = host.model()
    seen: list[dict[str, Tensor]] = []
    hooks = []
    for block in host.blocks(model):
        record: dict[str, Tensor] = {}
        seen.append(record)

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
        found = []
        for mixer, record in zip(host.mixers(model), seen, strict=True):
            weights = record.pop("weights")
            extra = {"weights": weights} if weights.numel() else {"mask": real_tokens(padding)}
            found.append(Reference(**record, **host.reference(mixer, record["input"], *extra.values())))
    return tuple(found)


def recurrent_shares(
    alpha: Tensor, skip: Tensor, x: Tensor, kernel: Tensor, mask: Tensor, out: Callable[[int, Tensor], Tensor], f
) -> Tensor:
    """T_i(x_j) of a Mamba block: the taps that read x_j land at m, and token i reads m (LaTIM Eq. 19-22).

    alpha: (batch, channel, query, key); x: projected input (batch, token, channel); kernel: (channel, tap) by lag;
    f(m, tap) what the activation makes of a tap that landed at m; out(i, u): gate, norm and output projection.
    """
    length = x.shape[1]
    rows = []
    for i in range(length):
        row = []
        for j in range(length):
            total = torch.zeros_like(x[:, 0])
            for lag in range(kernel.shape[1]):
                m = j + lag
                if m > i:
                    break
                read = alpha[:, :, i, m] + (skip if m == i else 0)
                total = total + read * f(m, kernel[:, lag] * x[:, j]) * mask[:, m, None]
            row.append(out(i, total))
        rows.append(torch.stack(row, dim=1))
    return torch.stack(rows, dim=1)


def recurrent_bias(alpha: Tensor, skip: Tensor, levels: Tensor, mask: Tensor, out) -> Tensor:
    """What the convolution's bias, as the activation leaves it at each m, adds to each output."""
    length = alpha.shape[-1]
    rows = []
    for i in range(length):
        total = torch.zeros_like(levels[:, 0])
        for m in range(i + 1):
            total = total + (alpha[:, :, i, m] + (skip if m == i else 0)) * levels[:, m] * mask[:, m, None]
        rows.append(out(i, total))
    return torch.stack(rows, dim=1)


def convolved(x: Tensor, conv: nn.Conv1d, part: slice = slice(None)) -> tuple[Tensor, Tensor, Tensor]:
    """Return the causal convolution's output token by token, its kernel by lag, and its bias."""
    kernel, bias = conv.weight[part, 0].flip(-1), conv.bias[part]
    rows = []
    for i in range(x.shape[1]):
        total = bias.expand(x.shape[0], -1)
        for lag in range(min(kernel.shape[1], i + 1)):
            total = total + kernel[:, lag] * x[:, i - lag]
        rows.append(total)
    return torch.stack(rows, dim=1), kernel, bias


def recurrent(alpha: Tensor, core: Tensor, skip: Tensor, x, convolution, mask: Tensor, out) -> dict[str, Tensor]:
    """Assemble a Mamba block's reference, exact and with f = SiLU."""
    carried, kernel, bias = convolution
    slope = torch.sigmoid(carried)
    return {
        "alpha": core,
        "shares": recurrent_shares(alpha, skip, x, kernel, mask, out, lambda m, tap: slope[:, m] * tap),
        "bias": recurrent_bias(alpha, skip, slope * bias, mask, out),
        "split_shares": recurrent_shares(alpha, skip, x, kernel, mask, out, lambda m, tap: functional.silu(tap)),
        "split_bias": recurrent_bias(alpha, skip, functional.silu(bias).expand_as(slope), mask, out),
    }


def mamba_reference(mixer: nn.Module, x: Tensor, real: Tensor) -> dict[str, Tensor]:
    """S6: alpha_ij = C_i (prod_{k=j+1..i} exp(delta_k A)) delta_j B_j, a head a channel (HMA ACL Eq. 6-8, 14)."""
    mask = real.double()
    carried, gate = (mixer.in_proj(x * mask[..., None])).chunk(2, dim=-1)
    convolution = convolved(carried, mixer.conv1d)
    u = functional.silu(convolution[0]) * mask[..., None]
    step, key, query = mixer.x_proj(u).split([mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size], dim=-1)
    delta = functional.softplus(mixer.dt_proj(step))
    rate = -torch.exp(mixer.A_log)
    batch, length, channels = delta.shape
    alpha = torch.zeros(batch, channels, length, length, dtype=x.dtype)
    for i in range(length):
        for j in range(i + 1):
            decay = torch.ones(batch, channels, key.shape[-1], dtype=x.dtype)
            for k in range(j + 1, i + 1):
                decay = decay * torch.exp(delta[:, k, :, None] * rate)
            written = delta[:, j, :, None] * key[:, j, None, :]
            alpha[:, :, i, j] = (query[:, i, None, :] * decay * written).sum(-1)

    def out(i: int, v: Tensor) -> Tensor:
        return (functional.silu(gate[:, i]) * v) @ mixer.out_proj.weight.T

    return recurrent(alpha, alpha, mixer.D, carried, convolution, mask, out)


def mamba2_reference(mixer: nn.Module, x: Tensor, real: Tensor) -> dict[str, Tensor]:
    """SSD: alpha_ij = (C_i . B_j) exp(sum_{j < k <= i} delta_k A) delta_j a head, B and C a group (LaTIM Eq. 13-14)."""
    mask = real.double()
    inner, heads, groups = mixer.intermediate_size, mixer.num_heads, mixer.n_groups
    gate, xbc, step = mixer.in_proj(x * mask[..., None]).split([inner, mixer.conv_dim, heads], dim=-1)
    every = convolved(xbc, mixer.conv1d)
    key, query = (functional.silu(every[0]) * mask[..., None])[..., inner:].chunk(2, dim=-1)
    delta = functional.softplus(step + mixer.dt_bias).clamp(*mixer.time_step_limit)
    rate = -torch.exp(mixer.A_log)
    batch, length, state = x.shape[0], x.shape[1], mixer.ssm_state_size
    alpha = torch.zeros(batch, heads, length, length, dtype=x.dtype)
    for h in range(heads):
        own = slice((h * groups // heads) * state, (h * groups // heads + 1) * state)
        for i in range(length):
            for j in range(i + 1):
                decay = torch.exp(rate[h] * delta[:, j + 1 : i + 1, h].sum(1))
                alpha[:, h, i, j] = (query[:, i, own] * key[:, j, own]).sum(-1) * decay * delta[:, j, h]
    wide = alpha.repeat_interleave(inner // heads, dim=1)
    skip = mixer.D.repeat_interleave(inner // heads)
    convolution = convolved(xbc[..., :inner], mixer.conv1d, slice(inner))
    u = functional.silu(convolution[0]) * mask[..., None]
    mixed = torch.einsum("beij,bje->bie", wide, u) + skip * u
    gated = (functional.silu(gate) * mixed).unflatten(2, (groups, -1))
    scale = torch.rsqrt(gated.pow(2).mean(-1, keepdim=True) + mixer.norm.variance_epsilon).expand_as(gated).flatten(2)

    def out(i: int, v: Tensor) -> Tensor:
        return (mixer.norm.weight * scale[:, i] * functional.silu(gate[:, i]) * v) @ mixer.out_proj.weight.T

    return recurrent(wide, alpha, skip, xbc[..., :inner], convolution, mask, out)


def s4d_reference(mixer: nn.Module, x: Tensor, real: Tensor) -> dict[str, Tensor]:
    """S4D: alpha_ij = K[i - j], then GELU and a gated projection, their slopes and gate frozen."""
    length = x.shape[1]
    kernel = mixer.kernel(length)
    alpha = torch.zeros(x.shape[0], x.shape[2], length, length, dtype=x.dtype)
    for i in range(length):
        for j in range(i + 1):
            alpha[:, :, i, j] = kernel[:, i - j]
    mixed = torch.einsum("beij,bje->bie", alpha, x) + mixer.D * x
    slope = 0.5 * (1 + torch.erf(mixed / 2**0.5))
    weight, bias = mixer.output_linear[0].weight.squeeze(-1), mixer.output_linear[0].bias
    carry, other = weight.chunk(2)
    gate = torch.sigmoid(functional.gelu(mixed) @ other.T + bias.chunk(2)[1])
    shares = torch.zeros(x.shape[0], length, length, x.shape[2], dtype=x.dtype)
    for i in range(length):
        for j in range(length):
            read = alpha[:, :, i, j] + (mixer.D if i == j else 0)
            shares[:, i, j] = gate[:, i] * ((slope[:, i] * read * x[:, j]) @ carry.T)
    return {"alpha": alpha, "shares": shares, "bias": gate * bias.chunk(2)[0]}


def attention_shares(alpha: Tensor, x: Tensor, into: Tensor, out: Tensor) -> Tensor:
    """T_i(x_j) = sum_h W_o^h alpha^h_ij W_v^h x_j (LaTIM Eq. 4, without the residual)."""
    heads, length = alpha.shape[1], x.shape[1]
    width = out.shape[1] // heads
    shares = torch.zeros(*alpha.shape[:1], length, length, out.shape[0], dtype=x.dtype)
    for h in range(heads):
        kv = h * into.shape[0] // (heads * width)
        path = out[:, h * width : (h + 1) * width] @ into[kv * width : (kv + 1) * width]
        for i in range(length):
            for j in range(length):
                shares[:, i, j] += alpha[:, h, i, j, None] * (x[:, j] @ path.T)
    return shares


def llama_reference(mixer: nn.Module, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Softmax attention with grouped values; all projections without bias."""
    shares = attention_shares(weights, x, mixer.v_proj.weight, mixer.o_proj.weight)
    return {"alpha": weights, "shares": shares, "bias": torch.zeros_like(x)}


def gpt2_reference(mixer: nn.Module, x: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Softmax attention with one matrix for queries, keys and values; its value bias goes through W_o."""
    into, offset = mixer.c_attn.weight.T[-x.shape[2] :], mixer.c_attn.bias[-x.shape[2] :]
    out = mixer.c_proj.weight.T
    bias = weights.sum(-1).repeat_interleave(x.shape[2] // weights.shape[1], dim=1).transpose(1, 2) * offset
    return {
        "alpha": weights,
        "shares": attention_shares(weights, x, into, out),
        "bias": bias @ out.T + mixer.c_proj.bias,
    }


IDS = dict(vocab_size=VOCABULARY, pad_token_id=None, bos_token_id=None, eos_token_id=None)

HOSTS = {
    "mamba": Host(
        lambda: transformers.MambaForCausalLM(
            transformers.MambaConfig(hidden_size=6, state_size=3, num_hidden_layers=2, residual_in_fp32=False, **IDS)
        ),
        blocks=lambda model: list(model.backbone.layers),
        mixer=lambda block: block.mixer,
        projection=lambda mixer: mixer.out_proj,
        reference=mamba_reference,
    ),
    "mamba2": Host(
        lambda: transformers.Mamba2ForCausalLM(
            transformers.Mamba2Config(
                hidden_size=8,
                state_size=3,
                num_hidden_layers=2,
                num_heads=4,
                head_dim=4,
                n_groups=2,
                chunk_size=4,
                residual_in_fp32=False,
                **IDS,
            )
        ),
        blocks=lambda model: list(model.backbone.layers),
        mixer=lambda block: block.mixer,
        projection=lambda mixer: mixer.out_proj,
        reference=mamba2_reference,
    ),
    "s4d": Host(
        lambda: S4DForCausalLM(S4DConfig(vocab_size=VOCABULARY, d_model=6, n_layers=2, d_state=4)),
        blocks=lambda model: list(model.layers),
        mixer=lambda block: block.mixer,
        projection=lambda mixer: mixer.output_linear[0],
        reference=s4d_reference,
    ),
    "llama": Host(
        lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                hidden_size=8,
                intermediate_size=8,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                attn_implementation="eager",
                **IDS,
            )
        ),
        blocks=lambda model: list(model.model.layers),
        mixer=lambda block: block.self_attn,
        projection=lambda mixer: mixer.o_proj,
        reference=llama_reference,
        positions=True,
    ),
    "gpt2": Host(
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=8, n_layer=2, n_head=2, n_positions=16, attn_implementation="eager", **IDS)
        ),
        blocks=lambda model: list(model.transformer.h),
        mixer=lambda block: block.attn,
        projection=lambda mixer: mixer.c_proj,
        reference=gpt2_reference,
        positions=True,
    ),
}


def close(got: Tensor, expected: Tensor) -> bool:
    """Whether two tensors of one shape agree to float64's rounding, relative to the largest expected number."""
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype == torch.float64
    return bool((got - expected).abs().max() <= 1e-10 * expected.abs().max())


CASES = [(name, padding) for name in HOSTS for padding in ("none", "left", "right")]
"""Every host with and without padding."""

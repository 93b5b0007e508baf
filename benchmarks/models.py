"""The layers of the benchmarks: sizes of published 130m models, random weights."""

from dataclasses import dataclass
from functools import cache, lru_cache

import torch
import transformers
from torch import Tensor, nn

from unilinattn.call import Call
from unilinattn.host.substitution import build_flow
from unilinattn.mixers import DeltaRule
from unilinattn.models.s4 import S4DConfig, S4DForCausalLM
from unilinattn.operator.operator import MixerOperator
from unilinattn.operator.stages import Mix
from unilinattn.registry import architecture_of
from unilinattn.tracing.trace import Trace, trace

VOCABULARY = 64
IDS = dict(vocab_size=VOCABULARY, pad_token_id=None, bos_token_id=None, eos_token_id=None)


LONGEST_HELD = 8192
"""Largest number of tokens at which two operators are held at a time."""


@dataclass(frozen=True)
class Sizes:
    """Widths of the layers: of the residual stream, of states, and numbers of heads."""

    width: int = 768
    state: int = 16
    mamba2_heads: int = 24
    mamba2_state: int = 128
    softmax_heads: int = 12
    delta_heads: int = 16
    delta_state: int = 64

    @property
    def inner(self) -> int:
        """Channels of a Mamba layer's core."""
        return 2 * self.width


PUBLISHED = Sizes()
"""The sizes of published 130m models."""

NARROW = Sizes(32, 16, 4, 16, 4, 4, 16)
"""Narrow enough to compute every definition pair by pair, in float64."""


@cache
def build(kind: str, sizes: Sizes = PUBLISHED, device: str = "cpu", layers: int = 1) -> nn.Module:
    """Build a language model: "mamba", "mamba2", "softmax" or "s4d"."""
    torch.manual_seed(0)
    common = dict(hidden_size=sizes.width, num_hidden_layers=layers)
    if kind == "mamba":
        config = transformers.MambaConfig(state_size=sizes.state, **common, **IDS)
        model: nn.Module = transformers.MambaForCausalLM(config)
    elif kind == "mamba2":
        heads = dict(num_heads=sizes.mamba2_heads, head_dim=sizes.inner // sizes.mamba2_heads, n_groups=1)
        config = transformers.Mamba2Config(state_size=sizes.mamba2_state, chunk_size=256, **heads, **common, **IDS)
        model = transformers.Mamba2ForCausalLM(config)
    elif kind == "softmax":
        shape = dict(n_embd=sizes.width, n_head=sizes.softmax_heads, n_layer=layers, n_positions=4096)
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **IDS))
    else:
        model = S4DForCausalLM(S4DConfig(VOCABULARY, sizes.width, layers))
    return model.to(device).eval()


def tokens(length: int, device: str = "cpu") -> Tensor:
    """Draw token ids, (1, length)."""
    return torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(length)).to(device)


@lru_cache(maxsize=1)
def traced(kind: str, length: int, sizes: Sizes = PUBLISHED, device: str = "cpu", layers: int = 1) -> Trace:
    """Trace a language model on random tokens."""
    with torch.no_grad():
        return trace(build(kind, sizes, device, layers), tokens(length, device))


def mixer_of(kind: str, sizes: Sizes = PUBLISHED, device: str = "cpu") -> nn.Module:
    """Return the token-mixing module of a Mamba model."""
    return build(kind, sizes, device).backbone.layers[0].mixer


@lru_cache(maxsize=1)
def hidden(length: int, sizes: Sizes = PUBLISHED, device: str = "cpu") -> Tensor:
    """Draw a mixer's input, (1, length, width)."""
    return torch.randn(1, length, sizes.width, generator=torch.Generator().manual_seed(length)).to(device)


def frozen(mixer: nn.Module, x: Tensor, output: Tensor | None = None) -> MixerOperator:
    """Build the operator of a Mamba mixer on its input, as a layer of a trace does.

    `output`: the output of the mixer, as a trace stores it; by default the output of the operator.
    """
    architecture = architecture_of(type(mixer))
    assert architecture is not None
    with torch.no_grad():
        flow = build_flow(architecture, Call(mixer, "mixer", {"hidden_states": x}, x))
        return MixerOperator(
            flow.chains, inputs=flow.inputs, output=flow.value if output is None else output, name="mixer"
        )


def delta_rule(length: int, sizes: Sizes = PUBLISHED, device: str = "cpu") -> MixerOperator:
    """Build the operator of a gated delta rule with random factors, without projections or gates."""
    generator = torch.Generator().manual_seed(length)
    heads, state = sizes.delta_heads, sizes.delta_state
    query, key = (torch.randn(1, length, heads, state, generator=generator) for _ in range(2))
    query, key = (torch.nn.functional.normalize(t, dim=-1).to(device) for t in (query, key))
    strength, decay = (torch.rand(1, length, heads, generator=generator).to(device) for _ in range(2))
    mixer = DeltaRule(query, key, strength, -0.1 * decay)
    x = torch.randn(1, length, heads, generator=generator).to(device)
    output = mixer.apply(x.unsqueeze(-1)).squeeze(-1)
    return MixerOperator({"x": (Mix("core", mixer),)}, inputs={"x": x}, output=output, name="delta rule")

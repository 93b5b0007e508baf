"""Tiny real host models with random weights, one entry per configuration, to test adapters on."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from unilinattn.models import S4DConfig, S4DForCausalLM

VOCABULARY = 31
"""Vocabulary size of every language model in the table."""

IDS = dict(vocab_size=VOCABULARY, pad_token_id=None, bos_token_id=None, eos_token_id=None)
"""Settings of a language model without special tokens."""


@dataclass(frozen=True)
class Host:
    """A configuration of a real host model, built with random weights.

    Attributes:
        name: unique in the table, the configuration in words.
        architecture: the adapter that covers its mixers.
        build: builds the model, in float32 and evaluation mode; `randomize` then draws its weights.
        layers: number of token-mixing calls in one run.
        length: number of tokens, or of patches and the tokens that the model adds to them.
        batch: number of sequences.
        image: (channels, height, width) of a model that reads pixels instead of ids.
        masks: sides on which the model itself keeps padding out of the real tokens; None if it takes no mask.
    """

    name: str
    architecture: str
    build: Callable[[], nn.Module]
    layers: int = 2
    length: int = 13
    batch: int = 2
    image: tuple[int, int, int] | None = None
    masks: tuple[str, ...] | None = ("left", "right")

    def model(self, seed: int = 0) -> nn.Module:
        """Build the model with weights that depend only on the seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return randomize(self.build().eval(), seed)

    def inputs(self, seed: int = 0) -> Int[Tensor, "batch length"] | Float[Tensor, "batch channel height width"]:
        """Draw token ids, or pixels."""
        generator = torch.Generator().manual_seed(seed)
        if self.image is not None:
            return torch.randn(self.batch, *self.image, generator=generator, device="cpu")
        return torch.randint(VOCABULARY, (self.batch, self.length), generator=generator, device="cpu")


def family(
    architecture: str, build: Callable[..., Callable[[], nn.Module]], *names: str, **defaults: Any
) -> Callable[..., Host]:
    """Return a function that makes hosts of one adapter: from a name, settings of the model, and fields of `Host`.

    `build(*names, **settings)` returns the builder of a model. `defaults` are fields and settings, which those of a
    host replace.
    """
    default_fields = {field.name: defaults.pop(field.name) for field in fields(Host) if field.name in defaults}

    def make(name: str, settings: Mapping[str, Any] | None = None, **others: Any) -> Host:
        return Host(
            name, architecture, build(*names, **{**defaults, **(settings or {})}), **{**default_fields, **others}
        )

    return make


def transformers_model(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    """Return a builder of a transformers model, given the names of its class and of its configuration class."""

    def build() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**settings))

    return build


def causal_model(name: str, **settings: Any) -> Callable[[], nn.Module]:
    """Return a builder of a transformers language model, given the common name of its class and configuration."""
    return plain_experts(transformers_model(f"{name}ForCausalLM", f"{name}Config", **{**IDS, **settings}))


def plain_experts(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a builder of a model whose experts, if any, run in turn; the grouped product has no float64."""

    def built() -> nn.Module:
        model: Any = build()
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")
        return model

    return built


def _s4d_model(**settings: Any) -> Callable[[], nn.Module]:
    return lambda: S4DForCausalLM(S4DConfig(**{"vocab_size": VOCABULARY, "d_model": 12, "n_layers": 2, **settings}))


_ATTENTION = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=40, **IDS)
_WIDTH = dict(**_ATTENTION, intermediate_size=12)
_SLIDING = dict(num_key_value_heads=1, head_dim=6, sliding_window=4)
_GEMMA = dict(**_WIDTH, **_SLIDING, layer_types=["sliding_attention", "full_attention"])

_mamba = family("mamba", causal_model, "Mamba", hidden_size=12, state_size=5, num_hidden_layers=2)
_mamba2 = family(
    "mamba2",
    causal_model,
    "Mamba2",
    **dict(hidden_size=16, state_size=6, num_hidden_layers=2, num_heads=4, head_dim=8, n_groups=2, chunk_size=8),
)
_s4d = family("s4d", _s4d_model)
_gpt_neox = family("attention", causal_model, "GPTNeoX", **_WIDTH)
_llama = family("attention", causal_model, "Llama", **_WIDTH, num_key_value_heads=2)
_opt = family("attention", causal_model, "OPT", **_ATTENTION, ffn_dim=12, word_embed_proj_dim=16)
_gpt2 = family("attention", transformers_model, "GPT2LMHeadModel", "GPT2Config", **IDS)
_gemma2 = family("attention", causal_model, "Gemma2", **_GEMMA)
_gemma3 = family("attention", transformers_model, "Gemma3ForCausalLM", "Gemma3TextConfig", **_GEMMA)
_bert = family("bert", transformers_model, "BertForMaskedLM", "BertConfig", **_WIDTH)
_t5 = family("attention", transformers_model, "T5EncoderModel", "T5Config", **IDS)
_vit = family(
    "attention", transformers_model, "ViTForImageClassification", "ViTConfig", **_WIDTH, image=(3, 8, 8), masks=None
)

HOSTS: tuple[Host, ...] = (
    _mamba("mamba"),
    # transformers >= 5.17 masks before the projection, whose bias the convolution then reads at left padding.
    _mamba("mamba, biases", dict(use_bias=True), length=7, masks=("right",)),
    _mamba("mamba, no conv bias", dict(use_conv_bias=False), length=17, batch=3),
    _mamba("mamba, one token", length=1),
    _mamba("mamba, chunk and one", dict(hidden_size=6, conv_kernel=3, expand=1, time_step_rank=3), length=65, batch=1),
    _mamba("mamba, gelu, wide kernel", dict(hidden_act="gelu", conv_kernel=7, state_size=1), length=5),
    _mamba2("mamba2"),
    _mamba2("mamba2, biases", dict(use_bias=True), length=9, masks=("right",)),
    _mamba2("mamba2, no conv bias, one group", dict(use_conv_bias=False, n_groups=1), length=19, batch=1),
    _mamba2("mamba2, a group a head", dict(n_groups=4, chunk_size=5), length=11),
    _mamba2("mamba2, eight heads", dict(hidden_size=8, num_heads=8, head_dim=2, chunk_size=64), length=67, batch=1),
    _mamba2("mamba2, limited steps", dict(time_step_limit=(0.3, 0.9), chunk_size=3), length=10),
    _mamba2("mamba2, one token", length=1),
    _s4d("s4d"),
    _s4d("s4d, long kernel", dict(d_model=6, d_state=8), length=65, batch=1),
    _s4d("s4d, two poles, slow", dict(d_state=2, dt_min=1e-4, dt_max=1e-3), length=33, batch=3),
    _s4d("s4d, one token", length=1),
    _gpt2("gpt2", dict(n_embd=16, n_layer=2, n_head=4, n_positions=40)),
    _gpt_neox("gpt neox, parallel", length=9),
    _gpt_neox("gpt neox, in sequence, no biases", dict(use_parallel_residual=False, attention_bias=False)),
    _llama("llama, grouped queries"),
    _llama("llama, one value head, biases", dict(num_key_value_heads=1, attention_bias=True), batch=1),
    _llama("llama, wide heads, one token", dict(head_dim=6), length=1),
    _opt("opt"),
    _opt("opt, no biases, post-norm", dict(enable_bias=False, do_layer_norm_before=False), length=7),
    # Older versions ignore the soft caps with attention functions other than the eager one.
    _gemma2("gemma 2, sliding window, soft caps", dict(attn_implementation="eager")),
    _gemma3("gemma 3, sliding window", batch=1),
    _bert("bert", length=11),
    _t5("t5, encoder", dict(d_model=16, d_kv=6, d_ff=12, num_layers=2, num_heads=4)),
    _vit("vit", dict(image_size=8, patch_size=4), length=5),
)
"""All configurations; a new host is a new entry."""


def host(name: str) -> Host:
    """Return the configuration `name`."""
    return next(entry for entry in HOSTS if entry.name == name)


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Draw every parameter anew, so that no value of zero, one or a constant hides a mistake.

    Matrices keep the variance of their input, factors of norms lie in [0.5, 1.5], biases in [-0.5, 0.5], steps in
    [0.05, 1.05], decay rates in [-4.1, -0.1], skips away from zero. Returns the model.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            uniform = torch.rand(parameter.shape, generator=generator, device="cpu")
            rule = next((rule for pattern, rule in _RULES if re.search(pattern, name)), None)
            if rule is not None:
                parameter.copy_(rule(parameter, uniform))
            elif parameter.ndim < 2:
                centred = uniform - 0.5
                parameter.copy_(0.5 + uniform if name.endswith("weight") else centred + 0.3 * centred.sign())
            else:
                looked_up = "embed" in name or name.endswith("kernel.C")
                fan_in = 1 if looked_up else parameter.shape[1:].numel()
                parameter.copy_(torch.randn(parameter.shape, generator=generator, device="cpu") / fan_in**0.5)
    return model


_RULES: tuple[tuple[str, Callable[[Tensor, Tensor], Tensor]], ...] = (
    # softplus of these is the step.
    (r"(dt_bias|dt_proj\.bias)$", lambda old, uniform: torch.log(torch.expm1(0.05 + uniform))),
    (r"A_log$", lambda old, uniform: torch.log(0.1 + 4 * uniform)),
    # State spaces with fixed steps keep their own draws between the configuration's dt_min and dt_max.
    (r"(log_dt|inv_dt|log_step)$", lambda old, uniform: old),
    (r"(log_A_real|A_imag|Lambda_im)$", lambda old, uniform: old + uniform - 0.5),
    # S5 stores the real parts of its poles without a transform, so they must stay negative.
    (r"Lambda_re$", lambda old, uniform: old * (0.5 + uniform)),
    # RWKV-4 and RG-LRU keep their own decays, spread over the channels from fast to nearly none.
    (r"(time_decay|recurrent_param)$", lambda old, uniform: old + 0.1 * uniform),
    (r"time_mix_\w+$", lambda old, uniform: uniform),
    (r"bias$", lambda old, uniform: uniform - 0.5),
)

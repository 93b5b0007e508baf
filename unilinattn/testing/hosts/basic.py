"""Tiny real host models with random weights, one entry per configuration, to test adapters on."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from unilinattn.models import S4DConfig, S4DForCausalLM

VOCABULARY = 31
"""Vocabulary size of every language model in the table."""

_IDS = dict(vocab_size=VOCABULARY, pad_token_id=None, bos_token_id=None, eos_token_id=None)
_MAMBA = dict(hidden_size=12, state_size=5, num_hidden_layers=2, **_IDS)
_MAMBA2 = dict(
    hidden_size=16, state_size=6, num_hidden_layers=2, num_heads=4, head_dim=8, n_groups=2, chunk_size=8, **_IDS
)

_ATTENTION = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=40, **_IDS)


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
            return torch.randn(self.batch, *self.image, generator=generator)
        return torch.randint(VOCABULARY, (self.batch, self.length), generator=generator)


def transformers_model(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    """Return a builder of a transformers model, given the names of its class and of its configuration class."""

    def build() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**settings))

    return build


def _mamba(**settings: Any) -> Callable[[], nn.Module]:
    return transformers_model("MambaForCausalLM", "MambaConfig", **{**_MAMBA, **settings})


def _mamba2(**settings: Any) -> Callable[[], nn.Module]:
    return transformers_model("Mamba2ForCausalLM", "Mamba2Config", **{**_MAMBA2, **settings})


def _s4d(**settings: Any) -> Callable[[], nn.Module]:
    return lambda: S4DForCausalLM(S4DConfig(**{"vocab_size": VOCABULARY, "d_model": 12, "n_layers": 2, **settings}))


def _llama(**settings: Any) -> Callable[[], nn.Module]:
    defaults = dict(intermediate_size=12, num_key_value_heads=2)
    return transformers_model("LlamaForCausalLM", "LlamaConfig", **{**_ATTENTION, **defaults, **settings})


def _gpt_neox(**settings: Any) -> Callable[[], nn.Module]:
    return transformers_model(
        "GPTNeoXForCausalLM", "GPTNeoXConfig", **{**_ATTENTION, "intermediate_size": 12, **settings}
    )


def _opt(**settings: Any) -> Callable[[], nn.Module]:
    defaults = dict(ffn_dim=12, word_embed_proj_dim=16)
    return transformers_model("OPTForCausalLM", "OPTConfig", **{**_ATTENTION, **defaults, **settings})


def _gemma(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    defaults = dict(intermediate_size=12, num_key_value_heads=1, head_dim=6, sliding_window=4)
    layers = dict(layer_types=["sliding_attention", "full_attention"])
    return transformers_model(model, config, **{**_ATTENTION, **defaults, **layers, **settings})


HOSTS: tuple[Host, ...] = (
    Host("mamba", "mamba", _mamba()),
    # transformers >= 5.17 masks before the projection, whose bias the convolution then reads at left padding.
    Host("mamba, biases", "mamba", _mamba(use_bias=True), length=7, masks=("right",)),
    Host("mamba, no conv bias", "mamba", _mamba(use_conv_bias=False), length=17, batch=3),
    Host("mamba, one token", "mamba", _mamba(), length=1),
    Host(
        "mamba, chunk and one",
        "mamba",
        _mamba(hidden_size=6, conv_kernel=3, expand=1, time_step_rank=3),
        length=65,
        batch=1,
    ),
    Host("mamba, gelu, wide kernel", "mamba", _mamba(hidden_act="gelu", conv_kernel=7, state_size=1), length=5),
    Host("mamba2", "mamba2", _mamba2()),
    Host("mamba2, biases", "mamba2", _mamba2(use_bias=True), length=9, masks=("right",)),
    Host("mamba2, no conv bias, one group", "mamba2", _mamba2(use_conv_bias=False, n_groups=1), length=19, batch=1),
    Host("mamba2, a group a head", "mamba2", _mamba2(n_groups=4, chunk_size=5), length=11),
    Host(
        "mamba2, eight heads",
        "mamba2",
        _mamba2(hidden_size=8, num_heads=8, head_dim=2, chunk_size=64),
        length=67,
        batch=1,
    ),
    Host("mamba2, limited steps", "mamba2", _mamba2(time_step_limit=(0.3, 0.9), chunk_size=3), length=10),
    Host("mamba2, one token", "mamba2", _mamba2(), length=1),
    Host("s4d", "s4d", _s4d()),
    Host("s4d, long kernel", "s4d", _s4d(d_model=6, d_state=8), length=65, batch=1),
    Host("s4d, two poles, slow", "s4d", _s4d(d_state=2, dt_min=1e-4, dt_max=1e-3), length=33, batch=3),
    Host("s4d, one token", "s4d", _s4d(), length=1),
    Host(
        "gpt2",
        "attention",
        transformers_model("GPT2LMHeadModel", "GPT2Config", n_embd=16, n_layer=2, n_head=4, n_positions=40, **_IDS),
    ),
    Host("gpt neox, parallel", "attention", _gpt_neox(), length=9),
    Host("gpt neox, in sequence, no biases", "attention", _gpt_neox(use_parallel_residual=False, attention_bias=False)),
    Host("llama, grouped queries", "attention", _llama()),
    Host("llama, one value head, biases", "attention", _llama(num_key_value_heads=1, attention_bias=True), batch=1),
    Host("llama, wide heads, one token", "attention", _llama(head_dim=6), length=1),
    Host("opt", "attention", _opt()),
    Host("opt, no biases, post-norm", "attention", _opt(enable_bias=False, do_layer_norm_before=False), length=7),
    # Older versions ignore the soft caps with attention functions other than the eager one.
    Host(
        "gemma 2, sliding window, soft caps",
        "attention",
        _gemma("Gemma2ForCausalLM", "Gemma2Config", attn_implementation="eager"),
    ),
    Host("gemma 3, sliding window", "attention", _gemma("Gemma3ForCausalLM", "Gemma3TextConfig"), batch=1),
    Host(
        "bert",
        "bert",
        transformers_model("BertForMaskedLM", "BertConfig", **{**_ATTENTION, "intermediate_size": 12}),
        length=11,
    ),
    Host(
        "t5, encoder",
        "attention",
        transformers_model(
            "T5EncoderModel", "T5Config", d_model=16, d_kv=6, d_ff=12, num_layers=2, num_heads=4, **_IDS
        ),
    ),
    Host(
        "vit",
        "attention",
        transformers_model(
            "ViTForImageClassification",
            "ViTConfig",
            **{**_ATTENTION, "intermediate_size": 12, "image_size": 8, "patch_size": 4},
        ),
        length=5,
        image=(3, 8, 8),
        masks=None,
    ),
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
            uniform = torch.rand(parameter.shape, generator=generator)
            rule = next((rule for pattern, rule in _RULES if re.search(pattern, name)), None)
            if rule is not None:
                parameter.copy_(rule(parameter, uniform))
            elif parameter.ndim == 1:
                centred = uniform - 0.5
                parameter.copy_(0.5 + uniform if name.endswith("weight") else centred + 0.3 * centred.sign())
            else:
                looked_up = "embed" in name or name.endswith("kernel.C")
                fan_in = 1 if looked_up else parameter[0].numel()
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / fan_in**0.5)
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

"""Real tiny hosts of which some methods are refused, and the calls that refusals recommend."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    Blip2Config,
    Blip2ForConditionalGeneration,
    BloomConfig,
    BloomForCausalLM,
    BloomModel,
    DogeConfig,
    DogeForCausalLM,
    DogeModel,
    FNetConfig,
    FNetForSequenceClassification,
    HieraConfig,
    HieraForImageClassification,
    LevitConfig,
    LevitForImageClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
)

from unilinattn.registry import list_methods
from unilinattn.testing.hosts import host, randomize

LENGTH = 6
TEXT = dict(
    vocab_size=23, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0
)
SIGHT = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=8)


def ids(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(1, 20, (1, length), generator=torch.Generator().manual_seed(0))


def pixels() -> torch.Tensor:
    return torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Odd(nn.Module):
    """Code between the layers that the frozen run has no rule for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.special.bessel_j0(x)


def t5() -> tuple[nn.Module, Any]:
    config = T5Config(vocab_size=23, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2)
    return T5ForConditionalGeneration(config), {"input_ids": ids(), "decoder_input_ids": ids(4)}


def bart() -> tuple[nn.Module, Any]:
    sizes = {
        f"{side}_{name}": n
        for side in ("encoder", "decoder")
        for name, n in dict(layers=2, attention_heads=2, ffn_dim=24).items()
    }
    config = BartConfig(vocab_size=23, d_model=16, max_position_embeddings=16, pad_token_id=0, **sizes)
    return BartForConditionalGeneration(config), {"input_ids": ids(), "decoder_input_ids": ids()}


def llava() -> tuple[nn.Module, Any]:
    config = LlavaConfig(
        vision_config={"model_type": "clip_vision_model", "patch_size": 4, "projection_dim": 16, **SIGHT},
        text_config={"model_type": "llama", **TEXT},
        image_token_index=22,
        vision_feature_layer=-1,
    )
    tokens = torch.cat([torch.full((1, 4), 22), ids(3)], 1)
    return LlavaForConditionalGeneration(config), {"input_ids": tokens, "pixel_values": pixels()}


def blip2() -> tuple[nn.Module, Any]:
    config = Blip2Config(
        vision_config={"patch_size": 4, **SIGHT},
        qformer_config={**TEXT, "encoder_hidden_size": 16, "cross_attention_frequency": 1},
        text_config={"model_type": "opt", "ffn_dim": 24, "word_embed_proj_dim": 16, **TEXT},
        num_query_tokens=3,
        image_token_index=22,
    )
    tokens = torch.cat([torch.full((1, 3), 22), ids(3)], 1)
    return Blip2ForConditionalGeneration(config), {"input_ids": tokens, "pixel_values": pixels()}


def prompted() -> tuple[nn.Module, Any]:
    peft = pytest.importorskip("peft")
    settings = peft.PromptTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=3, token_dim=16, num_layers=2, num_attention_heads=2
    )
    return peft.get_peft_model(LlamaForCausalLM(LlamaConfig(**TEXT)), settings), ids()


def _scaled(model: nn.Module) -> nn.Module:
    """Multiply the stream by factors of each channel in its sums with the layers."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_residual"):
                parameter.copy_(torch.linspace(0.5, 1.5, len(parameter)))
    return model


def doge() -> tuple[nn.Module, Any]:
    return _scaled(DogeForCausalLM(DogeConfig(**TEXT, num_key_value_heads=2))), ids()


def doge_states() -> tuple[nn.Module, Any]:
    return _scaled(DogeModel(DogeConfig(**TEXT, num_key_value_heads=2))), ids()


def bloom(kind: type[nn.Module]) -> tuple[nn.Module, Any]:
    # Its attention reads the stream that it adds to its output beside the normed one.
    return randomize(kind(BloomConfig(vocab_size=23, hidden_size=16, n_layer=2, n_head=2))), ids()


def odd() -> tuple[nn.Module, Any]:
    model = LlamaForCausalLM(LlamaConfig(**TEXT))
    model.model.layers[1].post_attention_layernorm = Odd()
    return model, ids()


def vit() -> tuple[nn.Module, Any]:
    return ViTModel(ViTConfig(patch_size=4, **SIGHT)), {"pixel_values": pixels()}


def of_table(name: str) -> Callable[[], tuple[nn.Module, Any]]:
    return lambda: (host(name).model(), host(name).inputs()[:1, :LENGTH])


def hiera() -> tuple[nn.Module, Any]:
    """Four grids of patches, of which the last ones begin with a pool of projected patches."""
    config = HieraConfig(embed_dim=8, image_size=[64, 64], depths=[2, 1, 1, 1], num_heads=[1, 1, 2, 2])
    image = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    return randomize(HieraForImageClassification(config)), image


def levit() -> tuple[nn.Module, Any]:
    """Attention whose residual and norms are recorded with it."""
    sizes = dict(hidden_sizes=[8, 8, 8], num_attention_heads=[2, 2, 2], depths=[1, 1, 1], key_dim=[4, 4, 4])
    image = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    return randomize(LevitForImageClassification(LevitConfig(image_size=64, **sizes))), image


def fnet() -> tuple[nn.Module, Any]:
    """Mixing by two products, of real and of imaginary parts."""
    config = FNetConfig(vocab_size=23, hidden_size=16, intermediate_size=24, num_hidden_layers=2)
    return randomize(FNetForSequenceClassification(config)), ids()


HOSTS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "T5": t5,
    "BART": bart,
    "LLaVA": llava,
    "BLIP-2": blip2,
    "prompt tuning": prompted,
    "Doge": doge,
    "Doge without logits": doge_states,
    "BLOOM": partial(bloom, BloomForCausalLM),
    "BLOOM without logits": partial(bloom, BloomModel),
    "a function without a rule": odd,
    "ViT": vit,
    "Hiera": hiera,
    "LeViT": levit,
    "FNet": fnet,
    "mamba": of_table("mamba"),
}


def recommended(message: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the methods that a refusal names, with the options that go with them."""
    for layers, names in re.findall(r"(?:With layers=(\[[\d, ]+\])|work here)[^:]*: ((?:'\w+'(?:, )?)+)", message):
        options = {"layers": [int(index) for index in re.findall(r"\d+", layers)]} if layers else {}
        for name in re.findall(r"'(\w+)'", names):
            assert name in list_methods()
            yield name, options

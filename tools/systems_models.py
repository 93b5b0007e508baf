"""Small models of many packages, each with the inputs of a run: the builders of `tools.systems`.

A builder imports its package, so that only its own model is missing where the package is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, WIDTH, TOKENS = 31, 16, 12
"""Sizes of the language models."""

Built = tuple[nn.Module, Any]
"""A model and its inputs."""


@dataclass(frozen=True)
class System:
    """A model of a package.

    Attributes:
        name: unique, the model in words.
        package: the distribution that has its code; "torch" for models that are written here from torch's modules.
        build: returns the model and its inputs.
        random: whether its weights are drawn anew; its own are kept where they must fit together.
    """

    name: str
    package: str
    build: Callable[[], Built]
    random: bool = True


SYSTEMS: dict[str, System] = {}
"""All systems by name."""


def system(name: str, package: str, *, random: bool = True) -> Callable[[Callable[[], Built]], Callable[[], Built]]:
    """Register a builder."""

    def decorate(build: Callable[[], Built]) -> Callable[[], Built]:
        SYSTEMS[name] = System(name, package, build, random)
        return build

    return decorate


class Language(nn.Module):
    """A language model around a module that maps (batch, token, channel), or (token, batch, channel), to the same."""

    def __init__(self, body: nn.Module, *, batch_first: bool = True, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.body, self.head = body, nn.Linear(width, VOCABULARY, bias=False)
        self._batch_first = batch_first

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the logits of each token."""
        x = self.embedding(input_ids)
        x = x if self._batch_first else x.transpose(0, 1)
        x = self.body(x)
        return self.head(x if self._batch_first else x.transpose(0, 1))


class Residual(nn.Module):
    """x + layer(norm(x))."""

    def __init__(self, layer: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(width), layer

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum."""
        return x + self.layer(self.norm(x))


def ids(length: int = TOKENS) -> Tensor:
    """Return token ids of two sequences."""
    return torch.randint(1, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(0))


def image(size: int, batch: int = 2) -> Tensor:
    """Return images of random pixels."""
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0))


def residuals(make: Callable[[], nn.Module], width: int = WIDTH) -> nn.Module:
    """Return a language model of two residual layers."""
    return Language(nn.Sequential(*(Residual(make(), width) for _ in range(2))), width=width)


# torch


def _encoder(batch_first: bool, norm_first: bool) -> Callable[[], Built]:
    def build() -> Built:
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=batch_first, norm_first=norm_first)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        return Language(encoder, batch_first=batch_first), ids()

    return build


for _batch_first in (True, False):
    for _norm_first in (True, False):
        _words = f"{'batch' if _batch_first else 'tokens'} first, {'norm first' if _norm_first else 'norm last'}"
        system(f"nn.TransformerEncoder, {_words}", "torch")(_encoder(_batch_first, _norm_first))


@system("nn.TransformerDecoder", "torch")
def _decoder() -> Built:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerDecoderLayer(WIDTH, 4, 32, batch_first=True)
            self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
            self.decoder = nn.TransformerDecoder(layer, 2)

        def forward(self, input_ids: Tensor, memory: Tensor) -> Tensor:
            x = self.embedding(input_ids)
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]).to(x)
            return self.head(self.decoder(x, memory, tgt_mask=mask, tgt_is_causal=True))

    return Decoder(), {"input_ids": ids(), "memory": torch.randn(2, 7, WIDTH)}


@system("nn.Transformer", "torch")
def _transformer() -> Built:
    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.source, self.target = (nn.Embedding(VOCABULARY, WIDTH) for _ in range(2))
            self.transformer = nn.Transformer(WIDTH, 4, 2, 2, 32, batch_first=True)
            self.head = nn.Linear(WIDTH, VOCABULARY)

        def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
            x, y = self.source(input_ids), self.target(decoder_input_ids)
            mask = nn.Transformer.generate_square_subsequent_mask(y.shape[1]).to(y)
            return self.head(self.transformer(x, y, tgt_mask=mask))

    return Translator(), {"input_ids": ids(), "decoder_input_ids": ids(7)}


@system("nn.MultiheadAttention in a block", "torch")
def _multihead() -> Built:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            return x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]

    return Language(nn.Sequential(Attention(), Attention())), ids()


class _Inline(nn.Module):
    """A block with its attention and its network in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(2, (4, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.other_norm(x))))


@system("F.scaled_dot_product_attention in a block", "torch")
def _inline_blocks() -> Built:
    return Language(nn.Sequential(_Inline(), _Inline())), ids()


@system("a model in one forward", "torch")
def _one_forward() -> Built:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
            self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
            self.qkvs = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
            self.ups = nn.ModuleList(nn.Linear(WIDTH, 32) for _ in range(2))
            self.downs = nn.ModuleList(nn.Linear(32, WIDTH) for _ in range(2))

        def forward(self, input_ids: Tensor) -> Tensor:
            x = self.embedding(input_ids)
            for layer in range(2):
                y = self.norms[2 * layer](x)
                q, k, v = (y.unflatten(2, (4, -1)).transpose(1, 2) for y in self.qkvs[layer](y).chunk(3, -1))
                mask = torch.ones(x.shape[1], x.shape[1], device=x.device).tril() == 0
                weights = (q @ k.mT / 2).masked_fill(mask, -torch.inf).softmax(-1)
                x = x + (weights @ v).transpose(1, 2).flatten(2)
                x = x + self.downs[layer](functional.silu(self.ups[layer](self.norms[2 * layer + 1](x))))
            return self.head(x)

    return Whole(), ids()


@system("nn.LSTM", "torch")
def _lstm() -> Built:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x)[0]

    return residuals(First), ids()


# Images of torchvision, open_clip and vit-pytorch


@system("ViT", "torchvision")
def _torchvision_vit() -> Built:
    from torchvision.models import VisionTransformer

    return VisionTransformer(16, 4, 2, 4, WIDTH, 32, num_classes=5), image(16)


@system("Swin", "torchvision")
def _swin() -> Built:
    from torchvision.models import SwinTransformer

    return SwinTransformer([2, 2], WIDTH, [2, 2], [2, 4], [4, 4], num_classes=5), image(16)


@system("CLIP", "open-clip-torch")
def _clip() -> Built:
    from open_clip.model import CLIP

    vision = dict(image_size=16, layers=2, width=64, patch_size=8)
    text = dict(context_length=TOKENS, vocab_size=VOCABULARY, width=WIDTH, heads=4, layers=2)
    return CLIP(WIDTH, vision, text).eval(), {"image": image(16), "text": ids()}


@system("image tower of CLIP", "open-clip-torch")
def _clip_image() -> Built:
    from open_clip.transformer import VisionTransformer

    return VisionTransformer(16, 8, WIDTH, 2, 4, 2.0, output_dim=8), image(16)


@system("CoCa's text tower", "open-clip-torch")
def _clip_text() -> Built:
    from open_clip.transformer import TextTransformer

    return TextTransformer(TOKENS, VOCABULARY, WIDTH, 4, 2, output_dim=8), ids()


_VIT = dict(image_size=16, patch_size=4, num_classes=5, dim=WIDTH, depth=2, heads=2, mlp_dim=32)
_HEAD = dict(dim_head=8)

_VIT_PYTORCH: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "ViT": ("vit", "ViT", {**_VIT, **_HEAD}, 16),
    "SimpleViT": ("simple_vit", "SimpleViT", {**_VIT, **_HEAD}, 16),
    "DeepViT": ("deepvit", "DeepViT", {**_VIT, **_HEAD}, 16),
    "CaiT": ("cait", "CaiT", {**_VIT, **_HEAD, "cls_depth": 1}, 16),
    "parallel ViT": ("parallel_vit", "ViT", {**_VIT, **_HEAD}, 16),
    "ViT for small datasets": ("vit_for_small_dataset", "ViT", {**_VIT, **_HEAD}, 16),
    "ViT with register tokens": ("simple_vit_with_register_tokens", "SimpleViT", {**_VIT, **_HEAD}, 16),
    "ViT with value residuals": ("simple_vit_with_value_residual", "SimpleViT", {**_VIT, **_HEAD}, 16),
    "ViT with patch merger": ("vit_with_patch_merger", "ViT", {**_VIT, **_HEAD, "patch_merge_num_tokens": 4}, 16),
    "XCiT": ("xcit", "XCiT", {**_VIT, **_HEAD, "cls_depth": 1}, 16),
    "RvT": ("rvt", "RvT", {**_VIT, **_HEAD}, 16),
    "PiT": ("pit", "PiT", {**_VIT, **_HEAD, "depth": (1, 1)}, 16),
    "T2T-ViT": ("t2t", "T2TViT", dict(image_size=32, num_classes=5, dim=WIDTH, depth=2, heads=2, mlp_dim=32), 32),
    "CrossViT": (
        "cross_vit",
        "CrossViT",
        dict(image_size=16, num_classes=5, sm_dim=WIDTH, lg_dim=24, sm_patch_size=4, lg_patch_size=8, depth=1)
        | dict(lg_enc_depth=1, cross_attn_depth=1, sm_enc_mlp_dim=32, lg_enc_mlp_dim=32),
        16,
    ),
    "LeViT": (
        "levit",
        "LeViT",
        dict(image_size=64, num_classes=5, dim=(16, 24), depth=1, heads=2, mlp_mult=2, stages=2),
        64,
    ),
    "CvT": (
        "cvt",
        "CvT",
        dict(num_classes=5, s1_emb_dim=16, s2_emb_dim=16, s3_emb_dim=24, s1_heads=1, s2_heads=2, s3_heads=3)
        | dict(s2_depth=1, s3_depth=1),
        32,
    ),
    "Twins-SVT": (
        "twins_svt",
        "TwinsSVT",
        dict(num_classes=5)
        | {f"s{i}_{name}": n for i in range(1, 5) for name, n in dict(depth=1, local_patch_size=2, global_k=2).items()}
        | dict(s1_emb_dim=8, s2_emb_dim=8, s3_emb_dim=16, s4_emb_dim=16, s1_patch_size=2),
        32,
    ),
    "MaxViT": (
        "max_vit",
        "MaxViT",
        dict(num_classes=5, dim=16, depth=(1, 1), dim_head=8, window_size=2, dim_conv_stem=16),
        32,
    ),
    "NesT": (
        "nest",
        "NesT",
        dict(image_size=16, patch_size=2, num_classes=5, dim=8, heads=2, num_hierarchies=2, block_repeats=1),
        16,
    ),
    "MobileViT": (
        "mobile_vit",
        "MobileViT",
        dict(image_size=(64, 64), dims=[16, 16, 16], channels=[8] * 11, num_classes=5, depths=(1, 1, 1)),
        64,
    ),
    "CCT": (
        "cct",
        "CCT",
        dict(img_size=32, embedding_dim=16, num_layers=2, num_heads=2, mlp_ratio=2.0, num_classes=5)
        | dict(positional_embedding="learnable"),
        32,
    ),
    "CrossFormer": (
        "crossformer",
        "CrossFormer",
        dict(dim=(32, 32, 32, 32), depth=(1, 1, 1, 1), global_window_size=(4, 2, 1, 1), local_window_size=2)
        | dict(num_classes=5),
        64,
    ),
    "RegionViT": (
        "regionvit",
        "RegionViT",
        dict(dim=(32, 32, 32, 32), depth=(1, 1, 1, 1), window_size=2, num_classes=5),
        64,
    ),
}  # fmt: skip


def _vit_pytorch(file: str, name: str, settings: dict[str, Any], size: int) -> Callable[[], Built]:
    def build() -> Built:
        from importlib import import_module

        model = getattr(import_module(f"vit_pytorch.{file}"), name)(**settings)
        return model, image(size)

    return build


for _name, _arguments in _VIT_PYTORCH.items():
    system(_name, "vit-pytorch")(_vit_pytorch(*_arguments))

# Language models


_X_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "rotary": dict(rotary_pos_emb=True),
    "alibi, sandwich norm": dict(alibi_pos_bias=True, sandwich_norm=True),
    "talking heads, GLU": dict(attn_pre_talking_heads=True, attn_post_talking_heads=True, ff_glu=True, ff_swish=True),
    "sigmoid attention": dict(attn_sigmoid=True),
    "macaron, RMS norm, relative bias": dict(macaron=True, use_rmsnorm=True, rel_pos_bias=True),
    "query-key norm, one value head": dict(attn_qk_norm=True, attn_one_kv_head=True),
    "gated values, shifted tokens": dict(attn_gate_values=True, shift_tokens=1),
}


def _x_transformers(settings: dict[str, Any], **wrapper: Any) -> Callable[[], Built]:
    def build() -> Built:
        from x_transformers import Decoder, TransformerWrapper

        layers = Decoder(dim=WIDTH, depth=2, heads=2, attn_dim_head=16, **settings)
        return TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=TOKENS, attn_layers=layers, **wrapper), ids()

    return build


for _name, _settings in _X_TRANSFORMERS.items():
    system(f"Decoder: {_name}", "x-transformers")(_x_transformers(_settings))
system("Decoder: memory tokens", "x-transformers")(_x_transformers({}, num_memory_tokens=3))


@system("minGRU", "minGRU-pytorch")
def _min_gru() -> Built:
    from minGRU_pytorch import minGRU

    return residuals(lambda: minGRU(WIDTH)), ids()


@system("Performer", "performer-pytorch")
def _performer() -> Built:
    from performer_pytorch import PerformerLM

    return PerformerLM(num_tokens=VOCABULARY, max_seq_len=TOKENS, dim=WIDTH, depth=2, heads=2, dim_head=8), ids()


@system("Linformer", "linformer")
def _linformer() -> Built:
    from linformer import LinformerLM

    return LinformerLM(num_tokens=VOCABULARY, dim=WIDTH, seq_len=TOKENS, depth=2, heads=2, dim_head=8, k=4), ids()


@system("local attention", "local-attention")
def _local_attention() -> Built:
    from local_attention import LocalTransformer

    sizes = dict(num_tokens=VOCABULARY, dim=WIDTH, depth=2, max_seq_len=TOKENS, heads=2, dim_head=8)
    return LocalTransformer(**sizes, causal=True, local_attn_window_size=4), ids()


@system("MLP-Mixer", "mlp-mixer-pytorch")
def _mlp_mixer() -> Built:
    from mlp_mixer_pytorch import MLPMixer

    return MLPMixer(image_size=16, channels=3, patch_size=4, dim=WIDTH, depth=2, num_classes=5), image(16)


@system("gMLP", "g-mlp-pytorch")
def _g_mlp() -> Built:
    from g_mlp_pytorch import gMLP

    return gMLP(num_tokens=VOCABULARY, dim=WIDTH, depth=2, seq_len=TOKENS, causal=True), ids()


@system("Perceiver IO", "perceiver-pytorch")
def _perceiver() -> Built:
    from perceiver_pytorch import PerceiverLM

    sizes = dict(num_tokens=VOCABULARY, dim=WIDTH, depth=2, max_seq_len=TOKENS, num_latents=6, latent_dim=WIDTH)
    heads = dict(cross_heads=1, latent_heads=2, cross_dim_head=8, latent_dim_head=8)
    return PerceiverLM(**sizes, **heads), ids()


@system("Titans", "titans-pytorch", random=False)
def _titans() -> Built:
    from titans_pytorch import NeuralMemory

    class Memory(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.memory = NeuralMemory(dim=WIDTH, chunk_size=4)

        def forward(self, x: Tensor) -> Tensor:
            return self.memory(x)[0]

    return residuals(Memory), ids()


def _litgpt(**settings: Any) -> Callable[[], Built]:
    def build() -> Built:
        from litgpt import GPT, Config

        sizes = dict(n_layer=2, n_head=4, n_embd=WIDTH, block_size=TOKENS, padded_vocab_size=VOCABULARY)
        return GPT(Config(**(sizes | settings))), ids()

    return build


system("GPT", "litgpt")(_litgpt())
system("Llama", "litgpt")(
    _litgpt(
        norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP", intermediate_size=32, n_query_groups=2, bias=False,
        parallel_residual=False, rotary_percentage=1.0,
    )
)  # fmt: skip


def _mambapy(*, parallel: bool) -> Callable[[], Built]:
    def build() -> Built:
        from mambapy.mamba import Mamba, MambaConfig

        return Language(Mamba(MambaConfig(d_model=WIDTH, n_layers=2, d_state=4, pscan=parallel))), ids()

    return build


system("Mamba, parallel scan", "mambapy")(_mambapy(parallel=True))
system("Mamba, loop", "mambapy")(_mambapy(parallel=False))


@system("Jamba", "mambapy")
def _jamba() -> Built:
    from mambapy.jamba import Jamba, JambaLM, JambaLMConfig

    assert Jamba
    config = JambaLMConfig(
        d_model=WIDTH, n_layers=2, mlp_size=32, d_state=4, num_attention_heads=4, num_key_value_heads=2,
        attn_layer_offset=1, attn_layer_period=2, expert_layer_offset=1, expert_layer_period=2, num_experts=2,
        num_experts_per_tok=1, vocab_size=VOCABULARY, use_cuda=False,
    )  # fmt: skip
    return JambaLM(config), ids()


@system("Mamba of minimamba", "minimamba")
def _minimamba() -> Built:
    from minimamba import MambaForCausalLM, MambaLMConfig

    return MambaForCausalLM(MambaLMConfig(d_model=WIDTH, n_layer=2, vocab_size=VOCABULARY, d_state=4)), ids()


def _xlstm(kind: str) -> Callable[[], Built]:
    def build() -> Built:
        import xlstm

        matrix = xlstm.mLSTMBlockConfig(mlstm=xlstm.mLSTMLayerConfig(num_heads=2, conv1d_kernel_size=4))
        scalar = xlstm.sLSTMBlockConfig(slstm=xlstm.sLSTMLayerConfig(backend="vanilla", num_heads=2))
        config = xlstm.xLSTMBlockStackConfig(
            mlstm_block=matrix, slstm_block=scalar if kind == "s" else None, num_blocks=2, context_length=TOKENS,
            embedding_dim=WIDTH, slstm_at=[1] if kind == "s" else [],
        )  # fmt: skip
        return Language(xlstm.xLSTMBlockStack(config)), ids()

    return build


system("xLSTM, mLSTM blocks", "xlstm")(_xlstm("m"))
system("xLSTM with an sLSTM block", "xlstm")(_xlstm("s"))


@system("S5", "s5-pytorch", random=False)
def _s5() -> Built:
    from s5 import S5Block

    blocks = nn.Sequential(*(S5Block(WIDTH, 8, bidir=False) for _ in range(2)))
    return Language(blocks), ids()


@system("gated state spaces", "gated-state-spaces-pytorch")
def _gss() -> Built:
    from gated_state_spaces_pytorch import GatedStateSpacesLM

    sizes = dict(num_tokens=VOCABULARY, dim=WIDTH, depth=2, dim_expansion_factor=2, dss_kernel_N=4, dss_kernel_H=8)
    return GatedStateSpacesLM(**sizes), ids()


@system("Mega", "mega-pytorch")
def _mega() -> Built:
    from mega_pytorch import Mega

    sizes = dict(ema_heads=4, attn_dim_qk=8, attn_dim_value=16, laplacian_attn_fn=False)
    return Mega(num_tokens=VOCABULARY, dim=WIDTH, depth=2, **sizes), ids()


@system("RetNet of torchscale", "torchscale")
def _retnet() -> Built:
    from torchscale.architecture.config import RetNetConfig
    from torchscale.architecture.retnet import RetNetDecoder

    config = RetNetConfig(
        vocab_size=VOCABULARY, decoder_layers=2, decoder_embed_dim=WIDTH, decoder_value_embed_dim=32,
        decoder_retention_heads=2, decoder_ffn_embed_dim=32,
    )  # fmt: skip
    return RetNetDecoder(config, nn.Embedding(VOCABULARY, WIDTH)), ids()


@system("RetNet of yet-another-retnet", "yet-another-retnet")
def _other_retnet() -> Built:
    from yet_another_retnet.retnet import RetNetDecoder, RetNetDecoderLayer

    return Language(RetNetDecoder(RetNetDecoderLayer(WIDTH, 2, dim_feedforward=32), 2)), ids()


@system("axial attention", "axial-attention")
def _axial() -> Built:
    from axial_attention import AxialAttention

    class Grid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = AxialAttention(dim=WIDTH, dim_index=-1, heads=2, num_dimensions=2)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x.unflatten(1, (3, -1))).flatten(1, 2)

    return residuals(Grid), ids()


@system("ESM-2", "fair-esm")
def _esm() -> Built:
    from esm.model.esm2 import ESM2

    return ESM2(num_layers=2, embed_dim=WIDTH, attention_heads=4), ids()


@system("Conformer", "conformer")
def _conformer() -> Built:
    from conformer import Conformer

    return Language(Conformer(dim=WIDTH, depth=2, dim_head=8, heads=2, ff_mult=2, conv_kernel_size=5)), ids()


@system("Nystromformer", "nystrom-attention")
def _nystrom() -> Built:
    from nystrom_attention import NystromAttention

    return residuals(lambda: NystromAttention(WIDTH, dim_head=8, heads=2, num_landmarks=4)), ids()


def _aft(name: str) -> Callable[[], Built]:
    def build() -> Built:
        import aft_pytorch

        return residuals(lambda: getattr(aft_pytorch, name)(max_seqlen=TOKENS, dim=WIDTH, hidden_dim=8)), ids()

    return build


system("AFT, full", "aft-pytorch")(_aft("AFTFull"))
system("AFT, simple", "aft-pytorch")(_aft("AFTSimple"))


@system("H-Transformer", "h-transformer-1d")
def _hierarchical() -> Built:
    from h_transformer_1d import HTransformer1D

    sizes = dict(num_tokens=VOCABULARY, dim=WIDTH, depth=2, max_seq_len=16, heads=2, dim_head=8, block_size=4)
    return HTransformer1D(**sizes, causal=True), ids(16)


@system("linear attention", "linear-attention-transformer")
def _linear_attention() -> Built:
    from linear_attention_transformer import LinearAttentionTransformerLM

    sizes = dict(num_tokens=VOCABULARY, dim=WIDTH, depth=2, max_seq_len=TOKENS, heads=2, dim_head=8)
    return LinearAttentionTransformerLM(**sizes, causal=True, use_axial_pos_emb=False, blindspot_size=1), ids()


@system("agent attention", "agent-attention-pytorch")
def _agent() -> Built:
    from agent_attention_pytorch import AgentTransformer

    return Language(AgentTransformer(WIDTH, num_agent_tokens=4, depth=2, heads=2, dim_head=8)), ids()


@system("GateLoop", "gateloop-transformer")
def _gate_loop() -> Built:
    from gateloop_transformer import Transformer

    return Transformer(WIDTH, num_tokens=VOCABULARY, depth=2, dim_head=8, heads=2), ids()


@system("GateLoop, simple", "gateloop-transformer")
def _simple_gate_loop() -> Built:
    from gateloop_transformer import SimpleGateLoopLayer

    return residuals(lambda: SimpleGateLoopLayer(WIDTH)), ids()


@system("FLASH", "flash-pytorch")
def _flash() -> Built:
    from flash_pytorch import FLASHTransformer

    return FLASHTransformer(
        num_tokens=VOCABULARY, dim=WIDTH, depth=2, group_size=4, query_key_dim=8, causal=True
    ), ids()


@system("long-short attention", "long-short-transformer")
def _long_short() -> Built:
    from long_short_transformer import LongShortTransformer

    sizes = dict(num_tokens=VOCABULARY, dim=WIDTH, depth=2, max_seq_len=16, heads=2, dim_head=8)
    return LongShortTransformer(**sizes, window_size=4, segment_size=4, r=1), ids(16)


@system("token shift", "token-shift-gpt")
def _token_shift() -> Built:
    from token_shift_gpt import TokenShiftGPT

    return TokenShiftGPT(num_tokens=VOCABULARY, dim=WIDTH, max_seq_len=TOKENS, depth=2), ids()


@system("ResMLP", "res-mlp-pytorch")
def _res_mlp() -> Built:
    from res_mlp_pytorch import ResMLP

    return ResMLP(image_size=16, patch_size=4, dim=WIDTH, depth=2, num_classes=5), image(16)


@system("PaLM", "PaLM-pytorch")
def _palm() -> Built:
    from palm_pytorch import PaLM

    return PaLM(num_tokens=VOCABULARY, dim=WIDTH, depth=2, heads=2, dim_head=8), ids()


@system("TimeSformer", "timesformer-pytorch")
def _timesformer() -> Built:
    from timesformer_pytorch import TimeSformer

    sizes = dict(dim=WIDTH, image_size=16, patch_size=8, num_frames=3, num_classes=5, depth=2, heads=2, dim_head=8)
    return TimeSformer(**sizes), torch.randn(2, 3, 3, 16, 16)


@system("BERT of bert-pytorch", "bert-pytorch")
def _bert() -> Built:
    from bert_pytorch.model import BERT

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert, self.head = (
                BERT(VOCABULARY, hidden=WIDTH, n_layers=2, attn_heads=4),
                nn.Linear(WIDTH, VOCABULARY),
            )

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.head(self.bert(input_ids, torch.zeros_like(input_ids)))

    return Masked(), ids()


@system("FNet", "fnet-pytorch")
def _fnet() -> Built:
    from fnet import FNetLayer

    config = dict(fourier="fft", hidden_size=WIDTH, intermediate_size=32, layer_norm_eps=1e-5, dropout_rate=0.0)
    return Language(nn.Sequential(FNetLayer(config), FNetLayer(config))), ids()


@system("Reformer", "reformer-pytorch")
def _reformer() -> Built:
    from reformer_pytorch import ReformerLM

    sizes = dict(num_tokens=VOCABULARY, dim=WIDTH, depth=2, max_seq_len=16, heads=2, dim_head=8, bucket_size=4)
    return ReformerLM(**sizes, n_hashes=1, ff_chunks=1, causal=True), ids(16)


@system("LRU, loop", "lru-pytorch")
def _lru() -> Built:
    from LRU_pytorch import LRU

    return residuals(lambda: LRU(WIDTH, WIDTH, 4)), ids()


@system("Uniformer", "uniformer-pytorch")
def _uniformer() -> Built:
    from uniformer_pytorch import Uniformer

    settings = dict(num_classes=5, dims=(8, 16), depths=(1, 1), mhsa_types=("l", "g"), dim_head=8)
    return Uniformer(**settings), torch.randn(2, 3, 4, 16, 16)


@system("Swin of swin-transformer-pytorch", "swin-transformer-pytorch")
def _other_swin() -> Built:
    from swin_transformer_pytorch import SwinTransformer

    settings = dict(hidden_dim=8, layers=(2, 2, 2, 2), heads=(1, 2, 2, 2), num_classes=5, head_dim=8, window_size=2)
    return SwinTransformer(**settings, downscaling_factors=(2, 2, 2, 2)), image(32)


def names(packages: Sequence[str] = ()) -> list[str]:
    """Return the names of the systems of some packages, by default of all."""
    return [entry.name for entry in SYSTEMS.values() if not packages or entry.package in packages]

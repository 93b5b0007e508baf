"""Language models of other packages, for `tools.systems`."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tools.systems_models import TOKENS, VOCABULARY, WIDTH, Built, Language, ids, image, residuals, system

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

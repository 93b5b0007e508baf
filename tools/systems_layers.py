"""Layers of other packages in language models, and models of other inputs, for `tools.systems`."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tools.systems_models import TOKENS, VOCABULARY, WIDTH, Built, Language, ids, image, residuals, system


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

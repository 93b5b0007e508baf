"""Families of architectures and groups of methods: the rows of the tables in the README."""

from dataclasses import dataclass

from unilinattn.options import METHODS


@dataclass(frozen=True)
class Family:
    """A row of the table: the name of the family, well-known models, and the names of its adapters."""

    name: str
    models: str
    adapters: tuple[str, ...]


FAMILIES = (
    Family(
        "Mamba-1 (S6)",
        "Mamba, FalconMamba, Jamba, Zamba, ViM",
        ("falcon_mamba", "fla_mamba", "jamba", "mamba", "vim", "zamba"),
    ),
    Family(
        "Mamba-2 (SSD)",
        "Mamba-2, Bamba, Granite 4, FalconH1, Zamba2, NemotronH",
        ("falcon_h1", "fla_mamba2", "mamba2", "mamba2_floor"),
    ),
    Family(
        "delta rule",
        "DeltaNet, Gated DeltaNet, Qwen3-Next, Qwen3.5, OLMo Hybrid, Kimi Linear, Comba",
        (
            "fla_comba",
            "fla_deltanet",
            "fla_gated_deltanet",
            "fla_gated_deltaproduct",
            "fla_kda",
            "kimi_delta",
            "olmo_hybrid",
            "qwen3_5",
            "qwen3_next",
        ),
    ),
    Family(
        "gated linear attention",
        "GLA, RetNet, GSA, LightNet, MiniMax, xLSTM (mLSTM)",
        ("fla_gla", "fla_gsa", "fla_lightnet", "fla_linear_attention", "fla_retnet", "minimax", "xlstm"),
    ),
    Family(
        "gated linear RNN",
        "Griffin, HGRN, HGRN2, minGRU, minLSTM",
        ("fla_hgrn", "fla_hgrn2", "griffin", "min_gru", "min_lstm"),
    ),
    Family(
        "RWKV",
        "RWKV-4, RWKV-6, RWKV-7",
        ("fla_rwkv6", "fla_rwkv6_channel", "fla_rwkv7", "fla_rwkv7_channel", "rwkv4", "rwkv4_channel"),
    ),
    Family(
        "state spaces with fixed parameters",
        "S4, S4D, DSS, S5, GSS",
        ("dss", "gss", "s4", "s4d", "s5", "s5_pytorch"),
    ),
    Family("convolution", "H3, Hyena, LFM2, LFM3", ("h3", "hyena", "lfm2", "multi-hyena")),
    Family(
        "softmax attention",
        "GPT-2, Llama, Gemma, BERT, ViT, DeepSeek (MLA), Forgetting Transformer",
        ("attention", "bert", "fla_attention", "fla_forgetting_attention", "latent_attention", "timm-attention"),
    ),
    Family("recorded without an adapter", "GPT-J, BLOOM, Falcon, MPT, DeBERTa, XLNet, FNet, DiffLlama", ("recorded",)),
)
"""The families; every adapter of the package belongs to exactly one."""


@dataclass(frozen=True)
class Group:
    """A row of the table of methods: the question that they answer, and their names."""

    question: str
    methods: tuple[str, ...]


GROUPS = tuple(
    Group(question, tuple(method.name for method in METHODS if method.question == question))
    for question in dict.fromkeys(method.question for method in METHODS)
)
"""The groups; every method of the package belongs to exactly one."""

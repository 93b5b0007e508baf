"""A real tiny Llama whose weights make one token id an attention sink."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SINK = 1
"""The id that is a sink where it stands."""

LAYERS = 4


def llama(writer: int | None = 0, *, size: float = 300.0) -> LlamaForCausalLM:
    """Return a Llama with random weights whose MLP of layer `writer` writes `size` into one channel of `SINK`.

    Only the embedding of `SINK` has the channel 0, which that MLP reads; None leaves the weights random.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        intermediate_size=32,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    if writer is None:
        return model
    with torch.no_grad():
        embeddings = model.model.embed_tokens.weight.normal_()
        embeddings[:, 0] = 0
        embeddings[SINK, 0] = 3
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.down_proj.weight[0] = 0
        mlp = model.model.layers[writer].mlp
        mlp.gate_proj.weight[0], mlp.up_proj.weight[0] = 0, 0
        mlp.gate_proj.weight[0, 0] = mlp.up_proj.weight[0, 0] = 1
        mlp.down_proj.weight[:, 0] = 0
        mlp.down_proj.weight[1, 0] = size
    return model

"""Models of torch's own modules, for `tools.systems`."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.systems_models import VOCABULARY, WIDTH, Built, Language, ids, residuals, system


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

"""Layers that are modules around others: shifts before an attention, projections before queries and keys, streams."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from unilinattn import explain, trace
from unilinattn.architectures import recorded
from unilinattn.call import Call
from unilinattn.operator.flow import Flow
from unilinattn.testing.hosts import randomize

VOCABULARY, WIDTH, TOKENS = 11, 16, 9


class Model(nn.Module):
    """A language model of two residual blocks around a layer."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(layer()) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), layer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(self.norm(x))


class Scores(nn.Module):
    """Weights by sigmoids, which no function of attention computes."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(torch.einsum("bij,bjd->bid", torch.sigmoid(torch.einsum("bid,bjd->bij", q, k)), v))


class Shifted(nn.Module):
    """Half of the channels from the token before, then an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Scores()

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return self.attention(torch.cat((functional.pad(first, (0, 0, 1, -1)), second), -1))


class Cell(nn.Module):
    """Attention between queries, keys and values that it is given."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Short(nn.Module):
    """A short convolution along the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.mT)[..., : x.shape[1]].mT


class Projected(nn.Module):
    """Queries and keys after a short convolution, values before it, as in xLSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.short, self.cell = Short(), Cell()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        short = functional.silu(self.short(x))
        return self.cell(self.q(short), self.k(short), self.v(x)) + short


class TokensAsChannels(nn.Module):
    """A convolution of one tap whose channels are the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(TOKENS, 12, 1), nn.Conv1d(12, TOKENS, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(functional.gelu(self.first(x)))


LAYERS: dict[str, tuple[type[nn.Module], str]] = {
    "weights by sigmoids": (Scores, ".layer"),
    "a shift before an attention": (Shifted, ".layer"),
    "projections of queries, keys and values": (Projected, ".layer"),
    # Only the norm of the block tells that its last axis has the channels.
    "tokens as channels": (TokensAsChannels, ""),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_module_around_is_the_layer(name: str) -> None:
    layer, path = LAYERS[name]
    model = randomize(Model(layer)).double().eval()
    traced = trace(model, torch.randint(VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(0)))
    assert [x.name for x in traced.layers] == [f"blocks.{i}{path}" for i in range(2)]
    for x in traced.layers:
        assert tuple(x.operator.ports) == ("x",) and x.operator.reconstruction_error() < 1e-12


def test_a_cross_attention_to_an_argument_is_a_layer() -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
            self.layer = nn.TransformerDecoderLayer(WIDTH, 4, 24, batch_first=True)

        def forward(self, input_ids: Tensor, memory: Tensor) -> Tensor:
            return self.head(self.layer(self.embedding(input_ids), memory))

    model = randomize(Decoder()).double().eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCABULARY, (2, TOKENS), generator=generator)
    memory = torch.randn(2, 5, WIDTH, generator=generator, dtype=torch.float64)
    traced = trace(model, {"input_ids": ids, "memory": memory})
    assert [x.name for x in traced.layers] == ["layer.self_attn", "layer.multihead_attn"]
    assert traced.layers[1].operator.matrix("core", port="key").shape[-2:] == (TOKENS, 5)
    assert max(x.operator.reconstruction_error() for x in traced.layers) < 1e-12


def test_a_layer_is_recorded_once_until_an_argument_is_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    model, recordings = randomize(Model(Scores)).double().eval(), 0
    stages_of = recorded.recorded_stages

    def counted(call: Call) -> Flow:
        nonlocal recordings
        recordings += 1
        return stages_of(call)

    monkeypatch.setattr(recorded, "recorded_stages", counted)
    ids = torch.randint(VOCABULARY, (2, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    for length, expected in ((TOKENS, 2), (TOKENS, 0), (TOKENS - 2, 0), (TOKENS + 1, 2)):
        recordings = 0
        layers = trace(model, ids[:, :length]).layers
        assert recordings == expected
        assert max(layer.reconstruction_error() for layer in layers) < 1e-12
        # Operators are built when they are needed, once.
        assert recordings == expected + len(layers)


class ScaledBlock(Block):
    """Adds the layer's output times its own parameter, as BEiT does."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.layer(self.norm(x))


def test_a_scale_by_a_parameter_of_the_block_is_part_of_what_is_added() -> None:
    model = Model(Scores)
    model.blocks = nn.ModuleList(ScaledBlock(Scores()) for _ in range(2))
    randomize(model).double().eval()
    entered: list[Tensor] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, args: entered.append(args[0]))
    ids = torch.randint(VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    traced = trace(model, ids)
    streams = entered[:2]
    for layer, block, stream in zip(traced.layers, model.blocks, streams, strict=True):
        torch.testing.assert_close(layer.residual, stream, rtol=0, atol=1e-12)
        torch.testing.assert_close(layer.added.output, block.scale * layer.output, rtol=0, atol=1e-12)
        assert layer.added.operator.reconstruction_error() < 1e-12


class Merged(nn.Module):
    """Blocks of 8 tokens, a linear layer of each two tokens, and a block of those."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.first, self.merge, self.second = Block(Scores()), Merge(), Block(Scores())

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.second(self.merge(self.first(self.embedding(input_ids))) + 0)


class Merge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x.unflatten(1, (-1, 2)).flatten(2)))


def test_a_layer_that_makes_other_tokens_begins_a_stream() -> None:
    """No module takes the output of `merge` itself, and there is no stream of as many tokens to add it to."""
    model = randomize(Merged()).double().eval()
    traced = trace(model, torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(0)))
    assert [layer.output.shape[1] for layer in traced.layers] == [8, 4, 4]
    maps = [explain(traced, method="alti", layers=[k]).scores[0] for k in range(3)]
    composed = explain(traced, method="alti", compose="rollout").scores
    # The first 8 of all tokens are those of the first stream.
    torch.testing.assert_close(composed[:, 8:, :8], maps[2] @ maps[1] @ maps[0], rtol=0, atol=1e-12)

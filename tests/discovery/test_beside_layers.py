"""Mixing beside layers: in the forward that holds them, in windows of the whole model, and arbitrary memory."""

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import unilinattn as ula
from tests.discovery.test_regions import Attention
from unilinattn.errors import InputError, UnknownArchitectureError
from unilinattn.frozen import token_pass
from unilinattn.testing import relative_error
from unilinattn.testing.hosts import randomize
from unilinattn.tracing.tokens import TokenCall

WIDTH, WORDS, LENGTH = 8, 20, 10
IDS = torch.randint(WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(0))


class Smeared(nn.Module):
    """Adds the gated embedding of the token before to each, and blends the first stream into later ones (nanochat)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.gate, self.blocks = nn.Linear(3, 1), nn.ModuleList(Attention() for _ in range(3))
        self.blend = nn.Parameter(torch.rand(3, 2) + 0.5)

    def forward(self, ids: Tensor) -> Tensor:
        x = functional.rms_norm(self.embed(ids), (WIDTH,))
        gate = torch.sigmoid(self.gate(x[:, 1:, :3]))
        x = torch.cat([x[:, :1], x[:, 1:] + gate * x[:, :-1]], 1)
        first, middle = x, None
        for number, block in enumerate(self.blocks):
            x = self.blend[number, 0] * x + self.blend[number, 1] * first
            x = x + block(functional.rms_norm(x, (WIDTH,)))
            middle = x if number == 1 else middle
        return self.head(x - 0.2 * middle)


def test_a_smear_of_the_embeddings_is_a_layer() -> None:
    model = randomize(Smeared().double().eval())
    trace = ula.trace(model, IDS)
    names = [layer.name for layer in trace.layers]
    assert names[1:] == ["blocks.0", "blocks.1", "blocks.2"] and names[0].startswith("region_")
    with torch.no_grad():
        x = functional.rms_norm(model.embed(IDS), (WIDTH,))
        gate = torch.sigmoid(model.gate(x[:, 1:, :3]))[..., 0]
    expected = torch.eye(LENGTH).double().repeat(2, 1, 1)
    expected[:, range(1, LENGTH), range(LENGTH - 1)] = gate
    smear = trace.layers[0].operator
    assert relative_error(smear.matrix(scope="mixer"), expected) < 1e-12
    assert max(layer.operator.reconstruction_error() for layer in trace.layers) < 1e-12
    result = ula.explain(trace, method="logit", target=-1, logit=lambda output: output[:, -1, 3], progress=False)
    assert result.completeness_gap is not None and float(result.completeness_gap) < 1e-12


class Later(nn.Module):
    """Returns its output, and its values for later layers, which blend them into their own (RWKV-7)."""

    def __init__(self, is_first: bool) -> None:
        super().__init__()
        self.values, self.mix, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.is_first = is_first

    def forward(self, x: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        values = self.values(x)
        if self.is_first:
            first = values
        else:
            values = values + (first - values) * self.mix(x).sigmoid()
        return self.out(values.cumsum(1) / 4), first


class Empty(nn.Module):
    """Gives its first layer arbitrary memory in place of the values of an earlier one, and shifts its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.mixers = nn.ModuleList(Later(number == 0) for number in range(2))
        self.shift, self.key = nn.ZeroPad2d((0, 0, 1, -1)), nn.Linear(WIDTH, WIDTH)
        self.runs = itertools.count()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        # Memory that is free again has the numbers of its last tensor, which are others in each run.
        used = x.new_full(x.shape, next(self.runs))
        del used
        first = torch.empty_like(x)
        for mixer in self.mixers:
            added, first = mixer(x, first)
            x = x + added
            x = x + self.key(self.shift(x) - x).relu()
        return self.head(x)


def test_arbitrary_memory_that_nothing_reads_mixes_no_tokens() -> None:
    names = [layer.name for layer in ula.trace(randomize(Empty().eval()), IDS).layers]
    assert names == ["mixers.0", "shift", "mixers.1", "shift#2"]


class Swallowed(nn.Module):
    """Adds the mean of all tokens around two layers, between whose tensors no other one has all that is needed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.mixers = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        beside = x.mean(1, keepdim=True).tanh()
        for mixer in self.mixers:
            x = x + mixer(x) * beside
        return self.head(x)


def test_a_part_of_a_forward_takes_no_place_of_the_layers_in_it() -> None:
    with pytest.raises(UnknownArchitectureError, match="outside of the registered layers"):
        ula.trace(randomize(Swallowed().eval()), IDS)


class Patched(nn.Module):
    """Attends to the patches of each channel by itself, so that no module with layers has the model's sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 2)
        self.mixers = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, signal: Tensor) -> Tensor:
        x = self.embed(signal.transpose(1, 2).unfold(2, 4, 4).flatten(0, 1))
        for mixer in self.mixers:
            x = x + mixer(x)
        return self.head(x).flatten(1).unflatten(0, (len(signal), -1))


def test_mixers_of_pieces_of_the_model_s_sequences_are_layers() -> None:
    signal = torch.randn(2, 24, 3, generator=torch.Generator().manual_seed(0))
    layers = ula.trace(randomize(Patched().eval()), signal).layers
    assert [(layer.name, tuple(layer.output.shape)) for layer in layers] == [
        ("mixers.0", (6, 6, WIDTH)),
        ("mixers.1", (6, 6, WIDTH)),
    ]
    assert max(layer.operator.reconstruction_error() for layer in layers) < 1e-5


def test_a_layer_that_makes_the_first_vectors_is_named() -> None:
    """Inside of it no pass meets the call that returns them, as in forecasters whose embedding convolves."""
    spec = token_pass.PassSpec.of(ula.trace(randomize(Smeared().eval()), IDS), [-1])
    call = TokenCall(spec.layers[0].output, function=torch.cat, number=0)
    assert f"those that {spec.layers[0].name} returns, a layer that mixes" in token_pass._without_call(spec, call)
    other = TokenCall(2 * spec.layers[0].output, function=torch.cat, number=0)
    assert "differ between two runs" in token_pass._without_call(spec, other)


def test_a_method_in_place_of_inputs_is_named() -> None:
    trace = ula.trace(randomize(Smeared().eval()), IDS)
    with pytest.raises(InputError, match="name the method as method='logit'"):
        ula.explain(trace, "logit")

"""Mixers that nobody registered are found by what they do: invented ones of every kind are, and no real host is."""

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import unilinattn as ula
from tools import coverage
from tools.versions import unavailable
from unilinattn.errors import UnknownArchitectureError
from unilinattn.testing import left_as_found
from unilinattn.testing.hosts import Host, randomize
from unilinattn.tracing import discovery, substitution
from unilinattn.tracing.perturbation import Reference

WIDTH = 8
TRACE = sys.modules["unilinattn.tracing.trace"]
"""The module, whose name in the package is that of the function in it."""

IDS = torch.randint(30, (2, 16), generator=torch.Generator().manual_seed(1))


class Projected(nn.Module):
    """Half a dozen invented mixers differ by `mix` alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, **options: object) -> Tensor:
        return self.second(self.mix(self.first(x)))

    def mix(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class TwoTime(Projected):
    def mix(self, x: Tensor) -> Tensor:
        return x + functional.pad(x, (0, 0, 2, 0))[:, :-2]


class CumMean(Projected):
    def mix(self, x: Tensor) -> Tensor:
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


class SDPA(Projected):
    def mix(self, x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, x, x, is_causal=True)


class LRU(Projected):
    def mix(self, x: Tensor) -> Tensor:
        states = [x[:, 0]]
        for token in x[:, 1:].unbind(1):
            states.append(0.9 * states[-1] + token)
        return torch.stack(states, dim=1)


class SelectiveScan(Projected):
    def mix(self, x: Tensor) -> Tensor:
        keep, state, states = torch.sigmoid(x), torch.zeros_like(x[:, 0]), []
        for k, token in zip(keep.unbind(1), x.unbind(1), strict=True):
            state = k * state + (1 - k) * token
            states.append(state)
        return torch.stack(states, dim=1)


class TimeMix(Projected):
    """A matrix over the tokens, as an MLP-Mixer has it."""

    def __init__(self) -> None:
        super().__init__()
        self.over_tokens = nn.Linear(16, 16)

    def mix(self, x: Tensor) -> Tensor:
        return self.over_tokens(x.transpose(1, 2)).transpose(1, 2)


class Pooling(Projected):
    """Blocks of two tokens share their mean."""

    def mix(self, x: Tensor) -> Tensor:
        return functional.avg_pool1d(x.transpose(1, 2), 2).repeat_interleave(2, dim=-1).transpose(1, 2)


class TokenShift(Projected):
    """Anti-causal: each token is the next one."""

    def mix(self, x: Tensor) -> Tensor:
        return x.roll(-1, dims=1)


class Fourier(Projected):
    def mix(self, x: Tensor) -> Tensor:
        return torch.fft.fft2(x).real


class FirstTokenAdded(Projected):
    """Only one token is read."""

    def mix(self, x: Tensor) -> Tensor:
        return x + x[:, :1]


class Summary(Projected):
    """Only one token receives."""

    def mix(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, :-1], x.mean(1, keepdim=True)], dim=1)


class Recurrent(nn.Module):
    def __init__(self, cell: type[nn.Module]) -> None:
        super().__init__()
        self.cell = cell(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, **options: object) -> Tensor:
        return self.cell(x)[0]


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor, **options: object) -> Tensor:
        return self.filters(x.transpose(1, 2)).transpose(1, 2)


class OverTokens(nn.Module):
    """A norm whose statistics are taken over the tokens."""

    def __init__(self) -> None:
        super().__init__()
        # Mamba casts to the dtype of its norms' weights.
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, **options: object) -> Tensor:
        return (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)


def hybrid(mixer: nn.Module | None = None) -> nn.Module:
    """A Mamba of three blocks, the second with another mixer."""
    config = transformers.MambaConfig(
        vocab_size=30, hidden_size=WIDTH, state_size=3, num_hidden_layers=3, pad_token_id=None, bos_token_id=None
    )
    torch.manual_seed(0)
    model = transformers.MambaForCausalLM(config).eval()
    if mixer is not None:
        model.backbone.layers[1].mixer = mixer
    return randomize(model).eval()


INVENTED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    **{
        cls.__name__: (cls, "")
        for cls in (
            TwoTime,
            CumMean,
            SDPA,
            LRU,
            SelectiveScan,
            TimeMix,
            Pooling,
            TokenShift,
            Fourier,
            FirstTokenAdded,
            Summary,
            Convolved,
            OverTokens,
        )
    },
    "LSTM": (lambda: Recurrent(nn.LSTM), ".cell"),
    "GRU": (lambda: Recurrent(nn.GRU), ".cell"),
}
"""Each with the part of it that mixes."""


def refusal(model: nn.Module, inputs: Tensor = IDS, **options: bool) -> str:
    with left_as_found(model), pytest.raises(UnknownArchitectureError) as caught:
        ula.trace(model, inputs, **options)
    return str(caught.value)


@pytest.mark.parametrize("name", INVENTED)
def test_an_invented_mixer_is_refused_by_its_path_and_class(name: str) -> None:
    build, part = INVENTED[name]
    message = refusal(hybrid(build()))
    assert message.startswith(f"backbone.layers.1.mixer{part} is a ")
    assert f".{name}, which moves information between tokens; no adapter is registered for it" in message
    assert "register_architecture(" in message and "strict=False, which leaves it out" in message


@pytest.mark.parametrize("name", INVENTED)
def test_without_strict_it_is_left_out_by_name(name: str) -> None:
    build, part = INVENTED[name]
    model = hybrid(build())
    with left_as_found(model):
        found = ula.trace(model, IDS, strict=False)
    path = f"backbone.layers.1.mixer{part}"
    assert [layer.name for layer in found.layers if layer.opaque] == [path]
    assert len(found.layers) == 3
    assert ula.explain(found, method="rollout").left_out == (path,)


@pytest.mark.parametrize("name", INVENTED)
def test_nothing_but_this_search_refuses_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TRACE, "unregistered_mixers", lambda *_: ())
    found = ula.trace(hybrid(INVENTED[name][0]()), IDS)
    assert [layer.name for layer in found.layers] == ["backbone.layers.0.mixer", "backbone.layers.2.mixer"]


class Summing(nn.Module):
    """A block of Mamba whose own forward mixes too."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, **options: object) -> Tensor:
        x = self.block(x, **options)
        return x + x.cumsum(1) / 16


def test_a_forward_that_mixes_around_a_layer_is_refused_with_and_without_strict() -> None:
    model = hybrid()
    model.backbone.layers[1] = Summing(model.backbone.layers[1])
    for strict in (True, False):
        message = refusal(model, strict=strict)
        assert message.startswith("backbone.layers.1 is a ")
        assert "Summing, which moves information between tokens outside of the registered layers in it" in message
        assert "strict=False cannot leave it out" in message


def test_a_mixer_before_the_first_layer_and_one_after_the_last_are_found() -> None:
    first, last = hybrid(), hybrid()
    first.backbone.embeddings = nn.Sequential(first.backbone.embeddings, CumMean())
    assert refusal(first).startswith("backbone.embeddings.1 is a ")
    last.backbone.norm_f = OverTokens()
    assert refusal(last).startswith("backbone.norm_f is a ")
    last.lm_head = nn.Sequential(nn.Linear(WIDTH, 30), nn.Softmax(dim=1))
    last.lm_head.weight = last.lm_head[0].weight
    message = refusal(last)
    assert message.startswith("backbone.norm_f is a ")
    assert "So do lm_head.1 (Softmax)." in message


def test_a_mixer_without_a_residual_stream_around_it_is_found() -> None:
    """A held layer's output is perturbed too: what only it reads would otherwise see constants."""
    from unilinattn.models import S4D

    model = nn.Sequential(S4D(6, 4), nn.Linear(6, 6), nn.Sequential(OverTokens()), S4D(6, 4)).eval()
    assert refusal(model, torch.randn(2, 9, 6)).startswith("2.0 is a ")
    del model[2]
    assert len(ula.trace(model, torch.randn(2, 9, 6)).layers) == 2


def test_several_mixers_of_one_class_and_of_two_are_named_together() -> None:
    model = hybrid(CumMean())
    model.backbone.layers[0].mixer = CumMean()
    model.backbone.layers[2].norm = OverTokens()
    message = refusal(model)
    assert message.startswith("backbone.layers.0.mixer is a ")
    assert "So do backbone.layers.1.mixer (CumMean), backbone.layers.2.norm (OverTokens)." in message
    found = ula.trace(model, IDS, strict=False)
    assert [layer.opaque for layer in found.layers] == [True, True, True, False]


class Inner(nn.Module):
    """Two parts, of which one mixes, and a forward that mixes as well."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.wise = TokenShift(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, **options: object) -> Tensor:
        return self.wise(self.shift(x)).cumsum(1)


def test_a_mixer_with_a_mixing_part_is_one_mixer() -> None:
    found = ula.trace(hybrid(Inner()), IDS, strict=False)
    assert [layer.name for layer in found.layers if layer.opaque] == ["backbone.layers.1.mixer"]


class Chain(nn.Sequential):
    """A class of modules of which some mix."""

    def forward(self, x: Tensor, **options: object) -> Tensor:
        x = self[1](self[0](x))
        return x.roll(1, dims=1) if len(self) == 3 else x


def test_a_class_that_mixes_in_one_place_only_is_named_there_only() -> None:
    model = hybrid(Chain(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Identity()))
    model.lm_head = Chain(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 30))
    model.lm_head.weight = model.lm_head[0].weight
    found = ula.trace(model, IDS, strict=False)
    assert [layer.name for layer in found.layers if layer.opaque] == ["backbone.layers.1.mixer"]


NAMED_LIKE_MIXERS = {name: type(name, (nn.Linear,), {}) for name in ("ShortConv", "TimeMixRNN", "ChannelAttention")}


@pytest.mark.parametrize("name", NAMED_LIKE_MIXERS)
def test_a_name_alone_refuses_nothing(name: str) -> None:
    model = hybrid()
    model.backbone.layers[1].norm = NAMED_LIKE_MIXERS[name](WIDTH, WIDTH)
    assert len(ula.trace(model, IDS).layers) == 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_precisions_see_the_same(dtype: torch.dtype) -> None:
    assert len(ula.trace(hybrid().to(dtype), IDS).layers) == 3
    assert refusal(hybrid(SelectiveScan()).to(dtype)).startswith("backbone.layers.1.mixer is a ")


SOFTMAX = {
    "transformer.h.0.attn": ("GPTJ", dict(n_embd=16, n_layer=2, n_head=4, n_positions=32, rotary_dim=4)),
    "transformer.h.0.self_attention": ("Bloom", dict(hidden_size=16, n_layer=2, n_head=4)),
    "transformer.blocks.0.attn": ("Mpt", dict(d_model=16, n_layers=2, n_heads=4)),
}


@pytest.mark.parametrize("path", SOFTMAX)
def test_attention_that_passes_the_interface_by_is_refused_with_the_version(path: str) -> None:
    family, settings = SOFTMAX[path]
    tokens = dict(vocab_size=30, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    config = getattr(transformers, f"{family}Config")(**settings, **tokens)
    message = refusal(getattr(transformers, f"{family}ForCausalLM")(config).eval())
    assert message.startswith(f"{path} is a transformers.models.{family.lower()}.modeling_{family.lower()}.{family}")
    version = f"does not go through the attention interface in transformers {transformers.__version__}"
    assert f"which moves information between tokens and {version}; no adapter" in message


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    searches: list[object] = []
    own = discovery.unregistered_mixers

    def search(model: nn.Module, *rest: object) -> object:
        searches.append(model)
        return own(model, *rest)

    monkeypatch.setattr(TRACE, "unregistered_mixers", search)
    yield searches


def test_one_search_serves_a_model_until_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hybrid()
    with counted(monkeypatch) as searches:
        ula.trace(model, IDS)
        ula.trace(model, IDS)
        ula.trace(model, IDS[:, :5])
        assert len(searches) == 1
        ula.trace(model, IDS.repeat(1, 2))
        assert len(searches) == 2
        model.train()
        ula.trace(model, IDS)
        assert len(searches) == 3
        with torch.no_grad():
            model.backbone.norm_f.weight.mul_(2)
        ula.trace(model, IDS)
        assert len(searches) == 4
        ula.trace(copy.deepcopy(model), IDS)
        assert len(searches) == 5
        model.backbone.layers[1].mixer = CumMean()
        refusal(model)
        refusal(model)
        assert len(searches) == 6
        assert [layer.opaque for layer in ula.trace(model, IDS, strict=False).layers] == [False, True, False]
        assert len(searches) == 6


def test_random_numbers_are_what_they_would_be_without_a_search() -> None:
    draws = []
    model = hybrid()
    for _ in range(2):
        torch.manual_seed(3)
        ula.trace(model, IDS)
        draws.append(torch.rand(4))
    assert torch.equal(*draws)


def test_a_long_input_is_searched_on_its_first_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(substitution, "PREFIX", 16)
    lengths = []
    own = Reference.run

    def run(self: Reference, given: dict[str, Tensor]) -> None:
        lengths.append(given["input_ids"].shape[1])
        own(self, given)

    monkeypatch.setattr(Reference, "run", run)
    model, long = hybrid(), torch.cat([IDS, IDS], dim=1)
    given = {"input_ids": long, "logits_to_keep": torch.tensor([30])}
    assert len(ula.trace(model, given, substitute_above=24).layers) == 3
    ula.trace(model, given, substitute_above=24)
    assert lengths == [16]
    with pytest.raises(UnknownArchitectureError, match=r"^backbone\.layers\.1\.mixer is a "):
        ula.trace(hybrid(CumMean()), long, substitute_above=24)


def test_an_encoder_and_a_decoder_of_other_lengths_are_each_searched() -> None:
    config = transformers.BartConfig(
        vocab_size=30, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=32,
    )  # fmt: skip
    model = randomize(transformers.BartForConditionalGeneration(config)).eval()
    given = {"input_ids": IDS % 26 + 4, "decoder_input_ids": IDS[:, :9] % 26 + 4}
    assert len(ula.trace(model, given).layers) == 3
    for side in ("encoder", "decoder"):
        broken = copy.deepcopy(model)
        getattr(broken.model, side).layers[0].fc2 = nn.Sequential(nn.Linear(16, 16), OverTokens())
        with pytest.raises(UnknownArchitectureError, match=rf"model\.{side}\.layers\.0\.fc2\.1 is a .*OverTokens"):
            ula.trace(broken, given)


ELSEWHERE = ("fla", "timm")
"""Tables of packages with environments of their own, where other tests trace each entry strictly."""

HOSTS = [
    (table, host)
    for table, hosts in coverage.tables().items()
    for host in hosts
    if table not in ELSEWHERE and host.length > 1
]
A_HANDFUL = ("mamba", "bert", "vit", "jamba", "rwkv", "minimax", "qwen3 next", "zamba2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "entry", [entry for _, entry in HOSTS], ids=[f"{table}/{entry.name}" for table, entry in HOSTS]
)
def test_no_real_host_is_refused(entry: Host) -> None:
    reason = unavailable(entry)
    if reason is not None:
        pytest.skip(reason)
    assert all(not layer.opaque for layer in ula.trace(entry.model(), entry.inputs()).layers)


@pytest.mark.parametrize("name", A_HANDFUL)
def test_a_handful_of_real_hosts_is_not_refused(name: str) -> None:
    entry = next(entry for _, entry in HOSTS if entry.name == name)
    model = entry.model()
    with left_as_found(model):
        found = ula.trace(model, entry.inputs())
    assert len(found.layers) == entry.layers

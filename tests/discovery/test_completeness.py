"""A trace lists every layer that mixes tokens, or is refused: at other lengths, in other layouts, in functions."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import unilinattn as ula
from unilinattn.call import attention_interface
from unilinattn.discovery import search
from unilinattn.discovery.completeness import find_leak
from unilinattn.errors import ExactnessWarning, UncoveredError, UnknownArchitectureError
from unilinattn.models import S4D
from unilinattn.testing import TOLERANCES, left_as_found, relative_error
from unilinattn.testing.hosts import randomize
from unilinattn.tracing import agreement

WIDTH, VOCABULARY = 6, 30
IDS = torch.randint(VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1))
SIGNAL = torch.randn(2, 12, WIDTH, generator=torch.Generator().manual_seed(2))


class Layers(nn.Module):
    """Two registered layers with a step before, between and behind them."""

    def __init__(self, before: object = None, between: object = None, behind: object = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = S4D(WIDTH, 4), S4D(WIDTH, 4)
        for name, step in {"before": before, "between": between, "behind": behind}.items():
            setattr(self, name, step or nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        x = self.between(x + self.first(x))
        return self.behind(x + self.second(x))


class Text(Layers):
    """The same on the embeddings of ids, which `bigrams` joins in pairs."""

    def __init__(self, bigrams: bool = False, **steps: object) -> None:
        super().__init__(**steps)
        self.embedding, self.bigrams = nn.Embedding(VOCABULARY, WIDTH), bigrams

    def forward(self, input_ids: Tensor) -> Tensor:
        ids = (input_ids * 7 + input_ids.roll(1, dims=1)) % VOCABULARY if self.bigrams else input_ids
        return super().forward(self.embedding(ids))


class Pooled(Layers):
    """The mean of each three tokens behind the layers, in the model's own forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).unflatten(1, (4, 3)).mean(2)


class Of(nn.Module):
    """A function of the stream as a module, with the modules that it calls."""

    def __init__(self, function: Callable[..., Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.parts)


def by_channel(x: Tensor, module: nn.Module) -> Tensor:
    return module(x.transpose(1, 2)).transpose(1, 2)


def pooled(x: Tensor, attention: nn.Module) -> Tensor:
    return attention(x.mean(1, keepdim=True), x, x, need_weights=False)[0][:, 0]


def grid(x: Tensor) -> Tensor:
    image = x.reshape(x.shape[0], 3, 4, -1)
    return (image + image.roll(1, dims=1)).reshape(x.shape)


def paired(x: Tensor, module: nn.Module) -> Tensor:
    return module(x.reshape(len(x), -1, 2 * x.shape[-1]))


def packed(x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return (rows + rows.roll(2, dims=0)).reshape(x.shape)


def excited(x: Tensor) -> Tensor:
    return x * x.mean(1, keepdim=True).sigmoid()


def scaled(x: Tensor) -> Tensor:
    return x / x.square().mean((0, 1), keepdim=True).sqrt()


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """The first trace imports modules of transformers, which change the filters of warnings."""
    ula.trace(Layers().eval(), SIGNAL)


strided = nn.Conv1d(WIDTH, WIDTH, 2, stride=2)

RECORDED: dict[str, tuple[Callable[[], nn.Module], Tensor, str]] = {
    "strided convolution before the layers": (lambda: Text(before=Of(by_channel, strided)), IDS, "before"),
    "strided convolution between the layers": (lambda: Layers(between=Of(by_channel, strided)), SIGNAL, "between"),
    "strided convolution behind the layers": (lambda: Layers(behind=Of(by_channel, strided)), SIGNAL, "behind"),
    "average pooling": (lambda: Layers(between=Of(by_channel, nn.AvgPool1d(3, 3))), SIGNAL, "between"),
    "rows of a grid": (lambda: Layers(between=Of(grid)), SIGNAL, "between"),
    "a gate of all tokens": (lambda: Layers(between=Of(excited)), SIGNAL, "between"),
    "a scale of all ids, whatever their order": (lambda: Text(before=Of(scaled)), IDS, "before"),
    "fused attention pooling": (
        lambda: Layers(behind=Of(lambda x: functional.scaled_dot_product_attention(x[:, :1], x, x)[:, 0])),
        SIGNAL,
        "behind",
    ),
    "pooled queries": (
        lambda: Layers(behind=Of(pooled, nn.MultiheadAttention(WIDTH, 2, batch_first=True))),
        SIGNAL,
        "behind",
    ),
    "pairs of tokens before a layer": (
        lambda: Layers(between=Of(paired, Of(lambda x, *parts: parts[0](x), nn.Linear(2 * WIDTH, WIDTH)))),
        SIGNAL,
        "between",
    ),
}


@pytest.mark.parametrize("name", RECORDED)
def test_mixing_outside_of_the_registered_layers_is_a_layer(name: str) -> None:
    build, inputs, place = RECORDED[name]
    model = build().eval().double()
    with left_as_found(model):
        trace = ula.trace(model, inputs if inputs.dtype == torch.long else inputs.double())
    recorded = [layer for layer in trace.layers if layer.architecture == "recorded"]
    assert [layer.name for layer in recorded] == [place]
    assert len(trace.layers) == 3
    assert recorded[0].reconstruction_error() < 1e-12


LEAKS: dict[str, tuple[Callable[[], nn.Module], Tensor, str]] = {
    "pairs of ids": (lambda: Text(bigrams=True), IDS, "embedding is a torch.nn.modules.sparse.Embedding"),
    "mixing across the batch": (lambda: Layers(between=Of(lambda x: x + x.flip(0))), SIGNAL, r"between \(.*Of\)"),
    "packed rows": (lambda: Layers(between=Of(packed)), SIGNAL, r"between \(.*Of\)"),
}


@pytest.mark.parametrize("name", LEAKS)
def test_mixing_without_a_layer_is_refused_by_its_place(name: str) -> None:
    build, inputs, place = LEAKS[name]
    model = build().eval()
    with left_as_found(model), pytest.raises((UncoveredError, UnknownArchitectureError), match=place):
        ula.trace(model, inputs)


def test_a_leak_of_the_same_layers_is_not_sought_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sought: list[tuple[str, ...]] = []

    def counted(model: nn.Module, arguments: object, layers: object, constants: dict[str, object], *rest: Any) -> Any:
        sought.append(tuple(constants))
        return find_leak(model, arguments, layers, constants, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(search, "find_leak", counted)
    with pytest.raises(UncoveredError, match="between"):
        ula.trace(Text(between=Of(lambda x: x + x.flip(0))).eval(), IDS)
    assert [sorted(paths) for paths in sought] == [["first", "second"], ["between", "first", "second"]]


TOKENWISE: dict[str, Callable[[], nn.Module]] = {
    "mean pooling": lambda: Layers(behind=Of(lambda x: x.mean(1))),
    "the last token": lambda: Layers(behind=Of(lambda x: x[:, -1])),
    "pooling to fewer tokens": lambda: Pooled(),
    "an image of the tokens": lambda: Layers(behind=Of(lambda x: x[..., 0].unflatten(1, (3, 4)))),
    "softmax over channels": lambda: Layers(between=Of(lambda x: x * x.softmax(-1))),
    "attention whose result nothing reads": lambda: Layers(
        between=Of(lambda x, attention: (pooled(x, attention), x)[1], nn.MultiheadAttention(WIDTH, 2, batch_first=True))
    ),
    "channels first": lambda: Layers(between=Of(by_channel, nn.Conv1d(WIDTH, WIDTH, 1))),
    "tokens in the batch": lambda: Layers(between=Of(lambda x: x.reshape(-1, WIDTH).tanh().reshape(x.shape))),
    "a statistic that nothing reads": lambda: Layers(between=Of(lambda x: (x.mean((0, 1)), x)[1])),
}


@pytest.mark.parametrize("name", TOKENWISE)
def test_code_that_keeps_tokens_apart_is_not_refused(name: str) -> None:
    assert len(ula.trace(TOKENWISE[name]().eval(), SIGNAL).layers) == 2


class Towers(Layers):
    """Two streams of 12 and 4 tokens; the output has tokens of the second one, which read the mean of the first."""

    def forward(self, x: Tensor) -> Tensor:
        queries = x[:, :4] * x.new_zeros(()) + torch.linspace(0, 1, WIDTH).to(x)
        x = x + self.first(x)
        return queries + self.second(queries) + x.mean(1, keepdim=True)


def test_an_output_with_the_tokens_of_a_stream_may_not_pool_another_one() -> None:
    with pytest.raises(UnknownArchitectureError, match="between second and the output"):
        ula.trace(Towers().eval(), SIGNAL)


SQUARE = SIGNAL[:, :WIDTH]
"""As many tokens as channels."""


def test_a_pool_of_as_many_frames_as_channels_is_a_layer() -> None:
    """It has its channels in the second axis, and the layers before it in the last one."""

    class Ending(Layers):
        def __init__(self, between: object = None) -> None:
            super().__init__(between=between, behind=nn.AvgPool1d(3, 3))
            self.first, self.second = S4D(12, 4), S4D(12, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.between(x + self.first(x))
            return self.behind((x + self.second(x)).transpose(1, 2)).transpose(1, 2)

    # The tokens of shorter inputs are repeated in the search.
    square = torch.randn(2, 12, 12, generator=torch.Generator().manual_seed(3))
    layers = ula.trace(Ending().eval().double(), square.double()).layers
    assert [tuple(layer.output.shape) for layer in layers] == [*[(2, 12, 12)] * 2, (2, 4, 12)]
    assert layers[-1].reconstruction_error() < 1e-12
    with pytest.raises((UncoveredError, UnknownArchitectureError), match=r"between \(.*Of\)"):
        ula.trace(Ending(between=Of(packed)).eval(), square)


def test_as_many_tokens_as_channels_are_told_apart_before_and_after_a_turn() -> None:
    def begun() -> nn.Module:
        return Of(by_channel, nn.Conv1d(WIDTH, WIDTH, 3, padding=1))

    made = ula.trace(Layers(before=begun(), between=Of(lambda x: x * x.softmax(-1))).eval(), SQUARE)
    assert [layer.name for layer in made.layers] == ["before", "first", "second"]
    with pytest.raises((UncoveredError, UnknownArchitectureError), match=r"between \(.*Of\)"):
        ula.trace(Layers(before=begun(), between=Of(packed)).eval(), SQUARE)


@pytest.mark.long
@pytest.mark.parametrize("leaks", [False, True])
def test_an_encoder_of_as_many_frames_as_channels_is_traced(leaks: bool) -> None:
    """A module that mixes tokens between the turn of the axes and the first layer is noticed."""
    sizes = dict(d_model=16, encoder_layers=2, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2)
    sizes |= dict(encoder_ffn_dim=8, decoder_ffn_dim=8, num_mel_bins=4, max_source_positions=16)
    special = dict(vocab_size=20, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)
    torch.manual_seed(0)
    model = randomize(transformers.WhisperModel(transformers.WhisperConfig(**sizes, **special)).eval())
    block = model.encoder.layers[0]
    if leaks:
        block.self_attn_layer_norm = nn.Sequential(block.self_attn_layer_norm, Of(packed))
    inputs = {"input_features": torch.randn(1, 4, 32), "decoder_input_ids": torch.tensor([[1, 5, 6]])}
    layers = ula.trace(model, inputs).layers
    assert [tuple(layer.output.shape) for layer in layers] == [*[(1, 16, 16)] * 2, *[(1, 3, 16)] * 2]
    assert layers[0].name == ("encoder.layers.0" if leaks else "encoder.layers.0.self_attn")


def test_arbitrary_memory_as_an_unused_argument_is_not_mixing() -> None:
    """RWKV-7 passes `torch.empty_like` to its layers."""

    class Reader(nn.Module):
        def forward(self, x: Tensor, unused: Tensor) -> Tensor:
            return x.tanh()

    def between(x: Tensor, reader: nn.Module) -> Tensor:
        del_soon = [torch.randn_like(x) for _ in range(8)]
        del_soon.clear()
        return reader(x, torch.empty_like(x))

    for _ in range(4):
        assert len(ula.trace(Layers(between=Of(between, Reader())).eval(), SIGNAL).layers) == 2


@pytest.mark.long
@pytest.mark.skipif(transformers.__version__ == "5.6.2", reason="LongT5 of transformers 5.6.2 is refused otherwise")
def test_attention_of_a_stream_without_registered_layers_is_recorded() -> None:
    """The encoder of LongT5 attends in blocks; its decoder is registered."""
    config = transformers.LongT5Config(
        vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_decoder_layers=1, num_heads=2, local_radius=3,
        pad_token_id=0, decoder_start_token_id=0,
    )  # fmt: skip
    model = randomize(transformers.LongT5ForConditionalGeneration(config)).eval()
    ids = torch.arange(1, 25).reshape(2, 12)
    short = {"input_ids": ids[:, :1], "decoder_input_ids": ids}
    # A single token mixes with none; the search repeats it.
    assert len(ula.trace(model, short).layers) == 3
    # The answer for few tokens says nothing of more.
    assert len(ula.trace(model, {"input_ids": ids, "decoder_input_ids": ids[:, :5]}).layers) == 3


@pytest.mark.long
def test_a_language_model_behind_a_registered_vision_tower_is_recorded() -> None:
    tiny = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    config = transformers.GitConfig(vision_config=dict(**tiny, image_size=8, patch_size=4), vocab_size=40, **tiny)
    model = randomize(transformers.GitForCausalLM(config)).eval()
    inputs = {"input_ids": IDS, "pixel_values": torch.randn(2, 3, 8, 8)}
    assert [layer.architecture for layer in ula.trace(model, inputs).layers] == ["attention", "recorded"]


@pytest.mark.parametrize("text_only", [False, True])
def test_the_trace_runs_the_attention_that_the_model_runs(text_only: bool) -> None:
    """PaliGemma's fused attention has no mask for a text, and its eager attention a causal one."""
    tiny = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    config = transformers.PaliGemmaConfig(
        vision_config=dict(model_type="siglip_vision_model", image_size=8, patch_size=4, vision_use_head=False, **tiny),
        text_config=dict(model_type="gemma", vocab_size=VOCABULARY + 1, num_key_value_heads=1, head_dim=8, **tiny),
        image_token_index=VOCABULARY,
        projection_dim=16,
    )
    model = randomize(transformers.PaliGemmaForConditionalGeneration(config)).eval()
    inputs = {"input_ids": IDS}
    if not text_only:
        ids = torch.cat([torch.full((2, 4), VOCABULARY), IDS], dim=1)
        inputs = {"input_ids": ids, "pixel_values": torch.randn(2, 3, 8, 8), "token_type_ids": torch.zeros_like(ids)}
    with torch.no_grad():
        expected = model(**inputs).logits
    trace = ula.trace(model, inputs)
    assert relative_error(trace.output.logits, expected) <= TOLERANCES["layer", torch.float32]
    assert max(layer.reconstruction_error() for layer in trace.layers) <= TOLERANCES["layer", torch.float32]


def test_an_added_argument_that_changes_the_output_is_a_warning() -> None:
    """GPT-2 does not derive the positions of left-padded texts from the mask; Llama's are relative."""
    tiny = dict(n_embd=8, n_layer=1, n_head=2, n_positions=16, bos_token_id=None, eos_token_id=None)
    model = randomize(transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCABULARY, **tiny))).eval()
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    trace = ula.trace(model, {"input_ids": IDS, "attention_mask": mask})
    (warning,) = trace.warnings
    assert warning.startswith("the trace passes position_ids to GPT2LMHeadModel")
    with pytest.warns(ExactnessWarning, match="position_ids"):
        assert ula.explain(trace, target=-1).warnings == (warning,)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    given = {"input_ids": IDS, "attention_mask": mask, "position_ids": positions}
    assert ula.trace(model, given).warnings == ula.trace(model, IDS).warnings == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_attention_implementation_of_another_result_is_a_warning(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 2's fused attention has no soft cap in some versions; here a patched one stands for it."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    monkeypatch.setattr(attention_interface, "is_plain", lambda *_, **__: False)

    original = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def doubled(*args: object, **options: object) -> object:
        output, weights = original(*args, **options)
        return 2 * output, weights

    tiny = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    model = randomize(transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCABULARY, **tiny))).eval()
    model = model.to(dtype)
    assert ula.trace(model, IDS).warnings == ()
    ALL_ATTENTION_FUNCTIONS["sdpa"] = doubled
    try:
        (warning,) = ula.trace(randomize(model), IDS).warnings
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert "with its attention implementation (sdpa) returns another output" in warning


@pytest.mark.parametrize("is_rounding", [True, False])
def test_rounding_that_layers_add_up_is_no_other_result(is_rounding: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many layers in bfloat16 differ by more than one may; here the limit is that of fewer bits."""
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCABULARY, **sizes)).eval().bfloat16()
    monkeypatch.setattr(attention_interface, "is_plain", lambda *_, **__: False)
    monkeypatch.setattr(agreement, "_accepted", lambda output: 1e-5)
    if not is_rounding:
        monkeypatch.setattr(agreement, "_is_rounding", lambda *_: False)
    warnings = ula.trace(model, torch.arange(24).remainder(VOCABULARY).unsqueeze(0)).warnings
    assert len(warnings) == (not is_rounding)


def test_a_refusal_is_not_remembered_for_shorter_inputs() -> None:
    """As many tokens as channels, or rows, may have been misread."""
    model = Layers(between=Of(lambda x: packed(x) if x.shape[1] == 12 else x)).eval()
    for _ in range(2):
        with pytest.raises((UncoveredError, UnknownArchitectureError)):
            ula.trace(model, SIGNAL)
        assert "first" in [layer.name for layer in ula.trace(model, SIGNAL[:, :9]).layers]

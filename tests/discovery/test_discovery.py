"""Detection of unregistered mixers: invented mixers of every kind are refused, and no real host is."""

import copy

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import unilinattn as ula
from tests.discovery.invented import INVENTED, RECURRENT, WIDTH, CumMean, OverTokens, SelectiveScan, TokenShift, hybrid
from tests.hosts import named
from tests.tracing.models import VOCABULARY, Model, Output
from tests.tracing.models import WIDTH as CHANNELS
from unilinattn.discovery import search
from unilinattn.discovery.perturbation import Run
from unilinattn.errors import UncoveredError, UnknownArchitectureError
from unilinattn.host import substitution
from unilinattn.models import S4D
from unilinattn.testing import left_as_found
from unilinattn.testing.hosts import randomize
from unilinattn.tracing import recording

IDS = torch.randint(30, (2, 16), generator=torch.Generator().manual_seed(1))


def refusal(model: nn.Module, inputs: Tensor = IDS, **options: bool) -> str:
    with left_as_found(model), pytest.raises((UnknownArchitectureError, UncoveredError)) as caught:
        ula.trace(model, inputs, **options)
    return str(caught.value)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in INVENTED if name not in RECURRENT])
def test_an_unregistered_mixer_is_recorded(name: str) -> None:
    model = hybrid(INVENTED[name]()).double()
    with left_as_found(model):
        trace = ula.trace(model, IDS)
    assert [layer.architecture for layer in trace.layers] == ["mamba", "recorded", "mamba"]
    layer = trace.layers[1]
    assert layer.name == "backbone.layers.1.mixer"
    assert layer.reconstruction_error() < 1e-12
    contributions = layer.operator.contributions(5).sum(1) + layer.operator.bias[:, 5]
    torch.testing.assert_close(contributions, layer.output[:, 5], rtol=1e-10, atol=1e-12)
    assert ula.explain(trace, method="logit").completeness_gap < 1e-6


@pytest.mark.parametrize("length", [1, 2, 4])
@pytest.mark.parametrize("name", ["SDPA", "TwoTime", "LRU", "TokenShift", "FirstTokenAdded"])
def test_no_layer_is_missed_for_few_tokens(name: str, length: int) -> None:
    layers = ula.trace(hybrid(INVENTED[name]()), IDS[:, :length]).layers
    assert [layer.architecture for layer in layers] == ["mamba", "recorded", "mamba"]


@pytest.mark.parametrize("name", INVENTED)
def test_only_the_search_detects_an_unregistered_mixer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "unregistered_mixers", lambda *_: ())
    trace = ula.trace(hybrid(INVENTED[name]()), IDS)
    assert [layer.name for layer in trace.layers] == ["backbone.layers.0.mixer", "backbone.layers.2.mixer"]


class Summing(nn.Module):
    """A Mamba block followed by a cumulative sum over tokens."""

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


def recorded(model: nn.Module, inputs: Tensor = IDS) -> list[str]:
    """Return the paths of the layers that were recorded."""
    with left_as_found(model):
        trace = ula.trace(model, inputs)
    return [layer.name for layer in trace.layers if layer.architecture == "recorded"]


@pytest.mark.long
def test_mixers_before_the_first_and_after_the_last_layer_are_detected() -> None:
    first, last = hybrid(), hybrid()
    first.backbone.embeddings = nn.Sequential(first.backbone.embeddings, CumMean())
    assert recorded(first) == ["backbone.embeddings.1"]
    last.backbone.norm_f = OverTokens()
    assert recorded(last) == ["backbone.norm_f"]
    last.lm_head = nn.Sequential(nn.Linear(WIDTH, 30), nn.Softmax(dim=1))
    last.lm_head.weight = last.lm_head[0].weight
    assert "its values pass 'softmax'" in refusal(last)


def test_a_mixer_without_a_residual_connection_is_detected() -> None:
    """The fixed outputs of registered layers are perturbed too; otherwise modules that read only them see constants."""
    model = nn.Sequential(S4D(6, 4), nn.Linear(6, 6), nn.Sequential(OverTokens()), S4D(6, 4)).eval()
    assert recorded(model, torch.randn(2, 9, 6)) == ["2.0"]
    del model[2]
    assert len(ula.trace(model, torch.randn(2, 9, 6)).layers) == 2


def test_several_mixers_are_all_layers() -> None:
    model = hybrid(CumMean())
    model.backbone.layers[0].mixer = CumMean()
    model.backbone.layers[2].norm = OverTokens()
    assert recorded(model) == ["backbone.layers.0.mixer", "backbone.layers.1.mixer", "backbone.layers.2.norm"]


class Inner(nn.Module):
    """A mixing and a tokenwise submodule, and a forward that also mixes."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.wise = TokenShift(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, **options: object) -> Tensor:
        return self.wise(self.shift(x)).cumsum(1)


def test_a_mixer_with_a_mixing_part_is_one_mixer() -> None:
    assert recorded(hybrid(Inner())) == ["backbone.layers.1.mixer"]


class Chain(nn.Sequential):
    """A class of which some instances mix tokens."""

    def forward(self, x: Tensor, **options: object) -> Tensor:
        x = self[1](self[0](x))
        return x.roll(1, dims=1) if len(self) == 3 else x


def test_only_the_mixing_instance_of_a_class_is_named() -> None:
    model = hybrid(Chain(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Identity()))
    model.lm_head = Chain(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 30))
    model.lm_head.weight = model.lm_head[0].weight
    assert recorded(model) == ["backbone.layers.1.mixer"]


NAMED_LIKE_MIXERS = {name: type(name, (nn.Linear,), {}) for name in ("ShortConv", "TimeMixRNN", "ChannelAttention")}


@pytest.mark.parametrize("name", NAMED_LIKE_MIXERS)
def test_a_class_name_does_not_refuse_a_module(name: str) -> None:
    model = hybrid()
    model.backbone.layers[1].norm = NAMED_LIKE_MIXERS[name](WIDTH, WIDTH)
    assert len(ula.trace(model, IDS).layers) == 3


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_precisions_give_the_same_result(dtype: torch.dtype) -> None:
    assert len(ula.trace(hybrid().to(dtype), IDS).layers) == 3
    assert recorded(hybrid(SelectiveScan()).to(dtype)) == ["backbone.layers.1.mixer"]


class FaintShift(nn.Module):
    """Adds a small part of the token before, which is less than the change that experts' rounding makes in bfloat16."""

    def forward(self, x: Tensor, **options: object) -> Tensor:
        return x + 0.02 * functional.pad(x, (0, 0, 1, -1))


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_faint_mixing_is_found_in_every_precision(dtype: torch.dtype) -> None:
    model = hybrid(FaintShift()).to(dtype)
    before = [parameter.dtype for parameter in model.parameters()]
    assert recorded(model) == ["backbone.layers.1.mixer"]
    assert recorded(hybrid(FaintShift()).to(dtype), IDS[:, :4]) == ["backbone.layers.1.mixer"]
    assert [parameter.dtype for parameter in model.parameters()] == before
    with torch.autocast("cpu", torch.bfloat16):
        assert recorded(hybrid(FaintShift())) == ["backbone.layers.1.mixer"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_faint_mixing_of_embeddings_is_a_layer_whatever_the_ids_are_called(dtype: torch.dtype) -> None:
    class Faint(Model):
        def forward(self, ids: Tensor) -> Output:
            x = self.embed(ids)
            return Output(self.head(self.blocks[0](x + 0.02 * x.roll(1, dims=1))))

    traced = ula.trace(Faint(S4D(CHANNELS)).to(dtype).eval(), IDS % VOCABULARY, progress=False)
    assert [layer.name for layer in traced.layers] == ["region_0", "blocks.0"]


@pytest.mark.long
def test_layers_of_a_mixer_with_small_weights_do_not_depend_on_the_precision() -> None:
    config = transformers.PatchTSMixerConfig(
        context_length=32, patch_length=8, patch_stride=8, num_input_channels=3, d_model=8, num_layers=2
    )
    torch.manual_seed(0)
    model = transformers.PatchTSMixerForTimeSeriesClassification(config).eval()
    values = {"past_values": torch.rand(2, 32, 3, generator=torch.Generator().manual_seed(1))}
    names = [layer.name for layer in ula.trace(model, values, progress=False).layers]
    low = {name: value.bfloat16() for name, value in values.items()}
    assert [layer.name for layer in ula.trace(model.bfloat16(), low, progress=False).layers] == names
    assert len(names) == 2


@pytest.mark.long
def test_a_model_is_searched_once_until_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[object] = []
    original = search.unregistered_mixers
    monkeypatch.setattr(recording, "unregistered_mixers", lambda *given: searches.append(given) or original(*given))
    model = hybrid()

    def traced(model: nn.Module, inputs: Tensor = IDS) -> int:
        ula.trace(model, inputs)
        return len(searches)

    assert [traced(model), traced(model), traced(model, IDS[:, :5])] == [1, 1, 1]
    assert traced(model, IDS.repeat(1, 2)) == 2
    assert traced(model.train()) == 3
    with torch.no_grad():
        model.backbone.norm_f.weight.mul_(2)
    assert traced(model) == 4
    assert traced(copy.deepcopy(model)) == 5
    model.backbone.layers[1].mixer = CumMean()
    assert [traced(model), traced(model)] == [6, 6]


def test_a_hook_that_mixes_tokens_is_found_after_a_first_trace() -> None:
    model = hybrid()
    ula.trace(model, IDS)
    model.backbone.norm_f.register_forward_hook(lambda module, args, output: output + output.roll(1, dims=1))
    assert "backbone is a" in refusal(model)


class Smearing(nn.Module):
    """A causal model that adds the token before, if a switch or an argument says so."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.smears = inner, False

    def forward(self, input_ids: Tensor, smear: bool = False) -> Tensor:
        logits = self.inner(input_ids).logits
        return logits + logits.roll(1, dims=1) if smear or self.smears else logits


@pytest.mark.parametrize("how", ["argument", "attribute"])
def test_code_that_is_switched_on_after_a_first_trace_is_searched(how: str) -> None:
    model = Smearing(hybrid())
    before = [layer.name for layer in ula.trace(model, {"input_ids": IDS, "smear": False}).layers]
    model.smears = how == "attribute"
    layers = ula.trace(model, {"input_ids": IDS, "smear": how == "argument"}).layers
    assert [layer.name for layer in layers] == [*before, "region_0"]


def test_a_forward_that_mixes_tokens_is_found_after_a_first_trace() -> None:
    model = hybrid()
    before = [layer.name for layer in ula.trace(model, IDS).layers]
    norm = model.backbone.norm_f
    plain = norm.forward
    norm.forward = lambda hidden_states: plain(hidden_states + hidden_states.roll(1, dims=1))
    assert [layer.name for layer in ula.trace(model, IDS).layers] == [*before, "backbone.norm_f"]


def test_a_search_does_not_change_the_random_state() -> None:
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
    original = Run.run

    def run(self: Run, inputs: dict[str, Tensor]) -> None:
        lengths.append(inputs["input_ids"].shape[1])
        original(self, inputs)

    monkeypatch.setattr(Run, "run", run)
    model, long = hybrid(), torch.cat([IDS, IDS], dim=1)
    inputs = {"input_ids": long, "logits_to_keep": torch.tensor([30])}
    assert len(ula.trace(model, inputs, substitute_above=24).layers) == 3
    ula.trace(model, inputs, substitute_above=24)
    assert lengths == [16] * 3
    trace = ula.trace(hybrid(CumMean()), long, substitute_above=24)
    assert trace.layers[1].architecture == "recorded"


@pytest.mark.long
def test_an_encoder_and_a_decoder_of_different_lengths_are_both_searched() -> None:
    config = transformers.BartConfig(
        vocab_size=30, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=32,
    )  # fmt: skip
    model = randomize(transformers.BartForConditionalGeneration(config)).eval()
    inputs = {"input_ids": IDS % 26 + 4, "decoder_input_ids": IDS[:, :9] % 26 + 4}
    assert len(ula.trace(model, inputs).layers) == 3
    for side in ("encoder", "decoder"):
        broken = copy.deepcopy(model)
        getattr(broken.model, side).layers[0].fc2 = nn.Sequential(nn.Linear(16, 16), OverTokens())
        names = [layer.name for layer in ula.trace(broken, inputs).layers if layer.architecture == "recorded"]
        assert names == [f"model.{side}.layers.0.fc2.1"]


QUICK = ("mamba", "bert", "vit", "jamba", "rwkv", "minimax", "qwen3 next", "zamba2")


@pytest.mark.parametrize("name", QUICK)
def test_common_hosts_are_not_refused(name: str) -> None:
    entry = named(name)
    model = entry.model()
    with left_as_found(model):
        trace = ula.trace(model, entry.inputs())
    assert len(trace.layers) == entry.layers


def test_a_host_with_tokens_before_sequences_is_recorded() -> None:
    sizes = dict(d_model=16, n_layer=2, n_head=4, d_inner=12, vocab_size=30)
    model = randomize(transformers.XLNetLMHeadModel(transformers.XLNetConfig(**sizes))).eval()
    trace = ula.trace(model, IDS)
    assert [layer.architecture for layer in trace.layers] == ["recorded"] * 2
    for layer in trace.layers:
        assert layer.input.shape[:2] == IDS.shape and layer.reconstruction_error() < 1e-5


def test_two_attentions_in_one_module_are_recorded() -> None:
    sizes = dict(hidden_size=16, intermediate_size=12, num_hidden_layers=2, num_attention_heads=4, vocab_size=30)
    model = randomize(transformers.DiffLlamaForCausalLM(transformers.DiffLlamaConfig(**sizes, num_key_value_heads=2)))
    trace = ula.trace(model.eval(), IDS)
    assert all(layer.reconstruction_error() < 1e-5 for layer in trace.layers)
    assert trace.layers[0].operator.matrix("core").shape == (2, 16, 16)
    assert ula.explain(trace, method="logit", target=-1).completeness_gap < 1e-4


class Drawing(nn.Module):
    """Attention without an adapter to tokens with noise that the model draws, as ViLT draws patches."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.randn_like(x)
        return x + self.attention(x, x, x, need_weights=False)[0]


def test_the_first_trace_draws_the_numbers_of_one_call() -> None:
    torch.manual_seed(0)
    model, x = Drawing().eval(), torch.randn(2, 5, 8)
    state = torch.get_rng_state()
    with torch.no_grad():
        output, following = model(x), torch.rand(3)
    for _ in range(2):
        torch.set_rng_state(state)
        assert torch.equal(ula.trace(model, x).output, output)
        assert torch.equal(torch.rand(3), following)

"""`explain` and `compare`: models and traces, labels, options, and their errors."""

import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
import transformers
from jaxtyping import TypeCheckError
from torch import nn
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, MambaConfig, MambaModel

from tests.methods import refused
from tests.methods.hosts import BATCH, HOSTS, LENGTH, inputs, real_tokens, traced
from tools.sweep_configs import tiny_config
from unilinattn import methods
from unilinattn.errors import InputError, ModelStateError, NonFiniteError, OptionError, UncoveredError
from unilinattn.host import weights
from unilinattn.methods import alti, compare, estimate, explain, knockout, latim, lrp, rollout
from unilinattn.results.attribution import Attribution
from unilinattn.tracing.trace import Trace, trace


def test_a_model_and_its_trace_give_the_same_scores() -> None:
    model = HOSTS["mamba2"].model()
    direct = explain(model, inputs("left"), method="latim", p=1, target=-1)
    through = explain(trace(model, inputs("left")), method="latim", p=1, target=-1)
    assert torch.equal(direct.scores, through.scores)
    assert direct.options == through.options


@pytest.mark.slow
def test_a_product_beyond_the_range_of_its_dtype_has_a_scale() -> None:
    torch.manual_seed(0)
    config = MambaConfig(hidden_size=16, num_hidden_layers=30, state_size=8, vocab_size=32, initializer_range=1.0)
    model, ids = MambaModel(config).eval().double(), torch.randint(32, (1, 12))
    exact = explain(model, ids, method="rollout", target=-1).scores
    assert exact.abs().max() > torch.finfo(torch.float32).max
    model.float()
    assert explain(model, ids, method="rollout", target=-1, normalize="rows").scores.isfinite().all()
    result = explain(model, ids, method="rollout", target=-1)
    scaled = result.scores * result.extras["log2_scale"].exp2().unsqueeze(-1)
    assert float((scaled - exact).abs().max()) < 0.05 * float(exact.abs().max())


def test_scores_beyond_the_range_of_their_dtype_are_refused() -> None:
    torch.manual_seed(0)
    config = MambaConfig(hidden_size=16, num_hidden_layers=2, state_size=8, vocab_size=32, initializer_range=1.0)
    model, ids = MambaModel(config).eval(), torch.randint(32, (1, 12))
    with torch.no_grad():
        # B and C, without the step size.
        model.layers[1].mixer.x_proj.weight[1:].mul_(1e4)
    message = r"raw: \d+ of 24 scores .* all 2 layers are finite.*range of float32: take heads='geometric-mean'"
    with pytest.raises(NonFiniteError, match=message):
        explain(model, ids, method="raw", target=-1, heads="product")
    assert explain(model, ids, method="raw", target=-1, heads="geometric-mean").scores.isfinite().all()


def test_the_result_is_labelled() -> None:
    host_trace = traced("mamba2", "right")
    result = explain(host_trace, method="rollout")
    assert result.method == "rollout"
    assert result.model == "Mamba2ForCausalLM"
    assert result.layers == ("backbone.layers.0.mixer", "backbone.layers.1.mixer")
    assert result.kinds == tuple(layer.kind for layer in host_trace.layers)
    assert set(result.reconstruction_error) == set(result.layers)
    assert 0 < max(result.reconstruction_error.values()) < 1e-10
    assert {"unilinattn", "torch", "transformers"} <= set(result.versions)
    assert torch.equal(result.mask, real_tokens("right"))
    assert result.tokens is None
    assert explain(traced("mamba2")).mask is None


@pytest.mark.parametrize("run", [partial(explain, method="raw"), partial(explain, method="latim"), knockout])
def test_a_trace_whose_weights_changed_is_refused(run: Callable[..., Attribution]) -> None:
    model = HOSTS["mamba2"].model()
    host_trace = trace(model, inputs())
    # The operators are built, and a write through `.data` changes no version of a weight.
    run(host_trace, target=-1)
    model.backbone.layers[0].mixer.out_proj.weight.data.mul_(2)
    with pytest.raises(ModelStateError, match=r"changed since the trace \(.*out_proj.weight\)"):
        run(host_trace, target=-1)


@pytest.mark.parametrize("method", ["raw", "lrp", "attn_lrp", "knockout", "occlusion"])
def test_one_call_compares_the_weights_of_a_model_once(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = HOSTS["mamba2"].model()
    host_trace = trace(model, inputs())
    read: list[object] = []
    checksums = weights._checksums
    monkeypatch.setattr(weights, "_checksums", lambda module, *rest: read.append(module) or checksums(module, *rest))
    explain(host_trace, method=method, target=-1)
    assert read.count(model) == 1
    explain(host_trace, method=method, target=-1)
    assert read.count(model) == 2


@pytest.mark.parametrize("target", [None, -1])
def test_the_default_of_linear_rnns_is_lrp(target: int | None) -> None:
    host_trace = traced("mamba2", "left")
    result, named = explain(host_trace, target=target), lrp(host_trace, target=target, measure="log-odds")
    assert torch.equal(result.scores, named.scores)
    assert (result.method, result.options) == ("lrp", named.options)
    assert repr(estimate(host_trace, target=target)) == repr(
        estimate(host_trace, target=target, method="lrp", measure="log-odds")
    )
    assert explain(host_trace, target=target, by="layer").method == "logit"
    with pytest.raises(OptionError, match="lrp takes no option 'p'"):
        explain(host_trace, p=1)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_default_of_causal_attention_is_attn_lrp_with_padding_too(implementation: str) -> None:
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    config = LlamaConfig(vocab_size=50, num_key_value_heads=1, attn_implementation=implementation, **sizes)
    ids = torch.randint(50, (2, 6))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    llama = LlamaForCausalLM(config).eval()
    assert explain(llama, {"input_ids": ids, "attention_mask": mask}, target=-1).method == "attn_lrp"


def test_the_default_of_an_encoder_is_lrp() -> None:
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    bert = BertForMaskedLM(BertConfig(vocab_size=50, **sizes)).eval()
    assert explain(bert, torch.randint(50, (2, 6)), target=1).method == "lrp"


def test_the_default_of_causal_attention_is_attn_lrp() -> None:
    host_trace = traced("gpt2")
    result = explain(host_trace, target=-1)
    assert torch.equal(result.scores, explain(host_trace, method=methods.AttnLrp(split="thirds"), target=-1).scores)
    assert not torch.equal(result.scores, explain(host_trace, method="attn_lrp", target=-1).scores)
    assert explain(host_trace, target=-1, split="halves").options["split"] == "halves"
    assert explain(host_trace, target=-1, by="layer").method == "logit"
    with pytest.raises(OptionError, match="attn_lrp takes no option 'meassure'; did you mean 'measure'"):
        explain(host_trace, target=-1, meassure="centered")


def test_a_matrix_of_a_pool_or_of_one_token_makes_no_model_causal() -> None:
    def encoder() -> nn.Module:
        return nn.TransformerEncoderLayer(8, 2, 8, 0, batch_first=True)

    class Resized(nn.Module):
        """An encoder of four tokens, of which an interpolation makes eight: a matrix without later tokens."""

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)
            self.layers = nn.ModuleList([encoder(), Doubled(), encoder()])

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(input_ids)
            for layer in self.layers:
                x = layer(x)
            return self.head(x[:, -1])

    class Doubled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.interpolate(x.mT, scale_factor=2, mode="linear").mT

    ids = torch.randint(50, (1, 4))
    assert explain(Resized().eval(), ids, target=-1).method == "lrp"
    llama = LlamaConfig(vocab_size=50, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    assert explain(LlamaForCausalLM(llama).eval(), ids[:, :1], target=-1).method == "attn_lrp"


@pytest.mark.parametrize("target", [None, -1])
def test_the_default_without_logits_is_alti_composed_over_layers(target: int | None) -> None:
    host_trace = trace(HOSTS["mamba2"].model().base_model, inputs())
    result, named = explain(host_trace, target=target), alti(host_trace, target=target, compose="rollout")
    assert torch.equal(result.scores, named.scores)
    assert (result.method, result.options) == ("alti", named.options)
    assert explain(host_trace, compose="none").dims == ("layer", "batch", "query", "key")
    assert repr(estimate(host_trace, target=target)) == repr(
        estimate(host_trace, target=target, method="alti", compose="rollout")
    )
    # `logit=` selects the default of models with logits, which needs a scalar of this output.
    assert explain(host_trace, logit=lambda out: out.last_hidden_state[:, -1].sum(-1)).method == "lrp"
    with pytest.raises(InputError, match=r"returns no logits; give `logit` as a function of its output"):
        explain(host_trace, logit=3)


def scaled_stream() -> Trace:
    """A trace without residual streams: the model multiplies each channel of its stream by a factor."""
    model, inputs = refused.HOSTS["Doge without logits"]()
    return trace(model.eval(), inputs)


def test_where_layers_cannot_be_composed_the_length_of_the_output_is_explained_with_a_warning() -> None:
    host_trace = scaled_stream()
    with pytest.warns(UserWarning, match=r"alti composed over all layers.* does not work here: alti needs the stream"):
        result = explain(host_trace, target=-1)
    named = explain(host_trace, target=-1, method="attn_lrp", split="thirds")
    assert result.method == "attn_lrp" and torch.equal(result.scores, named.scores)
    assert "This is attn_lrp of the length of the vector in out.last_hidden_state." in result.warnings[-1]


def test_options_of_layers_leave_the_layers_one_by_one() -> None:
    host_trace = scaled_stream()
    with pytest.warns(UserWarning, match="one by one, by latim"):
        assert explain(host_trace, target=-1, layers=["layers.0.self_attn"]).layers == ("layers.0.self_attn",)
    with pytest.raises(UncoveredError, match="alti needs the stream"):
        explain(host_trace, target=-1, residual=True)


@pytest.mark.slow
def test_of_layers_of_several_streams_the_largest_group_is_explained() -> None:
    model = transformers.CanineModel(tiny_config(transformers.CanineConfig)).eval()
    with pytest.warns(UserWarning, match=r"These are 3 of the 6 layers one by one, by latim"):
        result = explain(model, torch.arange(3, 10)[None], target=-1, activation="exact")
    assert len(result.layers) == 3


@pytest.mark.slow
def test_a_target_among_the_tokens_of_windows_is_refused() -> None:
    sizes = dict(num_windows=2, image_size=28, patch_size=7, num_hidden_layers=2, hidden_size=16, num_attention_heads=2)
    model = transformers.RfDetrDinov2Backbone(transformers.RfDetrDinov2Config(**sizes)).eval()
    host_trace = trace(model, torch.randn(1, 3, 28, 28))
    with pytest.raises(UncoveredError, match=r"runs on \d+ windows of \d+ tokens, and a target counts the \d+ tokens"):
        explain(host_trace, method="latim", target=-1)
    assert explain(host_trace).scores.isfinite().all()
    both = trace(model, torch.randn(2, 3, 28, 28))
    with pytest.raises(UncoveredError, match="has 8 sequences, such as windows, of the 2 of its input"):
        explain(both, method="knockout", target=-1)


@pytest.mark.parametrize("ask", [partial(explain, method="alti", compose="rollout"), estimate])
def test_a_model_outside_a_method_is_refused_with_the_methods_that_work(ask: Callable) -> None:
    host_trace = scaled_stream()
    with pytest.raises(UncoveredError) as refusal:
        ask(host_trace, target=-1)
    message = str(refusal.value)
    assert ("'alti' composed over all layers" in message) == (ask is estimate)
    named = re.findall(r"'(\w+)'", message.partition("Methods that work here")[2])
    assert {"latim", "raw", "rollout", "lrp"} <= set(named)
    for name in named:
        assert getattr(ask, "func", ask)(host_trace, method=name, target=-1).method == name


def test_tokens_label_one_sequence_or_several() -> None:
    texts = list("abcdef")
    both = explain(traced("mamba2"), tokens=[texts, texts[::-1]])
    assert both.tokens == (tuple(texts), tuple(texts[::-1]))
    one = explain(HOSTS["mamba2"].model(), inputs()["input_ids"][:1], tokens=texts, grid=(2, 3))
    assert one.tokens == (tuple(texts),)
    assert one.grid == (2, 3)
    with pytest.raises(InputError, match="2 lists of 6 texts"):
        explain(traced("mamba2"), tokens=texts)


def test_unknown_methods_and_missing_inputs_are_refused() -> None:
    with pytest.raises(OptionError, match=r"unknown method 'rolout'; did you mean 'rollout'\?"):
        explain(traced("mamba2"), method="rolout")
    with pytest.raises(InputError, match="Mamba2ForCausalLM needs inputs"):
        explain(HOSTS["mamba2"].model())
    with pytest.raises(InputError, match="a trace holds its inputs"):
        explain(traced("mamba2"), inputs())


def test_an_unknown_method_is_refused_before_the_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = HOSTS["mamba2"].model()
    monkeypatch.setattr(model, "forward", lambda *_, **__: pytest.fail("the model ran"))
    with pytest.raises(OptionError, match="unknown method"):
        explain(model, inputs(), method="rolout")
    with pytest.raises(OptionError, match="unknown method"):
        compare({"m": model}, inputs(), methods=["rollout", "latm"])


def test_a_comparison_holds_every_model_and_method() -> None:
    models = {"mamba2": HOSTS["mamba2"].model(), "llama": HOSTS["llama"].model(), "traced": traced("s4d")}
    comparison = compare(models, inputs(), methods=["rollout", "latim"], target=-1)
    assert list(comparison) == list(models)
    assert comparison.methods == ("rollout", "latim")
    for name, result in ((name, comparison[name]["rollout"]) for name in models):
        assert result.sizes == {"batch": BATCH, "key": LENGTH}, name
    assert torch.equal(comparison["traced"]["latim"].scores, latim(traced("s4d"), target=-1).scores)
    alone = rollout(trace(models["mamba2"], inputs()), target=-1)
    assert torch.equal(comparison["mamba2"]["rollout"].scores, alone.scores)


def test_each_model_of_a_comparison_runs_once() -> None:
    model = HOSTS["llama"].model()
    runs: list[int] = []
    model.register_forward_hook(lambda *_: runs.append(1))
    # Only the first trace of a model runs it several times, in search of unregistered mixers.
    trace(model, inputs())
    runs.clear()
    compare({"llama": model}, inputs(), methods=["raw", "rollout", "latim", "alti"])
    assert len(runs) == 1


def test_options_apply_to_all_methods_or_to_a_named_one() -> None:
    comparison = compare(
        {"s4d": traced("s4d")}, methods=["raw", "latim"], discard=0.5, latim={"p": 1}, raw={"heads": 0}
    )
    assert comparison["s4d"]["latim"].options["p"] == 1
    assert comparison["s4d"]["raw"].options["heads"] == 0
    assert all(comparison["s4d"][name].options["discard"] == 0.5 for name in ("raw", "latim"))
    override = compare({"s4d": traced("s4d")}, methods=["raw", "latim"], discard=0.5, latim={"discard": 0.0})
    assert override["s4d"]["latim"].options["discard"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"p": 1}, "rollout takes no option 'p'"),
        ({"latim": {"scope": "core"}}, "latim takes no option 'scope'"),
        ({"latim": 1}, "latim=1: options under a method's name are a mapping"),
        ({"alti": {"compose": "rollout"}}, "for one of the methods that are compared: rollout, latim"),
    ],
)
def test_an_invalid_option_is_refused_with_the_method_s_name(options: dict, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        compare({"s4d": traced("s4d")}, methods=["rollout", "latim"], **options)


def test_an_empty_comparison_is_refused() -> None:
    with pytest.raises(InputError, match="models is an empty dict; compare needs a mapping from names"):
        compare({}, inputs())
    # With checked signatures the type of the argument is refused before.
    with pytest.raises((InputError, TypeCheckError), match="models"):
        compare(traced("s4d"))  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="give a list of method names"):
        compare({"s4d": traced("s4d")}, methods=[])
    with pytest.raises(OptionError, match="give a list of method names"):
        compare({"s4d": traced("s4d")}, methods="rollout")

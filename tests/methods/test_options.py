"""Options of the methods: defaults, errors, and reproduction of a result from its stored options."""

import inspect
from typing import Any, get_args

import pytest
import torch

from tests.methods.hosts import traced
from unilinattn import methods, options
from unilinattn.errors import OptionError
from unilinattn.evaluation.evaluate import evaluate
from unilinattn.evaluation.samples import Sample
from unilinattn.frozen.run import By
from unilinattn.methods import compare, estimate, explain
from unilinattn.methods.needs import TRIALS
from unilinattn.operator.contributions import TAP_FUNCTIONS
from unilinattn.operator.scopes import SCOPES
from unilinattn.operator.selection import REDUCTIONS
from unilinattn.options import Need, Options, Raw
from unilinattn.options.bases import Activation, MapOptions
from unilinattn.registry import list_methods
from unilinattn.results.attribution import Attribution
from unilinattn.testing.promote import promoted

METHODS = sorted(
    name for name, method in list_methods().items() if method.function.__module__.startswith("unilinattn.")
)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_file_a_function_and_a_class_of_its_name(name: str) -> None:
    method = list_methods()[name]
    assert method.summary and method.function is getattr(methods, name)
    assert method.function.__module__ == f"unilinattn.methods.{name}"
    model = method.options
    assert model is getattr(methods, "".join(map(str.capitalize, name.split("_")))) and model in options.METHODS
    assert (model.name, model.needs, model.summary()) == (name, method.needs, method.summary) and model.question
    assert all(field.description for field in model.model_fields.values())


def test_an_object_is_printed_as_it_is_written() -> None:
    for text in ("Latim()", "Latim(p=1.0)", "Alti(compose='rollout')", "Logit(logit=(3, ' Paris'), by='layer')"):
        assert repr(eval(text, vars(methods))) == str(eval(text, vars(methods))) == text
    composed = methods.Latim(compose="rollout")
    assert (repr(composed), composed.residual, composed.normalize) == ("Latim(compose='rollout')", True, "rows")
    assert composed == methods.Latim(compose="rollout", residual=True) != methods.Latim()
    assert list(inspect.signature(methods.Latim).parameters) == list(methods.Latim.model_fields)


@pytest.mark.parametrize("name", METHODS)
def test_defaults_are_stored_in_the_result(name: str) -> None:
    method = list_methods()[name]
    assert method.options is not None
    result = method.function(traced("mamba2"), target=-1)
    assert dict(result.options) == {**method.options().model_dump(), "target": -1}


CHANGED: list[tuple[str, dict[str, Any]]] = [
    ("raw", dict(scope="unified", heads=[0, 1], sign="abs", discard=0.2, normalize="min-max", layers=[-1])),
    ("raw", dict(heads=1, layers=["backbone.layers.0.mixer"])),
    ("rollout", dict(scope="mixer", heads="max", sign="clamp", normalize="rows", start_layer=1)),
    ("attribution", dict(logit=(3, 1), sign="keep", discard=0.5)),
    ("latim", dict(p=float("inf"), activation="silu", bias="query", residual=True, normalize="rows", layers="mean")),
    ("alti", dict(activation="relu", compose="rollout")),
    ("latim", dict(p=1.0, compose="rollout")),
    ("raw", dict(sign="abs", compose="rollout")),
    ("attribution", dict(start_layer=0.5)),
    ("attribution", dict(gradient="per-head", gradient_axis="key")),
    ("integrated_gradients", dict(baseline=3, n_steps=2)),
    ("knockout", dict(logit=(3, 1), layers=[-1], window=1, heads=[0, 1], replace="mean", measure="log-probability")),
]


@pytest.mark.parametrize(("name", "options"), CHANGED)
def test_a_saved_result_can_be_reproduced_from_its_options(name: str, options: dict[str, Any], tmp_path: Any) -> None:
    trace = traced("mamba2")
    with promoted():
        result = explain(trace, method=name, target=[-1, 1], **options)
        assert {key: result.options[key] for key in options} == {
            key: list(value) if isinstance(value, tuple) else value for key, value in options.items()
        }
        stored = Attribution.load(result.save(tmp_path / "result.safetensors"))
        again = explain(trace, method=stored.method, **stored.options)
    assert torch.equal(again.scores, result.scores)
    assert again.options == stored.options == result.options


OBJECTS = [
    methods.Latim(p=1),
    methods.Latim(compose="rollout"),
    methods.Raw(heads=[0, 1], layers=[-1]),
    methods.Logit(logit=(3, 1), by="depth"),
    methods.Alti(),
]


@pytest.mark.parametrize("method", OBJECTS, ids=repr)
def test_an_object_is_the_name_with_its_options(method: Options) -> None:
    trace = traced("mamba2")
    result = explain(trace, method=method, target=-1)
    same = explain(trace, method=method.name, target=-1, **method.keywords)
    assert torch.equal(result.scores, same.scores) and result.options == same.options
    assert estimate(trace, method=method, target=-1) == estimate(
        trace, method=method.name, target=-1, **method.keywords
    )
    compared = compare({"a": trace}, methods=[method, method.name], target=-1)["a"]
    assert torch.equal(compared[method.label].scores, result.scores)
    assert list(compared) == list(dict.fromkeys([method.label, method.name]))


def test_an_object_takes_no_options_beside_it() -> None:
    for run in (
        lambda: explain(traced("mamba2"), method=methods.Latim(p=1), layers=0),
        lambda: estimate(traced("mamba2"), method=methods.Latim(p=1), layers=0),
        lambda: compare({"a": traced("mamba2")}, methods=["raw", methods.Latim(p=1)], layers=0),
    ):
        with pytest.raises(OptionError, match=r"Latim\(p=1.0\) has its options; give layers to Latim, or the name 'la"):
            run()


@pytest.mark.usefixtures("unchecked")
def test_the_class_of_a_method_is_no_object() -> None:
    trace: Any = traced("mamba2")
    cls: Any = methods.Latim
    sample = [Sample(inputs=torch.arange(4)[None])]
    for run in (
        lambda: explain(trace, method=cls),
        lambda: estimate(trace, method=cls),
        lambda: compare({"a": trace}, methods=[cls]),
        lambda: evaluate({"a": trace.host}, sample, [cls], ["ap"]),
        lambda: evaluate({"a": trace.host}, sample, {"mine": cls}, ["ap"]),
    ):
        with pytest.raises(OptionError, match=r"Latim is the class of a method; give an object of it, Latim\(\)\."):
            run()


BAD: list[tuple[str, dict[str, Any], str]] = [
    (
        "raw",
        {"heds": "mean"},
        r"takes no option 'heds'; did you mean 'heads'\? Accepted: by_head, compose, discard, heads",
    ),
    ("raw", {"start_layer": 1}, r"start_layer belongs to variant='published-code'; layers=\[...\] selects layers"),
    ("rollout", {"layers": "mean"}, r"rollout takes no option 'layers'"),
    ("latim", {"scope": "core"}, r"latim takes no option 'scope'"),
    ("alti", {"p": 2}, r"alti takes no option 'p'"),
    (
        "raw",
        {"scope": "cores"},
        r"raw does not accept scope='cores'; did you mean 'core'\? Accepted: core, mixer, unif",
    ),
    ("raw", {"scope": "layer"}, r"scope='layer'.*entries of 'layer' are vectors: see 'latim', 'alti'"),
    (
        "raw",
        {"heads": "median"},
        r"heads='median'; did you mean 'mean'\? Accepted: abs-mean, geometric-mean, max, mean, min, product",
    ),
    ("raw", {"heads": []}, r"raw does not accept heads=\[\]"),
    ("raw", {"heads": 99}, r"out of range: this scope has 4 heads"),
    ("raw", {"heads": True}, r"raw does not accept heads=True"),
    ("raw", {"sign": "clip"}, r"sign='clip'.* Accepted: abs, clamp, keep"),
    ("raw", {"discard": 1.0}, r"discard=1.0: Input should be less than 1"),
    ("raw", {"discard": "0.5"}, r"discard='0.5': Input should be a valid number"),
    ("raw", {"normalize": "row"}, r"normalize='row'; did you mean 'rows'\?"),
    ("raw", {"layers": "mea"}, r"layers='mea'; did you mean 'mean'\?"),
    ("raw", {"layers": [7]}, r"raw: layer 7 is out of range; Mamba2ForCausalLM has layers 0 to 1"),
    ("raw", {"layers": ["backbone.layers.0.mixr"]}, r"no layer .*did you mean 'backbone.layers.0.mixer'"),
    ("raw", {"layers": [0, -2]}, r"names a layer twice"),
    ("rollout", {"start_layer": 2}, r"start_layer=2 leaves no layer; Mamba2ForCausalLM has layers 0 to 1"),
    ("rollout", {"start_layer": -1}, r"start_layer=-1: Input should be greater than or equal to 0"),
    ("attribution", {"logit": "cat"}, r"attribution does not accept logit='cat'.*a token or class id"),
    ("latim", {"p": 0.5}, r"p=0.5: Input should be greater than or equal to 1.*order of the norm"),
    ("latim", {"p": float("nan")}, r"latim does not accept p=nan"),
    ("latim", {"activation": "slu"}, r"activation='slu'; did you mean 'silu'\?"),
    ("latim", {"bias": "row"}, r"bias='row'.* Accepted: column, query"),
    ("latim", {"residual": 1}, r"latim does not accept residual=1"),
    ("alti", {"compose": "rollout", "layers": "mean"}, r"alti: compose='rollout' multiplies the layers' maps"),
    ("alti", {"rollout": True}, r"alti takes no option 'rollout'"),
    ("raw", {"compose": "rolout"}, r"raw does not accept compose='rolout'; did you mean 'rollout'\?"),
    ("latim", {"compose": "rollout", "residual": False}, r"latim: compose='rollout' .* leave residual=False out"),
    ("latim", {"compose": "rollout", "normalize": "none"}, r"latim: compose='rollout' .* leave normalize='none' out"),
]


@pytest.mark.parametrize(("name", "options", "message"), BAD)
def test_invalid_options_are_refused_with_the_accepted_values(name: str, options: dict[str, Any], message: str) -> None:
    method = list_methods()[name]
    with pytest.raises(OptionError, match=message):
        method.function(traced("mamba2"), **options)
    # An object checks its own options, and its keywords are checked again.
    with pytest.raises(OptionError, match=message):
        method.function(traced("mamba2"), **method.options(**options).keywords)


@pytest.mark.parametrize("name", ["raw", "latim", "alti", "knockout"])
def test_an_index_selects_one_layer(name: str) -> None:
    trace = traced("mamba2")
    one, listed = (explain(trace, method=name, layers=layers, target=-1) for layers in (1, [1]))
    assert torch.equal(one.scores, listed.scores) and one.layers == listed.layers == (trace.layers[1].name,)
    assert one.options["layers"] == 1
    if list_methods()[name].cost is not None:
        first, second = (estimate(trace, method=name, layers=layers, target=-1) for layers in (1, [1]))
        assert first == second
    with pytest.raises(OptionError, match=f"{name}: layer 2 is out of range"):
        explain(trace, method=name, layers=2)
    with pytest.raises(OptionError, match=f"{name} does not accept layers=True"):
        explain(trace, method=name, layers=True)


def test_accepted_names_agree_with_the_operators() -> None:
    scope = get_args(MapOptions.model_fields["scope"].annotation)
    assert set(scope) == set(SCOPES) - {"layer"}
    assert set(get_args(get_args(MapOptions.model_fields["heads"].annotation)[0])) == set(REDUCTIONS)
    assert set(get_args(Activation)) == {"exact", *TAP_FUNCTIONS}
    assert get_args(methods.Logit.model_fields["by"].annotation) == get_args(By)
    assert get_args(Need) == tuple(TRIALS)


def test_options_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Raw().scope = "mixer"

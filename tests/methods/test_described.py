"""Texts about the options of methods."""

import inspect
import re
from typing import get_args

import unilinattn
from tools import surface
from unilinattn.methods.described import option_texts, signature_text
from unilinattn.methods.options import MapOptions
from unilinattn.registry import Method, list_methods


def test_options_are_described_by_their_types() -> None:
    texts = option_texts(list_methods()["raw"])
    assert {text.name: text.accepted for text in texts} == {
        "scope": "'core', 'mixer', 'unified'",
        "heads": "'mean', 'max', 'min', 'abs-mean', 'product', 'geometric-mean' or int or a list of int",
        "sign": "'keep', 'clamp', 'abs'",
        "discard": "float >= 0, < 1",
        "normalize": "'none', 'rows', 'min-max'",
        "layers": "'all', 'mean' or int or a list of int or str",
        "compose": "'none', 'rollout'",
        "by_head": "bool",
    }
    assert {text.name: text.default for text in texts}["discard"] == "0.0"
    assert all(text.meaning for text in texts)


def test_a_plugin_without_a_model_of_its_options_has_none() -> None:
    plugin = Method("mine", "My scores.", lambda trace, target=None: None)
    assert option_texts(plugin) == []
    assert signature_text([plugin]) == "mine: My scores."


def test_the_help_of_explain_lists_the_options_of_every_method() -> None:
    text = inspect.getdoc(unilinattn.explain) or ""
    for name, method in list_methods().items():
        if method.function.__module__.startswith("unilinattn."):
            (block,) = re.findall(rf"^{name}: .*\n((?:    .*\n?)*)", text, re.M)
            assert method.options is not None
            assert re.findall(r"^    (\w+) = ", block, re.M) == list(method.options.model_fields)
    assert "\n    p = 2.0: float >= 1\n" in text and text.startswith("Explain a model on inputs by one method.")


def test_an_option_has_the_same_type_in_the_signatures() -> None:
    heads = MapOptions.model_fields["heads"].annotation
    assert (
        surface.source(heads)
        == "Literal['mean', 'max', 'min', 'abs-mean', 'product', 'geometric-mean'] | int | Sequence[int]"
    )
    logit = list_methods()["logit"].options.model_fields["logit"].annotation
    assert surface.source(logit, ["str"]) == "int | tuple[int, int] | Callable[[Any], Any] | str | None"
    assert type(None) in get_args(logit)

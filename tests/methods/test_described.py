"""Texts about the options of methods."""

import inspect
import re

import unilinattn
from unilinattn.options import Raw
from unilinattn.options.described import option_texts, signature_text
from unilinattn.registry import list_methods


def test_options_are_described_by_their_types() -> None:
    texts = option_texts(Raw)
    assert {text.name: text.accepted for text in texts} == {
        "scope": "'core', 'mixer', 'unified'",
        "heads": "'mean', 'max', 'min', 'abs-mean', 'product', 'geometric-mean' or int or a list of int",
        "sign": "'keep', 'clamp', 'abs'",
        "discard": "float >= 0, < 1",
        "normalize": "'none', 'rows', 'min-max'",
        "layers": "'all', 'mean' or int or a list of int or str",
        "compose": "'none', 'rollout'",
        "by_head": "bool",
        "start_layer": "int >= 0 or float > 0, < 1",
        "variant": "'formula', 'published-code'",
    }
    assert {text.name: text.default for text in texts}["discard"] == "0.0"
    assert all(text.meaning for text in texts)


def test_a_plugin_without_a_model_of_its_options_has_none() -> None:
    assert option_texts(None) == []
    assert signature_text("mine", "My scores.", None) == "mine: My scores."


def test_the_help_of_explain_lists_the_options_of_every_method() -> None:
    text = inspect.getdoc(unilinattn.explain) or ""
    for name, method in list_methods().items():
        if method.function.__module__.startswith("unilinattn."):
            (block,) = re.findall(rf"^{name}: .*\n((?:    .*\n?)*)", text, re.M)
            assert method.options is not None
            assert re.findall(r"^    (\w+) = ", block, re.M) == list(method.options.model_fields)
    assert "\n    p = 2.0: float >= 1\n" in text and text.startswith("Explain a model on inputs by one method.")

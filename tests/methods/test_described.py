"""Texts about the options of methods."""

from unilinattn.methods.described import option_texts, signature_text
from unilinattn.registry import Method, list_methods


def test_options_are_described_by_their_types() -> None:
    texts = option_texts(list_methods()["raw"])
    assert {text.name: text.accepted for text in texts} == {
        "scope": "'core', 'mixer', 'unified'",
        "heads": "'mean', 'max', 'min', 'abs-mean', 'product' or int or a list of int",
        "sign": "'keep', 'clamp', 'abs'",
        "discard": "float >= 0, < 1",
        "normalize": "'none', 'rows', 'min-max'",
        "layers": "'all', 'mean' or a list of int or str",
        "compose": "'none', 'rollout'",
    }
    assert {text.name: text.default for text in texts}["discard"] == "0.0"
    assert all(text.meaning for text in texts)


def test_a_plugin_without_a_model_of_its_options_has_none() -> None:
    plugin = Method("mine", "My scores.", lambda trace, target=None: None)
    assert option_texts(plugin) == []
    assert signature_text([plugin]) == "mine: My scores."

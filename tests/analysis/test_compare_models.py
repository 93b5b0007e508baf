"""Models side by side on texts without known answers, against loops over rows and runs of the model by itself."""

import json
import math
from copy import deepcopy
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.analysis.plain import shares, spearman
from tests.texts import PARIS, VOCABULARY, mamba, tokenizer
from unilinattn import explain, trace
from unilinattn.analysis import compare, report, similarity
from unilinattn.analysis.compare import METHODS, compare_models
from unilinattn.analysis.comparison import RANDOM, ModelComparison, worst
from unilinattn.analysis.similarity import unique
from unilinattn.cli import arguments
from unilinattn.errors import InputError, OptionError, UncoveredError
from unilinattn.evaluation.perturbation import TENTHS
from unilinattn.evaluation.scorers import DRAWS
from unilinattn.registry import Method, list_methods, overridden
from unilinattn.testing import promoted

TEXTS = (PARIS, "London is")
WORDS = ["[UNK]", "The", "capital", "of", "France", "England", "is", "Paris", "London"]


@cache
def words() -> Any:
    """A tokenizer of whole words."""
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


@cache
def llama(vocabulary: int = VOCABULARY) -> LlamaForCausalLM:
    torch.manual_seed(1)
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **sizes)).eval()


@cache
def compared() -> ModelComparison:
    """Two models in float64 with one tokenizer, and one with another."""
    with promoted():
        pairs = {
            "mamba": (doubled(mamba()), tokenizer()),
            "llama": (doubled(llama()), tokenizer()),
            "words": (doubled(llama(len(WORDS))), words()),
        }
        return compare_models(pairs, TEXTS, methods=["raw", "alti"])


def maps(model: Any, text: str) -> list[Tensor]:
    """The map of each layer, (head, query, key)."""
    return [layer.operator.matrix(heads=None)[0] for layer in trace(model, text, tokenizer=tokenizer()).layers]


def doubled(model: Any) -> Any:
    return deepcopy(model).double()


@pytest.mark.slow
def test_statistics_are_averaged_over_the_rows_of_all_texts() -> None:
    with promoted():
        found = [maps(doubled(mamba()), text) for text in compared().texts]
    measured = compared().models["mamba"].statistics
    for layer, each in enumerate(measured):
        rows = [(text[layer], i) for text in found for i in range(1, text[layer].shape[1])]
        assert each.rows == len(rows)
        for head in (0, 5):
            distances = [
                sum(p * (i - j) for j, p in enumerate(shares(alpha[head, i, : i + 1].tolist()))) for alpha, i in rows
            ]
            assert float(each.distance[head]) == pytest.approx(sum(distances) / len(rows), abs=1e-10)


def plain_similarity(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Rank correlation and divergence of two causal maps (query, key), averaged over rows of two or more keys."""
    ranks, divergences = [], []
    for i in range(1, len(a)):
        p, q = (shares(alpha[i, : i + 1].tolist()) for alpha in (a, b))
        ranks.append(spearman(p, q))
        mean = [(x + y) / 2 for x, y in zip(p, q, strict=True)]
        relative = [sum(x * math.log2(x / m) for x, m in zip(r, mean, strict=True) if x) for r in (p, q)]
        divergences.append(sum(relative) / 2)
    return sum(ranks) / len(ranks), sum(divergences) / len(divergences)


@pytest.mark.long
def test_similarities_are_averaged_over_texts_and_pairs_of_layers() -> None:
    with promoted():
        ours, theirs = ([maps(doubled(model), text) for text in compared().texts] for model in (mamba(), llama()))
    values = [
        plain_similarity(a.mean(0), b.mean(0))
        for first, second in zip(ours, theirs, strict=True)
        for a in first
        for b in second
    ]
    expected = [sum(column) / len(values) for column in zip(*values, strict=True)]
    assert compared().between("mamba", "llama") == pytest.approx(expected, abs=1e-10)
    within = [plain_similarity(first[0].mean(0), first[1].mean(0)) for first in ours]
    expected = [sum(column) / len(within) for column in zip(*within, strict=True)]
    assert compared().between("mamba", "mamba") == pytest.approx(expected, abs=1e-10)
    # One layer has no other.
    assert compared().between("llama", "llama") is None


def test_maps_are_compared_only_where_the_tokens_are_the_same() -> None:
    found = compared()
    assert found.compared[("mamba", "llama")] == 2 and ("mamba", "words") not in found.compared
    assert found.between("llama", "words") is None
    assert found.similarity.names == (
        *(f"mamba: backbone.layers.{i}.mixer" for i in range(2)),
        "llama: model.layers.0.self_attn",
        "words: model.layers.0.self_attn",
    )
    assert found.similarity.divergence[3].isnan().tolist() == [True, True, True, False]
    printed = repr(found)
    assert "The maps of llama and words are compared on 0 of 2 texts" in " ".join(printed.split())
    assert "The maps of mamba and llama are compared" not in printed
    with pytest.raises(OptionError, match="no model 'lama' was compared; did you mean 'llama'"):
        found.between("lama", "words")


def test_the_deletion_curve_is_that_of_single_runs() -> None:
    with promoted():
        model, text = doubled(mamba()), compared().texts[0]
        run = trace(model, text, tokenizer=tokenizer())
        scores = explain(run, method="raw", target=-1).scores.mean(0)[0]
        embeddings = model.get_input_embeddings()(run.text.arguments["input_ids"])[0].detach()
        order = sorted(range(len(scores) - 1), key=lambda j: -float(scores[j]))
        with torch.no_grad():
            label = int(model(inputs_embeds=embeddings[None]).logits[0, -1].argmax())
            curve = []
            for fraction in TENTHS:
                changed = embeddings.clone()
                changed[order[: math.ceil(fraction * len(order) - 1e-9)]] = 0
                curve.append(float(model(inputs_embeds=changed[None]).logits[0, -1].softmax(-1)[label]))
    found = compared().models["mamba"].deletion
    assert found["raw"].values[0].tolist() == pytest.approx(curve, abs=1e-10)
    mean = [sum(column) / 2 for column in found["raw"].values.T.tolist()]
    assert found["raw"].area == pytest.approx(sum((a + b) / 2 for a, b in pairwise(mean)) / 10, abs=1e-10)
    assert list(found) == ["raw", "alti", "alti (composed)", RANDOM]
    # The ends of a curve do not depend on the order, and the draws of an order differ between them.
    for end in (0, -1):
        assert float(found[RANDOM].values[0, end]) == pytest.approx(curve[end], abs=1e-10)
    assert found[RANDOM].values.shape == (2, len(TENTHS)) and DRAWS > 1
    assert not torch.equal(found["raw"].values, found["alti"].values)


def test_errors_and_labels_are_those_of_the_layers() -> None:
    one = compared().models["words"]
    assert one.tokens == (6, 2) and one.host == "LlamaForCausalLM" and one.kinds == ("softmax attention",)
    assert one.worst_error == one.reconstruction_error["model.layers.0.self_attn"] < 1e-14
    assert compared().shown["words"]["raw"].tokens == (("The", " capital", " of", " France", " is", " Paris"),)
    assert unique(["a", "b", "a", "a"]) == ("a", "b", "a (call 2)", "a (call 3)")


def test_the_worst_error_of_the_texts_is_kept_and_a_nan_is_the_worst() -> None:
    assert worst([1e-7, None, 3e-7]) == 3e-7
    assert math.isnan(worst([1e-7, float("nan"), 3e-7]))
    assert worst([None]) is None


@pytest.mark.long
def test_an_uncovered_method_or_measurement_is_reported_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(trace: Any, *, target: Any = None) -> Any:
        raise UncoveredError("mine covers nothing.")

    def unmeasured(*arguments: Any, **options: Any) -> Any:
        raise UncoveredError("no maps here.")

    monkeypatch.setattr(compare, "map_statistics", unmeasured)
    monkeypatch.setattr(similarity, "layer_similarity", unmeasured)
    with overridden(Method("mine", "Refuses.", refuses)):
        found = compare_models(
            {"a": (mamba(), tokenizer()), "b": (llama(), tokenizer())}, PARIS, methods=["mine", "raw"]
        )
    assert found.models["a"].statistics == "no maps here." and found.similarity is None
    assert found.not_compared == {"a": "no maps here.", "b": "no maps here."}
    assert str(found.models["b"].deletion["mine"]).startswith("mine covers nothing. Methods that work here")
    printed = repr(found)
    for line in ("No statistics of a: no maps here.", "No mine of b: mine covers", "No similarity of b: no maps here."):
        assert line in printed
    stored = report.numbers([found])["comparisons"][0]["models"]["a"]
    assert stored["statistics"] == "no maps here." and stored["deletion"]["mine"].startswith("mine covers nothing.")
    assert "<h2>Layers</h2>" in report.page([found])


def test_a_model_without_maps_leaves_the_others_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = similarity.layer_similarity

    def partly(traces: Any, **options: Any) -> Any:
        if "b" in traces:
            raise UncoveredError("b has no maps.")
        return measure(traces, **options)

    monkeypatch.setattr(similarity, "layer_similarity", partly)
    pairs = {name: (model, tokenizer()) for name, model in (("a", mamba()), ("b", llama()), ("c", llama()))}
    found = compare_models(pairs, PARIS, methods=["raw"])
    assert found.not_compared == {"b": "b has no maps."}
    assert found.compared == {("a", "a"): 1, ("a", "c"): 1, ("c", "a"): 1, ("c", "c"): 1}
    assert found.between("a", "c") is not None and found.between("a", "b") is None


def test_the_numbers_are_plain_values_and_texts_are_escaped() -> None:
    numbers = report.numbers([compared()])
    assert json.loads(json.dumps(numbers, allow_nan=False)) == numbers
    (stored,) = numbers["comparisons"]
    assert stored["similarity"]["divergence"][0][3] is None
    assert stored["models"]["words"]["statistics"][0]["memory"] == [
        float(value) for value in compared().models["words"].statistics[0].memory
    ]
    unsafe = compare_models({"<b>": (llama(), tokenizer())}, "<script>alert(1)</script>", methods=["raw"])
    page = report.page([unsafe])
    assert "<script>alert" not in page and "&lt;script&gt;alert(1)" in page and "<b> side" not in page


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"models": {}}, InputError, "models is empty or no mapping"),
    ({"texts": []}, InputError, "there are no texts"),
    ({"texts": [PARIS, ""]}, InputError, "text 1 is empty; give a text"),
    ({"texts": ["T"]}, InputError, "model a, sample text 0: it has 1 token; two or more"),
    ({"models": {"a": (llama(9), tokenizer())}}, InputError, "model a, sample text 0: .*ids"),
    ({"methods": ["rolout"]}, OptionError, "did you mean 'rollout'"),
    ({"methods": "raw"}, OptionError, "give a list of method names"),
    ({"scope": "cores"}, OptionError, "did you mean 'core'"),
    ({"masking": "blur"}, OptionError, "for images"),
]


@pytest.mark.parametrize(("given", "error", "message"), BAD)
def test_bad_input_is_refused_with_the_accepted_values(
    given: dict[str, Any], error: type[Exception], message: str
) -> None:
    call: dict[str, Any] = {"models": {"a": (llama(), tokenizer())}, "texts": [PARIS], "methods": ["raw"], **given}
    with pytest.raises(error, match=message):
        compare_models(call.pop("models"), call.pop("texts"), **call)


def test_values_of_other_types_are_refused() -> None:
    with pytest.raises(InputError, match=r"models\['a'\] is a LlamaForCausalLM; give a pair \(model, tokenizer\)\."):
        compare_models({"a": llama()}, PARIS)  # type: ignore[dict-item]
    with pytest.raises(InputError, match="text 1 is a int; give a text of two tokens or more"):
        compare_models({"a": (llama(), tokenizer())}, [PARIS, 3])  # type: ignore[list-item]


def test_the_defaults_are_those_of_the_command_line() -> None:
    assert METHODS == arguments.METHODS and set(METHODS) <= set(list_methods())

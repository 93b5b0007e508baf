"""A function of the output has a number for each sequence that no other sequence changes, or runs one at a time."""

from collections.abc import Callable
from typing import Any

import pytest
import transformers
from torch import Tensor, nn

import unilinattn as ula
from tests.tracing.test_towers import IDS, REAL, WORDS, clip, images
from unilinattn.errors import InputError, UncoveredError
from unilinattn.methods.targets import similarity_of_pairs
from unilinattn.reruns.separate import is_separate
from unilinattn.testing import randomize, relative_error

Function = Callable[[Any], Tensor]

PAIRS = {"input_ids": IDS, "attention_mask": REAL, "pixel_values": images()}
METHODS = ["logit", "lrp", "attn_lrp", "input_x_gradient", "smoothgrad", "occlusion", "knockout"]


def own(out: Any) -> Tensor:
    return out.logits_per_image.diagonal()


CROSSING: dict[str, Function] = {
    "the first text": lambda out: out.logits_per_image[:, 0],
    "the last image": lambda out: out.logits_per_text[:, -1],
    "a probability among the texts": lambda out: out.logits_per_image.softmax(1).diagonal(),
    "less the mean of the batch": lambda out: own(out) - own(out).mean(),
}


def explained(inputs: dict[str, Tensor], method: str, logit: Function | None) -> Any:
    return ula.explain(clip(), inputs, method=method, target=-1, logit=logit, progress=False)


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_a_pair_among_others_has_the_scores_of_itself(method: str) -> None:
    # The similarity of each pair is explained by default.
    whole = explained(PAIRS, method, None)
    assert repr(whole.options["logit"]) == "'the diagonal of out.logits_per_image'"
    for pair in range(2):
        single = explained({name: value[pair : pair + 1] for name, value in PAIRS.items()}, method, own)
        assert relative_error(whole.scores[pair : pair + 1], single.scores) < 1e-5
        assert whole.scores[pair, :5].any() and whole.scores[pair, 5:8].any()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CROSSING)
@pytest.mark.parametrize("texts", ["different", "equal"])
def test_a_number_that_reads_other_sequences_is_refused(name: str, method: str, texts: str) -> None:
    text = {"input_ids": IDS, "attention_mask": REAL}
    text = text if texts == "different" else {name: value[:1].repeat(2, 1) for name, value in text.items()}
    with pytest.raises(InputError, match=r"other sequences change.*lambda out: out.logits_per_image.diagonal\(\)"):
        explained({**text, "pixel_values": images()}, method, CROSSING[name])


@pytest.mark.long
@pytest.mark.parametrize("method", ["occlusion", "knockout", "smoothgrad"])
@pytest.mark.parametrize("name", ["the first text", "the last image"])
def test_the_table_of_a_single_pair_is_read_in_runs_one_at_a_time(name: str, method: str) -> None:
    pair = {key: value[:1] for key, value in PAIRS.items()}
    scores = explained(pair, method, CROSSING[name]).scores
    assert relative_error(scores, explained(pair, method, own).scores) < 1e-5
    assert scores[0, :5].any() and scores[0, 5:].any()


@pytest.mark.long
def test_one_image_with_several_texts_is_refused_with_a_call_that_works() -> None:
    inputs = {**PAIRS, "pixel_values": images()[:1]}
    for method in ("attn_lrp", "occlusion", "rollout"):
        with pytest.raises(UncoveredError, match="pixel_values has one for the 2 of input_ids: give") as caught:
            ula.explain(clip(), inputs, method=method, progress=False)
    call = str(caught.value).partition("give ")[2].partition(" and explain")[0]
    assert call == "pixel_values.expand(2, -1, -1, -1)"
    several = ula.explain(clip(), {**PAIRS, "pixel_values": images()[:1].expand(2, -1, -1, -1)}, progress=False)
    assert several.method == "attn_lrp" and several.scores.shape == (2, 5 + WORDS)
    with pytest.raises(UncoveredError, match=r"input_ids has one for the 2 of pixel_values: give input_ids.expand"):
        explained({**PAIRS, "input_ids": IDS[:1], "attention_mask": REAL[:1]}, "logit", own)


class Relative(nn.Module):
    """Divides the similarity of each pair by those of all images with its text, or of each with a row of captions."""

    def __init__(self, captions: bool) -> None:
        super().__init__()
        self.encoder, self.captions = clip(), captions

    def forward(self, input_ids: Tensor, attention_mask: Tensor, pixel_values: Tensor) -> dict[str, Tensor]:
        table: Tensor = self.encoder(input_ids, pixel_values, attention_mask).logits_per_image
        sizes = table.exp()
        return {"logits_per_image": table.expand(-1, 3 * len(table)) if self.captions else sizes / sizes.sum(0)}


@pytest.mark.long
@pytest.mark.parametrize("pairs", [1, 2])
def test_similarities_that_other_pairs_change_are_no_default(pairs: int) -> None:
    inputs = {name: value[:pairs] for name, value in PAIRS.items()}
    assert similarity_of_pairs(ula.trace(clip(), inputs, progress=False)) is not None
    assert similarity_of_pairs(ula.trace(Relative(captions=False), inputs, progress=False)) is None


@pytest.mark.long
def test_a_table_of_other_things_than_pairs_is_explained() -> None:
    inputs = {name: value[:1] for name, value in PAIRS.items()}
    result = ula.explain(Relative(captions=True), inputs, method="logit", progress=False)
    assert str(result.options["logit"]).startswith("the length of") and result.scores.any()


class Similarities(nn.Module):
    """Returns the table of similarities, whose columns would be classes if there were as many for any batch."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = clip()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, pixel_values: Tensor) -> Tensor:
        table: Tensor = self.encoder(input_ids, pixel_values, attention_mask).logits_per_image
        return table


@pytest.mark.long
@pytest.mark.parametrize("method", ["attn_lrp", "input_x_gradient", "knockout"])
def test_a_table_of_similarities_has_no_logits_of_classes(method: str) -> None:
    with pytest.raises(InputError, match=r"each logit has a number.*logit=lambda out: out.diagonal\(\) does"):
        ula.explain(Similarities(), PAIRS, method=method, target=-1, progress=False)
    result = ula.explain(
        Similarities(), PAIRS, method=method, target=-1, logit=lambda out: out.diagonal(), progress=False
    )
    assert relative_error(result.scores, explained(PAIRS, method, own).scores) < 1e-5
    # Of a single pair the variants in a run are no classes either.
    pair = {name: value[:1] for name, value in PAIRS.items()}
    single = ula.explain(Similarities(), pair, method=method, target=-1, progress=False)
    assert relative_error(single.scores, explained(pair, method, own).scores) < 1e-5


def test_as_many_classes_as_sequences_are_logits() -> None:
    config = transformers.BertConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=290, num_labels=2
    )
    model = randomize(transformers.BertForSequenceClassification(config).eval())
    inputs = {"input_ids": IDS, "attention_mask": REAL}
    assert ula.explain(model, inputs, method="attn_lrp", progress=False).scores.shape == (2, WORDS)


def experts() -> nn.Module:
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=290)
    config = transformers.MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=4, pad_token_id=3)
    return randomize(transformers.MixtralForCausalLM(config).eval())


@pytest.mark.parametrize("batch", [1, 2])
def test_logits_of_a_sequence_are_its_own(batch: int) -> None:
    # Experts compute the tokens of all sequences together, and a batch has padding.
    inputs = {"input_ids": IDS[:batch], "attention_mask": REAL[:batch]}
    traced = ula.trace(experts(), inputs, progress=False)
    assert is_separate(traced, lambda out: out.logits[:, -1, 5]) is True
    assert is_separate(traced, lambda out: out.logits[:, -1, 5] - out.logits[:, -1, 6]) is True
    assert is_separate(traced, lambda out: out.logits[:, -1, 5] + out.logits[-1, 0, 5]) is False
    # A function that fails on two sequences tells nothing.
    if batch == 1:
        assert is_separate(traced, lambda out: out.logits[:, -1, 5].reshape(1)) is None


def test_the_latest_function_is_measured_once() -> None:
    traced = ula.trace(clip(), PAIRS, progress=False)
    runs: list[int] = []
    traced.host.register_forward_pre_hook(lambda *_: runs.append(1))
    assert [is_separate(traced, own), is_separate(traced, own)] == [True, True] and len(runs) == 3
    # Another function in the place of a deleted one is another.
    assert is_separate(traced, lambda out: out.logits_per_image[:, 0]) is False
    assert is_separate(traced, lambda out: out.logits_per_image.diagonal()) is True

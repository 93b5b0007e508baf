"""Pretrained checkpoints: a missing wheel, tokens, and a model of the cache."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from evidence import checkpoints, truths
from unilinattn.optional import MissingExtraError


def test_a_missing_wheel_is_named_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(checkpoints.FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(MissingExtraError, match=r"pip download --no-deps .*rxnmapper==0\.4\.3"):
        checkpoints.atom_maps(download=False)


def test_tokens_of_a_reaction_join_to_its_text() -> None:
    for text in truths.texts("reactions"):
        assert "".join(checkpoints.smiles_tokens(text)) == text


def test_a_real_model_and_its_scores_are_read_from_the_cache() -> None:
    try:
        model, vocabulary = checkpoints.atom_maps(download=False)
    except MissingExtraError as error:
        pytest.skip(str(error))
    example = truths.CHECKPOINTS["rxnmapper"].inputs(model, vocabulary)[0]
    # The masked atom of an amide can be copied from the reactants: the model is sure of it.
    assert float(truths.log_probability(model, example)(torch.tensor([example.ids]))) > -0.7


def test_prompts_with_distant_words_are_the_first_whose_word_is_predicted_with_and_without_begin_of_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ["<|endoftext|>", *"abcdefgh"]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1
    )
    model = LlamaForCausalLM(config).eval()
    monkeypatch.setattr(truths, "PER_KIND", 2)
    prompts = [f"{first} {second}" for first in words[1:] for second in words[1:]]
    predicted = {}
    with torch.no_grad():
        for prompt in prompts:
            ids = [words.index(word) for word in prompt.split()]
            predicted[prompt] = [int(model(torch.tensor([each])).logits[0, -1].argmax()) for each in (ids, [0, *ids])]
    same = [prompt for prompt, (without, first) in predicted.items() if without == first != 0]
    without_only = next(prompt for prompt, (without, first) in predicted.items() if without != first and without)
    first_only = next(prompt for prompt, (without, first) in predicted.items() if without != first and first)
    wrong = words[1 + predicted[same[0]][0] % 8]
    kinds = {
        "failures": {
            same[0]: wrong,
            without_only: words[predicted[without_only][0]],
            first_only: words[predicted[first_only][1]],
        },
        "some": {prompt: words[predicted[prompt][0]] for prompt in same[1:4]},
    }
    monkeypatch.setattr(truths, "distant_words", lambda: kinds)
    expected = [(0, *map(words.index, prompt.split())) for prompt in same[1:3]]
    inputs = truths._distant(model, tokenizer)
    assert [example.ids for example in inputs] == expected
    assert [example.target for example in inputs] == [predicted[prompt][0] for prompt in same[1:3]]
    assert [example.position for example in inputs] == [2, 2]


def test_recorded_prompts_with_distant_words_begin_with_begin_of_text_and_have_the_length_of_the_page() -> None:
    rows = truths.read()[truths.DISTANT]["inputs"]
    assert len({tuple(row["ids"]) for row in rows}) == len(rows) <= truths.PER_KIND * len(truths.distant_words())
    for row in rows:
        assert row["ids"][0] == 0
        assert 14 <= len(row["ids"][1:]) <= 24

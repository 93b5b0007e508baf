"""Errors of a selected layer, and scores and places of merged words."""

import dataclasses
from typing import Any

import pytest
import torch

from tests.results.samples import LENGTH, make, make_target
from unilinattn.results.explained import explained_clause

IDS = [[0, 0, None, None, 1], [0, 0, 0, 0, 0]]
REAL = torch.tensor([[True] * LENGTH, [True, True, True, False, False]])


def test_a_selected_layer_keeps_its_errors_only() -> None:
    errors = {"h.0": 1e-7, "h.1": 3e-7}
    one = make(reconstruction_error=errors, stream_error=errors).select(layer="h.1")
    assert one.reconstruction_error == one.stream_error == {"h.1": 3e-7}


def test_each_token_outside_of_words_stays_by_itself() -> None:
    result = make_target(word_ids=IDS, mask=REAL)
    words = result.words()
    first, second = result.scores
    expected = [first[:2].sum(), first[2], first[3], first[4]]
    assert torch.equal(words.scores[0], torch.stack(expected))
    assert torch.equal(words.scores[1], torch.stack([second[:3].sum(), *torch.zeros(3)]))
    assert words.mask is not None and words.mask.tolist() == [[True] * 4, [True, False, False, False]]


@pytest.mark.parametrize(
    ("target", "merged"), [(4, 3), (-1, -1), (1, 0), (-4, -4), ([4, 1], [3, 0]), ([-1, 2], [-1, 0]), (None, None)]
)
def test_the_target_is_the_word_that_it_is_in(target: Any, merged: Any) -> None:
    mask = None if isinstance(target, int) else REAL
    ids = [IDS[0], IDS[0]] if mask is None else IDS
    tokens = [list("abcde")] * 2
    result = make_target(word_ids=ids, mask=mask, tokens=tokens, options={"logit": None, "target": target})
    for each in (result.words(), result.spans([[(0, 2)], [(0, 2 if mask is None else 3)]], unit="tokens")):
        assert each.options["target"] == (list(merged) if isinstance(merged, list) else merged)
        position = {4: "at position 3 'e'", -1: "at position 3 'e'", 1: "at position 0 'ab'", -4: "at position 0 'ab'"}
        if isinstance(target, int):
            assert position[target] in explained_clause(each)
    # Targets of other streams stay, and so do those of a result with every query.
    streams = {"query": {"latents": 9}, "key": {"text": LENGTH}}
    assert make_target(word_ids=IDS, mask=REAL, streams=streams, options={"target": 4}).words().options["target"] == 4
    assert make(word_ids=IDS, mask=REAL, options={"target": 4}).words().options["target"] == 4


def test_a_word_reaches_from_its_first_to_its_last_character() -> None:
    # A character of several tokens gives them one place; marks around a text have none.
    places = [(2, 5), (3, 4), (0, 0), (6, 7), (7, 9)]
    words = make_target(word_ids=IDS, mask=REAL, offsets=[places, places]).words()
    assert [list(row) for row in words.offsets or ()] == [
        [(2, 5), (0, 0), (6, 7), (7, 9)],
        [(2, 5), (0, 0), (0, 0), (0, 0)],
    ]


def test_parts_of_the_scores_are_merged_and_selected_as_the_scores() -> None:
    # The part of each token's share from constants such as its position, with and without a query axis.
    read = make_target(word_ids=IDS, mask=REAL, streams={"query": {"latents": 9}, "key": {"text": REAL.shape[1]}})
    assert read.words().streams == {"query": {"latents": 9}, "key": {"text": read.words().sizes["key"]}}
    target = make_target(word_ids=IDS, mask=REAL)
    words = dataclasses.replace(target, extras={"embedding": 2 * target.scores}).words()
    assert torch.equal(words.extras["embedding"], 2 * words.scores)
    every = make(word_ids=IDS, mask=REAL)
    whole = dataclasses.replace(every, extras={"embedding": 2 * every.scores})
    words = whole.words()
    assert torch.equal(words.extras["embedding"], 2 * words.scores)
    chosen = whole.select(layer="h.1", batch=0)
    assert torch.equal(chosen.extras["embedding"], 2 * chosen.scores)
    assert whole.to_html().count("embedding") == every.to_html().count("embedding")

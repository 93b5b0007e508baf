"""Answers and relevant keys of the tasks, against their definitions token by token."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unilinattn.errors import InputError, OptionError
from unilinattn.examples import TASKS
from unilinattn.examples.tasks import (
    HELD_OUT_SEED,
    NO_ANSWER,
    SELECTION_SEED,
    TRAINING_SEEDS,
    Copying,
    Induction,
    Task,
    TaskBatch,
)

Answers = dict[int, tuple[int, set[int]]]
"""The answer and the relevant keys of each query position."""


def copying_answers(tokens: list[int]) -> Answers:
    n = len(tokens) // 2
    assert len(tokens) == 2 * n + 1
    answers = {}
    for query, following in enumerate(tokens[1:]):
        copied = query - n
        if copied >= 0:
            answers[query] = (following, {copied})
            assert following == tokens[copied], "the second half does not repeat the first"
    return answers


def induction_answers(tokens: list[int]) -> Answers:
    answers = {}
    for query, token in enumerate(tokens):
        for earlier in reversed(range(query)):
            if tokens[earlier] == token:
                answers[query] = (tokens[earlier + 1], {earlier + 1})
                break
    return answers


def faults(task: Task, batch: TaskBatch) -> list[str]:
    """Messages on positions where a batch contradicts the definition of its task."""
    define = copying_answers if isinstance(task, Copying) else induction_answers
    messages = []
    for b, tokens in enumerate(batch.input_ids.tolist()):
        answers = define(tokens)
        for query in range(len(tokens)):
            label, keys = answers.get(query, (NO_ANSWER, set()))
            if batch.labels[b, query] != label:
                messages.append(f"label of {b}, {query}")
            if set(batch.relevant[b, query].nonzero().flatten().tolist()) != keys:
                messages.append(f"relevant keys of {b}, {query}")
    return messages


copyings = st.builds(Copying, source_length=st.integers(1, 9), source_vocabulary=st.integers(2, 9))
inductions = st.builds(Induction, length=st.integers(2, 20), vocabulary=st.integers(2, 9))


@given(task=copyings | inductions, count=st.integers(1, 4), seed=st.integers(0, 10**6))
def test_answers_follow_the_definition(task: Task, count: int, seed: int) -> None:
    batch = task.sample(count, seed)
    assert batch.input_ids.shape == (count, task.length)
    assert batch.input_ids.min() >= 0
    assert batch.input_ids.max() < task.vocabulary
    assert faults(task, batch) == []


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_the_shipped_sizes_follow_the_definition(task: Task) -> None:
    assert faults(task, task.sample(16, HELD_OUT_SEED)) == []


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_a_wrong_answer_is_detected(task: Task) -> None:
    batch = task.sample(4, 0)
    shifted = replace(batch, labels=batch.labels.roll(1, dims=1))
    assert any("label" in fault for fault in faults(task, shifted))
    for relevant in (batch.relevant.roll(1, dims=2), batch.relevant.roll(1, dims=1), batch.relevant.mT):
        assert any("relevant" in fault for fault in faults(task, replace(batch, relevant=relevant)))


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_relevant_keys_exist_only_for_answers_and_precede_the_query(task: Task) -> None:
    batch = task.sample(32, 1)
    assert torch.equal(batch.relevant.any(dim=-1), batch.labels != NO_ANSWER)
    assert not batch.relevant.triu(1).any()


def test_the_documented_sizes_of_the_tasks() -> None:
    copying, induction = TASKS["copying"], TASKS["induction"]
    assert isinstance(copying, Copying)
    assert (copying.source_length, copying.source_vocabulary) == (16, 32)
    assert (copying.vocabulary, copying.length, copying.separator) == (33, 33, 32)
    assert (induction.vocabulary, induction.length) == (16, 48)


def test_the_diagonals_are_the_answer_and_its_neighbours_in_the_source() -> None:
    task = Copying(source_length=4, source_vocabulary=3)
    expected = {4: {0, 1}, 5: {0, 1, 2}, 6: {1, 2, 3}, 7: {2, 3}}
    diagonals = {query: set(row.nonzero().flatten().tolist()) for query, row in enumerate(task.diagonals)}
    assert diagonals == {query: expected.get(query, set()) for query in range(task.length)}
    assert (task.diagonals | ~task.sample(3, 0).relevant).all()


def test_every_source_token_is_drawn_and_the_separator_occurs_once() -> None:
    task = Copying()
    ids = task.sample(200, 3).input_ids
    assert set(ids[:, : task.source_length].flatten().tolist()) == set(range(task.source_vocabulary))
    assert ((ids == task.separator).sum(dim=1) == 1).all()


def test_the_last_token_of_an_induction_sequence_always_has_an_answer() -> None:
    batch = Induction(vocabulary=1000, length=4).sample(50, 0)
    assert (batch.labels[:, -1] != NO_ANSWER).all()
    assert (batch.labels[:, :-1] == NO_ANSWER).float().mean() > 0.9


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_a_seed_gives_the_same_sequences_and_another_gives_others(task: Task) -> None:
    state = torch.get_rng_state()
    first, again = task.sample(8, 5), task.sample(8, 5)
    assert torch.equal(first.input_ids, again.input_ids)
    assert torch.equal(first.labels, again.labels)
    assert not torch.equal(first.input_ids, task.sample(8, 6).input_ids)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_training_selection_and_held_out_sequences_differ(task: Task) -> None:
    assert SELECTION_SEED != HELD_OUT_SEED
    assert SELECTION_SEED not in TRAINING_SEEDS
    assert HELD_OUT_SEED not in TRAINING_SEEDS
    drawn = [
        {tuple(tokens) for tokens in task.sample(256, seed).input_ids.tolist()}
        for seed in (TRAINING_SEEDS[0], TRAINING_SEEDS[1], SELECTION_SEED, HELD_OUT_SEED)
    ]
    assert len(set.union(*drawn)) == 4 * 256


def test_invalid_sizes_are_refused() -> None:
    with pytest.raises(InputError, match="count is 0"):
        Copying().sample(0, 0)
    with pytest.raises(OptionError, match="source_length is 0"):
        Copying(source_length=0)
    with pytest.raises(OptionError, match="length is 1"):
        Induction(length=1)

"""Effects of replacing tokens, against single runs of a real model and against a known dependence."""

from types import SimpleNamespace

import pytest
import torch

from unilinattn import examples
from unilinattn.errors import InputError, OptionError
from unilinattn.evaluation.intervention import AT_ONCE, replacement_effects, target_effects
from unilinattn.evaluation.metrics import earlier_keys, row_scores
from unilinattn.examples.tasks import HELD_OUT_SEED, NO_ANSWER, Copying


class Lookup(torch.nn.Module):
    """Predicts at each position the token two positions before it, with a fixed margin."""

    def __init__(self, vocabulary: int, margin: float) -> None:
        super().__init__()
        self.vocabulary, self.margin = vocabulary, margin
        self.inputs: list[torch.Tensor] = []

    def forward(self, ids: torch.Tensor) -> SimpleNamespace:
        self.inputs.append(ids)
        answers = torch.nn.functional.one_hot(ids.roll(2, dims=1), self.vocabulary).float()
        return SimpleNamespace(logits=self.margin * answers)


def test_each_token_is_replaced_by_every_other_one_at_a_time() -> None:
    model, vocabulary = Lookup(5, 3.0), 5
    ids = torch.tensor([[0, 1, 2, 3, 4, 0], [4, 4, 1, 2, 2, 0]])
    answers = ids.roll(2, dims=1)
    answers[:, :2] = NO_ANSWER
    effects = replacement_effects(model, ids, answers, vocabulary=vocabulary, draws=4)
    ran = torch.cat(model.inputs)
    for sequence in ids:
        changed = ran[((ran != sequence).sum(1) == 1)]
        for place in range(6):
            put = changed[changed[:, place] != sequence[place], place]
            assert sorted(put.tolist()) == sorted(set(range(5)) - {int(sequence[place])})
    # Replacing the token that contains the answer removes the whole margin; other replacements change nothing.
    expected = torch.zeros(2, 6, 6, dtype=torch.float64)
    expected[:, range(2, 6), range(4)] = 3.0
    torch.testing.assert_close(effects, expected, atol=1e-6, rtol=0)


@pytest.mark.slow
def test_the_effects_are_those_of_single_runs_of_a_trained_model() -> None:
    host = examples.load("induction", "mamba2")
    batch = examples.TASKS["induction"].sample(2, HELD_OUT_SEED)
    ids = batch.input_ids
    effects = replacement_effects(host, ids, batch.labels, vocabulary=16, draws=15)
    query = int((batch.labels[1] != NO_ANSWER).nonzero()[-1])
    answer = batch.labels[1, query]

    def log_probability(sequence: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return host(sequence[None]).logits[0, query].double().log_softmax(-1)[answer]

    for key in (0, int(batch.relevant[1, query].nonzero()), query - 1):
        after = []
        for token in set(range(16)) - {int(ids[1, key])}:
            replaced = ids[1].clone()
            replaced[key] = token
            after.append(log_probability(replaced))
        expected = log_probability(ids[1]) - torch.stack(after).mean()
        torch.testing.assert_close(effects[1, query, key], expected, atol=1e-4, rtol=1e-4)


def test_only_earlier_keys_of_queries_with_an_answer_are_measured() -> None:
    batch = examples.TASKS["copying"].sample(2, HELD_OUT_SEED)
    effects = replacement_effects(examples.load("copying", "transformer"), batch.input_ids, batch.labels, vocabulary=33)
    assert not effects.triu().any()
    assert torch.equal(effects.any(-1), batch.labels != NO_ANSWER)


def test_a_seed_gives_the_same_effects_and_does_not_change_the_global_state() -> None:
    model, ids = examples.load("copying", "s4d"), Copying().sample(1, 0)
    state = torch.get_rng_state()
    first, again, other = (
        replacement_effects(model, ids.input_ids, ids.labels, vocabulary=33, draws=2, seed=seed) for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)
    assert AT_ONCE < 33 * 2, "the runs of this test are not split"


@pytest.mark.parametrize("model", ["mamba2", "transformer", "s4d"])
def test_the_answer_matters_and_the_key_after_it_does_not(model: str) -> None:
    task = examples.TASKS["copying"]
    assert isinstance(task, Copying)
    batch = task.sample(4, HELD_OUT_SEED)
    effects = replacement_effects(examples.load("copying", model), batch.input_ids, batch.labels, vocabulary=33)
    candidates = earlier_keys(33)
    assert row_scores(effects, batch.relevant, candidates).hit_at_1 > 0.95
    # LaTIM's three diagonals include the key after the answer, which these models do not use.
    answer, after = effects.diagonal(-16, 1, 2)[:, :-2], effects.diagonal(-15, 1, 2)[:, 1:-2]
    assert after.abs().mean() < 0.02 * answer.mean()
    by_diagonals = row_scores(effects, task.diagonals, candidates)
    assert by_diagonals.auc < 0.9 and by_diagonals.recall_at_k < 0.75


@pytest.mark.usefixtures("unchecked")
def test_invalid_inputs_are_refused() -> None:
    model, ids = Lookup(5, 1.0), torch.tensor([[0, 1, 2]])
    with pytest.raises(InputError, match="do not fit input_ids"):
        replacement_effects(model, ids, ids[:, :2], vocabulary=5)
    with pytest.raises(InputError, match="reach from 0 to 2"):
        replacement_effects(model, ids, ids, vocabulary=2)
    with pytest.raises(InputError, match="no log-probability"):
        replacement_effects(model, ids, torch.full_like(ids, NO_ANSWER), vocabulary=5)
    for draws in (0, 5):
        with pytest.raises(OptionError, match=f"draws={draws}"):
            replacement_effects(model, ids, ids, vocabulary=5, draws=draws)
    assert model.inputs == []


def test_effects_on_one_target_include_the_last_token() -> None:
    ids = torch.tensor([0, 1, 2, 3])
    # The log-probability is the weighted number of tokens that were left.
    weight = torch.tensor([1.0, 0.0, 2.0, 4.0], dtype=torch.float64)
    effects = target_effects(lambda batch: (batch == ids).double() @ weight, ids, replacements=torch.arange(9), draws=8)
    torch.testing.assert_close(effects, weight, atol=1e-12, rtol=0)


def test_more_draws_than_replacements_are_refused() -> None:
    with pytest.raises(OptionError, match="draws=4"):
        target_effects(lambda batch: batch[:, 0].double(), torch.arange(3), replacements=torch.arange(4), draws=4)

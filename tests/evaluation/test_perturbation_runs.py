"""Runs of a perturbation test: several removals in one, equal ones once, also of several scores."""

import numpy as np
import pytest
import torch

from tests.evaluation.votes import MASK, VOTES, Votes
from unilinattn.errors import InputError
from unilinattn.evaluation import perturbation
from unilinattn.evaluation.perturbation import PerturbationTest


def test_the_fractions_of_images_are_one_batch_in_evaluation_mode() -> None:
    images, relevance = torch.randn(2, 3, 6, 4, dtype=torch.float64), torch.randn(2, 3, 2)
    fractions = (0.0, 0.5, 0.9)
    alone, training, pair = Votes().eval(), Votes().train(), Votes().eval()
    curves = [
        PerturbationTest(model, images[:1], relevance[:1], masking="mean").activation(fractions)
        for model in (alone, training)
    ]
    whole = PerturbationTest(pair, images, relevance, masking="mean").activation(fractions)
    for curve in curves:
        torch.testing.assert_close(curve.values, whole.values[:1], atol=1e-12, rtol=0)
    assert [len(model.log.seen) for model in (alone, training, pair)] == [2, 3, 2]
    torch.testing.assert_close(alone.log.seen[1], torch.cat(training.log.seen[1:]), atol=0, rtol=0)


def test_the_fractions_of_one_sequence_are_batches_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, relevance = torch.tensor([[2, 3, 4, 2]]), torch.tensor([[1.0, 4.0, 3.0, 2.0]])
    fractions = (0.0, 0.25, 0.5, 0.75, 1.0)
    sizes, curves = [], []
    for most in (1 << 24, 2 * 4 * len(VOTES[0]), 1):
        monkeypatch.setattr(perturbation, "MOST_LOGITS", most)
        model = Votes(VOTES).eval()
        curves.append(
            PerturbationTest(model, ids, relevance, masking="token", mask_token_id=MASK).activation(fractions)
        )
        sizes.append([len(seen) for seen in model.log.seen[1:]])
    # The run of the unchanged tokens, at the last fraction, is the first of the test.
    assert sizes == [[4], [2, 2], [1, 1, 1, 1]]
    for curve in curves:
        torch.testing.assert_close(curve.values, curves[-1].values, atol=1e-12, rtol=0)


def test_the_model_runs_once_a_removal_in_its_mode_without_gradients() -> None:
    model, ids = Votes(VOTES), torch.tensor([[2, 3, 2], [3, 3, 2]])
    # Of three tokens, one to three are removed; the last three curves remove what the one of the least relevant does.
    for training, runs in ((True, [3, 2, 0, 0, 0]), (False, [1, 1, 0, 0, 0])):
        model.train(training)
        model.log.modes.clear()
        test = PerturbationTest(model, ids, torch.rand(2, 3), masking="token", mask_token_id=MASK)
        counts = [len(model.log.modes)]
        for curve in (test.positive, test.negative, test.activation, test.pruning):
            curve()
            counts.append(len(model.log.modes))
        test.sufficiency()
        assert np.diff([*counts, len(model.log.modes)]).tolist() == runs
        assert set(model.log.modes) == {(training, False)} and model.training == training
    assert torch.is_grad_enabled()


def test_scores_of_one_test_share_the_runs_of_equal_removals() -> None:
    model, ids = Votes(VOTES).eval(), torch.tensor([[2, 3, 4, 2], [3, 4, 2, 2]])
    scores = torch.tensor([[1.0, 4.0, 3.0, 2.0], [2.0, 1.0, 4.0, 3.0]])
    arguments = {"masking": "token", "mask_token_id": MASK, "seed": [3, 4]}
    first = PerturbationTest(model, ids, torch.zeros(2, 4), **arguments)
    first.activation()
    runs = len(model.log.seen)
    curve = first.of_scores(scores).activation()
    assert [len(ran) for ran in model.log.seen[runs:]] == [6]
    assert torch.equal(curve.values, PerturbationTest(model, ids, scores, **arguments).activation().values)
    with pytest.raises(InputError, match=r"relevance must have the shape \(2, 4\)"):
        first.of_scores(scores[:1])
    with pytest.raises(InputError, match="NaN"):
        first.of_scores(scores * torch.nan)


def test_equal_scores_are_ordered_by_the_seed_of_each_input() -> None:
    ids, equal = torch.arange(2, 5).repeat(2, 3), torch.zeros(2, 9)
    curves = {}
    for name, some, seed in (("both", slice(2), [5, 6]), ("first", slice(1), 5), ("second", slice(1, 2), 6)):
        model = Votes(VOTES).eval()
        test = PerturbationTest(model, ids[some], equal[some], masking="token", mask_token_id=MASK, seed=seed)
        curves[name] = test.deletion().values
    assert torch.equal(curves["both"], torch.cat([curves["first"], curves["second"]]))
    assert not torch.equal(curves["first"], curves["second"])
    with pytest.raises(InputError, match="seed names 1 seeds for 2 inputs"):
        PerturbationTest(Votes(VOTES), ids, equal, masking="token", mask_token_id=MASK, seed=[5])

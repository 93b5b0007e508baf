"""Rows that explain equal samples of a model once."""

from dataclasses import replace

import torch

import unilinattn as ula
from evidence.remembered import Results, remembered
from tests.evaluation import tiny

METHODS = {"raw": "raw", "latim l1": ("latim", {"p": 1}), "lrp": ula.methods.Lrp(measure="log-odds")}


def test_evaluations_share_the_scores_of_equal_samples_of_one_model() -> None:
    results: Results = {}
    rows, model = remembered(METHODS, results), tiny.model()
    scored, others = (
        [replace(sample, target=-2, relevant=sample.relevant[-2], valid=None) for sample in samples]
        for samples in (tiny.data(), tiny.selection())
    )
    other_keys = [replace(sample, relevant=sample.relevant.roll(1)) for sample in scored]

    def measured(methods, samples, host=model):
        return [*ula.evaluate({"m": host}, samples, methods, ["ap"], selection=others, batch_size=3, progress=False)]

    first = measured(rows, scored)
    assert first == measured(METHODS, scored)
    before = dict(results)
    again = measured(rows, other_keys)
    assert again == measured(METHODS, other_keys)
    assert [row["value"] for row in again] != [row["value"] for row in first]
    assert results.keys() == before.keys()
    assert all(results[key] is value for key, value in before.items())
    assert measured(rows, scored, tiny.model(1)) == measured(METHODS, scored, tiny.model(1))
    assert len(results) > len(before)


def test_other_targets_and_tokens_are_explained_anew() -> None:
    results: Results = {}
    rows, model, sample = remembered({"logit": "logit"}, results), tiny.model(), tiny.data(1)[0]
    trace = ula.trace(model, sample.inputs, progress=False)
    settings = {"trust": "require", "max_memory": None}
    last, earlier = (replace(sample, target=target, relevant=None, valid=None) for target in (-1, -2))
    scores = [rows["logit"].function(trace, [one], **settings)[0].scores for one in (last, earlier, last)]
    assert scores[0] is scores[2]
    assert not torch.equal(scores[0], scores[1])

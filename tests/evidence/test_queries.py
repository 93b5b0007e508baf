"""Queries that are explained together, as the targets of copies of their sentence."""

from collections.abc import Sequence

import pytest
import torch

import unilinattn as ula
from evidence.queries import in_one_batch
from unilinattn.evaluation import Sample
from unilinattn.examples import TASKS, load
from unilinattn.results.attribution import Attribution
from unilinattn.testing import TOLERANCES, relative_error

LENGTH = 9
METHODS = {"logit": "logit", "lrp": ("lrp", {"gamma": 0.25}), "attn_lrp": ula.methods.AttnLrp(split="thirds")}
SETTINGS = {"trust": "require", "max_memory": None}


@pytest.fixture(scope="module")
def sentences() -> list[Sample]:
    ids = TASKS["induction"].sample(2, 0).input_ids[:, :LENGTH]
    valid = torch.zeros(2, LENGTH, LENGTH, dtype=torch.bool)
    valid[0, [3, 8], :3] = True
    valid[1, 5, :2] = True
    return [Sample(inputs=row[None], valid=keys) for row, keys in zip(ids, valid, strict=True)]


def explained(label: str, host: torch.nn.Module, samples: Sequence[Sample]) -> tuple[ula.Trace, Attribution]:
    trace = ula.trace(host, torch.cat([sample.inputs for sample in samples]), progress=False)
    (result,) = in_one_batch(METHODS)[label].function(trace, samples, **SETTINGS)
    return trace, result


@pytest.mark.parametrize("label", METHODS)
@pytest.mark.parametrize("model", ["mamba", "transformer"])
def test_the_rows_of_queries_with_a_valid_key_are_those_of_the_method(
    model: str, label: str, sentences: list[Sample]
) -> None:
    trace, result = explained(label, load("induction", model).double(), sentences)
    name, options = METHODS[label] if isinstance(METHODS[label], tuple) else (METHODS[label], {})
    every = ula.explain(trace, method=name, progress=False, **options)
    asked = torch.stack([sample.valid for sample in sentences]).any(-1)
    assert result.dims == every.dims == ("batch", "query", "key")
    assert result.layers == every.layers
    assert relative_error(result.scores[asked], every.scores[asked]) < TOLERANCES["reconstruction", torch.float64]
    assert every.scores[~asked].any()
    assert not result.scores[~asked].any()


def test_other_sentences_of_the_same_queries_are_explained_anew(sentences: list[Sample]) -> None:
    host = load("induction", "mamba")
    others = [Sample(inputs=sample.inputs.flip(1), valid=sample.valid) for sample in sentences]
    first, other, again = (explained("logit", host, samples)[1].scores for samples in (sentences, others, sentences))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_sample_with_a_target_is_explained_as_it_is(sentences: list[Sample]) -> None:
    host, sample = load("induction", "mamba"), Sample(inputs=sentences[0].inputs, target=-2)
    _, result = explained("logit", host, [sample])
    expected = ula.explain(host, sample.inputs, method="logit", target=-2, progress=False)
    assert torch.equal(result.scores, expected.scores)

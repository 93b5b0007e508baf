"""Baselines that read tokens, models that have not learned a task, and the samples of each seed."""

from functools import partial

import pytest
import torch

import unilinattn as ula
from evidence import alignment, bootstrap, copying, induction, retrieval
from evidence.__main__ import WEIGHTS
from evidence.baselines import (
    CONTROLS,
    NEW_MIXER,
    RANDOM,
    SAME_TOKEN,
    SAME_TOKEN_ROW,
    control,
    controls,
    default_of,
    of_default,
    of_training,
    remark,
)
from evidence.rows import number
from evidence.study import SEEDS
from evidence.tasks import TASKS, sizes_text
from evidence.training import HELD_OUT_SEED, SELECTION_SEED, STEPS_OF_A_SEED, scored_seed, selection_seed
from tests.evidence.tables import made, verdicts
from unilinattn.evaluation import row_scores
from unilinattn.methods.default import CAUSAL


def test_the_same_token_is_that_of_each_sequence_s_prediction() -> None:
    host, samples = copying.STUDY.hosts(WEIGHTS, 0)["transformer"](), copying.samples(5, 3)
    ids = torch.cat([sample.inputs for sample in samples])
    with torch.no_grad():
        predictions = host(ids).logits.argmax(-1)
    trace = ula.trace(host, ids, progress=False)
    for at, sample in enumerate(samples):
        (result,) = SAME_TOKEN_ROW[SAME_TOKEN].function(trace, [sample])
        expected = [float(token == predictions[at, sample.target]) for token in ids[at]]
        assert result.scores.tolist() == [expected] and 0 < sum(expected) < len(expected)


def test_the_dictionary_knows_most_words() -> None:
    samples = alignment.samples(60, 5)
    rows = [
        row_scores(alignment.cooccurrence(None, sample)[asked], sample.relevant[asked], sample.valid[asked]).hit_at_1
        for sample in samples
        for asked in [sample.relevant.any(-1)]
    ]
    assert sum(rows) / len(rows) > 0.7
    whole = alignment.cooccurrence(None, samples[0])
    (word,) = alignment.single_words(samples[:1])
    assert torch.equal(alignment.cooccurrence(None, word), whole[word.target])


@pytest.mark.parametrize("model", ["mamba2", "transformer"])
def test_controls_have_other_weights_where_they_say_so(model: str) -> None:
    study = copying.STUDY
    hosts = {model: study.hosts(WEIGHTS, 0)[model]}
    trained = dict(hosts[model]().named_parameters())
    last = ula.trace(hosts[model](), torch.zeros(1, 3, dtype=torch.long), progress=False).layers[-1].name
    loaded = {name: dict(load().named_parameters()) for name, load in controls(study.models, hosts, 0).items()}
    assert list(loaded) == [control(model, name) for name in CONTROLS]
    changed = {
        name: {key for key, weight in weights.items() if not torch.equal(weight, trained[key])}
        for name, weights in loaded.items()
    }
    matrices = {key for key, weight in trained.items() if weight.ndim > 1}
    assert matrices <= changed[control(model, RANDOM)]
    new = changed[control(model, NEW_MIXER)]
    assert new and all(key.startswith(f"{last}.") for key in new)
    assert {key for key in matrices if key.startswith(f"{last}.")} <= new
    other = controls(study.models, hosts, 1)[control(model, RANDOM)]()
    assert not torch.equal(next(iter(other.parameters())), next(iter(loaded[control(model, RANDOM)].values())))


@pytest.mark.parametrize("samples", [copying.samples, induction.samples, alignment.samples])
def test_each_seed_is_scored_and_selected_on_sequences_of_its_own(samples) -> None:
    seeds = [make(seed) for seed in SEEDS for make in (scored_seed, selection_seed)]
    sets = [{tuple(sample.inputs[0].tolist()) for sample in samples(72, seed)} for seed in seeds]
    assert sum(map(len, sets)) == len(set().union(*sets)) == 72 * len(seeds)
    assert not {HELD_OUT_SEED, SELECTION_SEED} & set(seeds)
    assert min(seeds) > (1 + max(SEEDS)) * STEPS_OF_A_SEED


def test_a_trained_model_is_compared_with_its_controls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "RESAMPLES", 50)
    claims = of_training("t", "ap", {RANDOM: ["one", "other"], NEW_MIXER: ["other"]}, ["m"])
    results = made({"t": (["m", *(control("m", name) for name in CONTROLS)], ["one", "other"], ["ap"])}, lambda *_: 0.5)
    for model, value, expected in (("m", 0.9, "holds"), (control("m", RANDOM), 1.2, "contradicted")):
        for table in results.tables["t"].values():
            for row in table:
                if row["model"] == model:
                    row["value"], row["parts"] = value, [[value, 1.0]]
        assert verdicts(claims, type(results)(results.tables))[f"{claims[0].text} here"] == expected
        assert [len(claim.comparisons) for claim in claims] == [2, 1]


@pytest.mark.parametrize(
    ("study", "models"),
    [
        (copying.STUDY, copying.STUDY.models),
        (induction.STUDY, induction.EXPLAINED),
        (alignment.STUDY, alignment.MODELS),
        (retrieval.STUDY, retrieval.MODELS),
    ],
)
def test_the_default_is_that_of_explain(study, models) -> None:
    hosts = study.hosts(WEIGHTS, 0)
    names = {}
    for model in models:
        trace = ula.trace(hosts[model](), torch.zeros(1, 3, dtype=torch.long), progress=False)
        result = ula.explain(trace, target=-1, progress=False)
        is_causal = result.method == CAUSAL.name and CAUSAL.keywords.items() <= result.options.items()
        names[model] = CAUSAL.label if is_causal else result.method
    assert names == {model: default_of(model) for model in models}


def test_the_default_is_compared_with_the_other_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "RESAMPLES", 50)
    models, methods = ["mamba", "transformer"], ["rollout", "logit", "lrp", "attn_lrp", CAUSAL.label]
    claims = of_default("t", methods, models)
    assert [len(claim.comparisons) for claim in claims] == [8, 2]
    compared = {(one.terms[0][1][1:3], one.terms[1][1][1:3]) for one in claims[0].comparisons}
    assert (("mamba", "logit"), ("mamba", "lrp")) in compared
    assert (("transformer", "lrp"), ("transformer", CAUSAL.label)) in compared
    values = dict.fromkeys(methods, 0.5)
    for changed, expected in (
        ({}, ("holds", "holds")),
        ({"attn_lrp": 0.4}, ("holds", "contradicted")),
        ({CAUSAL.label: 0.4}, ("contradicted", "holds")),
        ({"lrp": 0.4}, ("contradicted", "holds")),
        ({"rollout": 0.54}, ("holds", "holds")),
    ):
        results = made({"t": (models, methods, ["ap"])}, lambda method, _, now={**values, **changed}: now[method])
        assert tuple(verdicts(claims, results).values()) == expected


def test_the_sequences_of_all_tasks_are_counted_once() -> None:
    sequences = {
        tuple(sample.inputs[0].tolist())
        for task in TASKS.values()
        for seed in SEEDS
        for sample in task.samples(14, scored_seed(seed))
    }
    models = len(copying.STUDY.models) + len(induction.EXPLAINED) + len(alignment.MODELS)
    assert f" {len(sequences)} sequences and {14 * len(SEEDS) * models} pairs" in sizes_text(14)


def test_the_remark_names_the_baselines_that_win() -> None:
    row = partial(number, metric="ap")
    values = {("m", SAME_TOKEN): 0.4, ("m", "random"): 0.1, ("m", "raw"): 0.3, ("m", "lrp"): 0.6}
    values |= {(control("m", RANDOM), "raw"): 0.35, (control("m", RANDOM), "lrp"): 0.1}
    values |= {(control("m", NEW_MIXER), "lrp"): 0.2}
    numbers = [
        {**row(method, value=value, model=model), "table": "t", "values": [value]}
        for (model, method), value in values.items()
    ]
    text = remark({"numbers": numbers}, "t", [SAME_TOKEN], {RANDOM: ["raw", "lrp"], NEW_MIXER: ["lrp"]}, ["m"])
    assert "on m it has an AP of 0.40, at least that of 1 of 2 methods (`raw` (0.30))." in text
    assert (
        "1 have at least as large an AP in a model with random weights as in the trained one (`raw` on m (0.35, "
        in text
    )
    assert "0 have at least as large an AP in the model with new random weights" in text

"""Baselines of the tasks: scores of tokens without any layer, and models that have not learned the task."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import unilinattn as ula
from evidence.claims import HERE, Claim
from evidence.comparisons import between, within
from evidence.pictures import BASELINES
from evidence.study import Model, View
from unilinattn.evaluation import Sample
from unilinattn.evaluation.scorers import Scorer, as_result
from unilinattn.methods.default import CAUSAL, OTHER
from unilinattn.results.attribution import Attribution
from unilinattn.tracing.trace import Trace

SAME_TOKEN = "same token"

CONTROL_SEED = 1000
"""Added to a model's seed for the random weights of its controls."""

MARGIN = 0.05
"""Difference of AP up to which a method finds no less than another."""

RANDOM, NEW_MIXER = "random weights", "new last mixer"

CONTROLS: Mapping[str, str] = {
    RANDOM: "a model with random weights",
    NEW_MIXER: "the model with new random weights in its last mixer",
}
"""Models that are explained beside a trained one."""


def token_scorer(label: str, function: Callable[[Trace, Sample], Tensor]) -> Scorer:
    """Return the row of scores (query, key) or (key,) of one sample, which are computed from its tokens."""

    def run(trace: Trace, samples: Sequence[Sample], **_: Any) -> list[Attribution]:
        return [as_result(label, function(trace, sample), trace) for sample in samples]

    return Scorer(label, {"tokens": function.__qualname__}, run, reads_model=False)


def same_token(trace: Trace, sample: Sample) -> Tensor:
    """Score the keys that hold the token which the model predicts at the target by 1, and others by 0."""
    assert sample.target is not None and trace.ids is not None
    predictions = trace.explained_logit.prediction(sample.target)
    assert predictions is not None
    # Sequences with the same tokens have the same prediction.
    sequence = (trace.ids == sample.inputs).all(1).nonzero()[0]
    return (sample.inputs[0] == predictions[sequence]).double()


SAME_TOKEN_ROW: Mapping[str, Any] = {SAME_TOKEN: token_scorer(SAME_TOKEN, same_token)}


def control(model: str, name: str) -> str:
    """Return the name in tables of a control of a model."""
    return f"{model}, {name}"


def controls(
    models: Mapping[str, Model], hosts: Mapping[str, Callable[[], nn.Module]], seed: int
) -> dict[str, Callable[[], nn.Module]]:
    """Return functions that load the controls of each model of `hosts`, in the order of `CONTROLS`.

    The random weights are those of an untrained model, drawn from another seed than the training began with.
    """

    def untrained(model: str) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(CONTROL_SEED + seed)
            return models[model].build().eval()

    def with_new_mixer(model: str) -> nn.Module:
        host, fresh = hosts[model](), untrained(model)
        last = ula.trace(host, torch.zeros(1, 2, dtype=torch.long), progress=False).layers[-1].name
        host.get_submodule(last).load_state_dict(fresh.get_submodule(last).state_dict())
        return host

    makers = {RANDOM: untrained, NEW_MIXER: with_new_mixer}
    return {control(model, name): partial(make, model) for model in hosts for name, make in makers.items()}


def controlled_view(table: str, title: str, models: Sequence[str], note: str = "") -> View:
    """Return a table of the AP in each model and in its controls."""
    names = [name for model in models for name in (model, *(control(model, other) for other in CONTROLS))]
    return View(
        table, f"{title} by AP, in trained models and in their controls", [(n, "ap", n) for n in names], note=note
    )


def of_training(table: str, metric: str, methods: Mapping[str, Sequence[str]], models: Sequence[str]) -> list[Claim]:
    """Return the claim that methods find more in the trained model, for each control the methods of `methods`."""
    return [
        Claim.of(
            f"Every method finds more in the trained model than in {text}",
            HERE,
            *(
                between(table, metric, method, model, control(model, name))
                for method in methods[name]
                for model in models
            ),
        )
        for name, text in CONTROLS.items()
    ]


def default_of(model: str) -> str:
    """Return the row of the default of `explain` on a model of the studies, by its name; `lrp` is here for a logit."""
    return CAUSAL.label if "transformer" in model else OTHER.name


def of_default(table: str, methods: Sequence[str], models: Sequence[str]) -> list[Claim]:
    """Return the claims that the default of `explain`, and the method that counts decisions, find no less by AP."""
    names = list(dict.fromkeys(map(default_of, models)))
    others = {model: [method for method in methods if method != default_of(model)] for model in models}
    return [
        Claim.of(
            f"The default of `explain`, {' or '.join(f'`{name}`' for name in names)}"
            f"{' by the model' if len(names) > 1 else ''}, finds no less than any other method of all layers",
            HERE,
            *(
                within(table, "ap", other, default_of(model), [model], most=MARGIN)
                for model in models
                for other in others[model]
            ),
        ),
        Claim.of(
            f"`{CAUSAL.name}`, which counts what tokens decide, finds no less than `logit`, which counts what they "
            "send",
            HERE,
            within(table, "ap", "logit", CAUSAL.name, models, most=MARGIN),
        ),
    ]


def remark(
    record: Mapping[str, Any],
    table: str,
    rows: Sequence[str],
    controlled: Mapping[str, Sequence[str]],
    models: Sequence[str],
) -> str:
    """Return sentences on the baselines that win by AP in a table of a record.

    `rows`: baselines that read tokens. `controlled`: the methods that are compared with each control.
    """
    means = {
        (row["model"], row["method"]): fmean(row["values"])
        for row in record["numbers"]
        if (row["table"], row["metric"]) == (table, "ap")
    }

    def listed(losers: Sequence[str]) -> str:
        return f" ({', '.join(losers)})" if losers else ""

    sentences = []
    for row in rows:
        for model in models:
            value = means[model, row]
            methods = [method for of, method in means if of == model and method not in (*rows, *BASELINES)]
            beaten = [f"`{method}` ({means[model, method]:.2f})" for method in methods if means[model, method] <= value]
            sentences.append(
                f"`{row}` reads no layer; on {model} it has an AP of {value:.2f}, at least that of {len(beaten)} of "
                f"{len(methods)} methods{listed(beaten)}."
            )
    for name, text in CONTROLS.items():
        pairs = [(model, method) for model in models for method in controlled[name]]
        equal = [
            f"`{method}` on {model} ({means[control(model, name), method]:.2f}, trained {means[model, method]:.2f})"
            for model, method in pairs
            if means[control(model, name), method] >= means[model, method]
        ]
        sentences.append(
            f"Of {len(pairs)} pairs of a method and a model, {len(equal)} have at least as large an AP in {text} as in "
            f"the trained one{listed(equal)}."
        )
    return " ".join(sentences)

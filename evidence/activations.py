"""Mamba-2 with other activations after its convolution: errors of LaTIM's split and alignments (LaTIM Table 4)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import unilinattn as ula
from evidence.claims import HERE, Claim
from evidence.comparisons import Comparison, Term, better, bounded, within
from evidence.hosts import builder
from evidence.rows import number
from evidence.study import BATCH, Model, View
from evidence.training import Recipe, scored_seed
from evidence.translation import VOCABULARY, sentences
from unilinattn.evaluation import Sample, Table
from unilinattn.examples.tasks import NO_ANSWER
from unilinattn.host.substitution import through_operators

TABLE = "activations"
ERRORS = ("error, layer 1", "error, layer 2")
RELATIVE = ("relative, layer 1", "relative, layer 2")
AER, EXACT_AER, ACCURACY = "aer", "aer, exact", "accuracy"
SILU, RELU, IDENTITY = "SiLU", "ReLU", "identity"

HOSTS = {SILU: "mamba2", RELU: "mamba2_relu", IDENTITY: "mamba2_linear"}
"""The model of each activation."""

SPLITS = {SILU: "silu", RELU: "relu", IDENTITY: "identity"}
"""LaTIM's f of each activation: the activation itself, applied to each tap."""

SENTENCES = 8
"""Sentences whose accuracy is measured for each one that is explained."""

ROUNDING = 1e-4
"""The unit of a recorded number: smaller errors are rounding."""

PAPER = {
    "LaTIM error, layers 0-16 / 16-32 / 32-48": ("0.21 / 0.43 / 0.54", "0.35 / 0.83 / 1.07", "0.00 / 0.00 / 0.00"),
    "LaTIM AER": ("0.46", "0.51", "0.46"),
    "LaTIM COMET": ("83.6", "82.8", "83.3"),
}
"""LaTIM Table 4: Mamba-2 370M after continued pretraining, IWSLT17 de-en."""

VIEW = View(
    TABLE,
    "Mamba-2 by the activation after its convolution: errors of LaTIM's split, AER and accuracy",
    [("", metric, metric) for metric in (*ERRORS, *RELATIVE)]
    + [("", AER, "AER"), ("", EXACT_AER, "AER, exact"), ("", ACCURACY, ACCURACY)],
    {heading: dict(zip(HOSTS, row, strict=True)) for heading, row in PAPER.items()},
    "The activation is also that of the queries and keys; the gate has SiLU. LaTIM applies the activation to each tap "
    "of the convolution and to its bias. The error is the mean absolute difference of a layer's output and the sum of "
    "its contributions, and the relative one the ratio of norms. AER is that of `latim l2` with this split, at the "
    "layer that is best on other sentences, and with the exact slope; accuracy, in place of COMET, that of every "
    f"target word of {SENTENCES} times as many sentences. LaTIM retrained a pretrained model of 48 layers; these two "
    "layers are trained from the same initial weights by one recipe.",
)


SIMILAR = 0.05
"""Difference of AER up to which two models align alike."""

SIMILAR_ACCURACY = 0.01
"""Difference of accuracy up to which two models translate alike."""


def retrained(recipe: Recipe) -> dict[str, Model]:
    """Return the models with another activation than SiLU."""
    names = {HOSTS[RELU]: "relu", HOSTS[IDENTITY]: "linear"}
    return {name: Model(builder("mamba2", VOCABULARY, hidden_act=act), recipe) for name, act in names.items()}


def measure(
    hosts: Mapping[str, Callable[[], nn.Module]],
    seed: int,
    scored: Sequence[Sample],
    selection: Sequence[Sample],
    out: Path,
) -> Table:
    """Return a row for each activation, sentence and metric of the view.

    `hosts`: functions that load the models of a seed. `out`: folder for the numbers that `ula.evaluate` stores.
    """
    rows: list[Mapping[str, Any]] = []
    for activation, model in HOSTS.items():
        host = hosts[model]()
        rows += split_errors(activation, host, scored)
        methods: dict[str, Any] = {AER: ("latim", {"activation": SPLITS[activation]}), EXACT_AER: "latim"}
        aligned = ula.evaluate(
            {model: host},
            scored,
            methods,
            ["aer"],
            selection=selection,
            baselines=[],
            out=out / model,
            progress=False,
            batch_size=BATCH,
        )
        rows += [{**row, "model": "", "method": activation, "metric": row["method"]} for row in aligned]
        rows += _accuracies(activation, host, SENTENCES * len(scored), scored_seed(seed))
    return Table(rows)


def split_errors(activation: str, host: nn.Module, scored: Sequence[Sample]) -> Iterator[dict[str, Any]]:
    """Return the errors of each layer's output on each sentence if LaTIM's f replaces the activation."""
    for sample in scored:
        trace = ula.trace(host, sample.inputs, progress=False)
        errors = ula.analysis.decomposition_errors(trace, [SPLITS[activation]])
        for metrics, by_layer in ((ERRORS, errors.difference), (RELATIVE, errors.relative)):
            for metric, (error,) in zip(metrics, by_layer, strict=True):
                assert error is not None
                yield number(activation, metric, error, sample=sample.name)


@torch.no_grad()
def _accuracies(activation: str, host: nn.Module, count: int, seed: int) -> list[dict[str, Any]]:
    """Return the share of right target words of each sentence."""
    data = sentences(count, seed)
    with through_operators(host):
        right = host(data.input_ids).logits.argmax(-1) == data.labels
    asked = data.labels != NO_ANSWER
    shares, counts = (right & asked).sum(1) / asked.sum(1), asked.sum(1)
    return [
        number(activation, ACCURACY, share, count, sample=str(at))
        for at, (share, count) in enumerate(zip(shares.tolist(), counts.tolist(), strict=True))
    ]


def claims() -> list[Claim]:
    """Return the claims of LaTIM 4.4, and those of this library on the same models."""
    source = "LaTIM 4.4, Table 4"

    def larger(metric: str, activation: str, than: str) -> list[Comparison]:
        return better(TABLE, metric, activation, than, [""])

    def no_more(metric: str, activation: str, than: str, most: float) -> list[Comparison]:
        return within(TABLE, metric, activation, than, [""], most=most)

    return [
        Claim.of(
            "Without an activation, the decomposition of Mamba-2 has no error",
            source,
            *(bounded(TABLE, metric, IDENTITY, [""], "<", ROUNDING) for metric in ERRORS),
        ),
        Claim.of(
            "ReLU has a larger error of the decomposition than SiLU",
            source,
            *(larger(metric, RELU, SILU) for metric in ERRORS),
        ),
        Claim.of(
            "Mamba without activation, retrained, has the best AER",
            source,
            *(larger(AER, other, IDENTITY) for other in (RELU, SILU)),
        ),
        Claim.of(
            "Mamba without activation translates as well as with SiLU (COMET; here accuracy)",
            source,
            no_more(ACCURACY, SILU, IDENTITY, SIMILAR_ACCURACY),
        ),
        Claim.of(
            "LaTIM's split of SiLU has an AER similar to that without activation",
            source,
            no_more(AER, SILU, IDENTITY, SIMILAR),
            no_more(AER, IDENTITY, SILU, SIMILAR),
        ),
        Claim.of("ReLU has the worst AER", source, *(larger(AER, RELU, other) for other in (SILU, IDENTITY))),
        Claim.of(
            "ReLU has a larger error than SiLU also relative to the layer's output",
            HERE,
            *(larger(metric, RELU, SILU) for metric in RELATIVE),
        ),
        Claim.of(
            "`latim` with the exact slope has no larger AER than with LaTIM's split, which has an error",
            HERE,
            *(_exact_no_worse(activation) for activation in (SILU, RELU)),
        ),
    ]


def _exact_no_worse(activation: str) -> Comparison:
    terms = (1.0, Term(TABLE, "", activation, EXACT_AER)), (-1.0, Term(TABLE, "", activation, AER))
    return Comparison(f"{EXACT_AER}, less aer, `{activation}`", terms, "≤", SIMILAR)

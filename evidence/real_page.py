"""The section of `docs/evidence.md` on pretrained checkpoints, and the table of default methods, from the record."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from evidence.atom_maps import HEAD, LAYER
from evidence.rankings import DEFAULTS, METRICS, PASSES, ROW, TOKENS, Row, behind
from evidence.record import RESULTS
from evidence.truths import CHECKPOINTS
from tools.markers import table as table_text

RECORD = RESULTS / "real.json"

TITLES = {"hit_at_1": "hit@1", "spearman": "Spearman"}


def table(lines: Sequence[Row], checkpoint: str) -> list[tuple[str, ...]]:
    """Return the head and a row for each method of a checkpoint on the reporting half, by rank correlation."""
    cells: dict[str, dict[tuple[str, str], Row]] = {}
    for line in lines:
        if (line["checkpoint"], line["half"]) == (checkpoint, "report"):
            cells.setdefault(line["method"], {})[line["tokens"], line["metric"]] = line
    order = sorted(cells, key=lambda method: -cells[method]["all", "spearman"]["mean"])
    columns = [(tokens, metric) for tokens in TOKENS for metric in METRICS]
    titles = [TITLES[metric] + ("" if tokens == "all" else f", {tokens}") for tokens, metric in columns]
    rows = []
    for method in order:
        count = str(cells[method]["all", "spearman"]["count"])
        rows.append((method, count, *(_cell(cells[method][column]) for column in columns)))
    return [("method", "n", *titles), *rows]


def _cell(line: Row) -> str:
    return f"{line['mean']:.2f} [{line['low']:.2f}, {line['high']:.2f}]"


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
            names_shown = ("attn_lrp", "lrp", "logit", "recency")
            shown = ", ".join(f"{method} {means[method]['mean']:.2f}" for method in names_shown)
            texts.append(f"{CHECKPOINTS[name].label}: {shown} (n = {means['logit']['count']})")
        return "; ".join(texts)

    rows = (
        (
            "Transformer, hybrid",
            "[`attn_lrp`](attn_lrp.md), the default",
            "counts what tokens decide by queries and keys; " + correlations("smollm2", "smollm2-first", "iglm"),
            "does not add up; the token of the largest effect is mostly the last one, which recency names more often",
        ),
        (
            "encoder, vision Transformer",
            "[`lrp`](lrp.md), the default",
            "adds up to the logit exactly; " + correlations("rxnfp", "rxnfp-classes", "rxnmapper", "antiberty"),
            "no pretrained vision Transformer was measured",
        ),
        (
            "linear RNN, state-space model",
            "[`lrp`](lrp.md), the default",
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
        'chose nothing. "No sinks" ranks all tokens but attention sinks, "no last" all but the explained position: '
        "the last token of a prompt, the mask of a masked model, [CLS] of a classifier. Scores of single layers are "
        f"averaged. Methods for which the model reads more than {PASSES} sequences measure nearly the truth; they are "
        "scored on `n` of these inputs for reference, once for each model. `kernel_shap`, which reads hundreds, is "
        "left out.",
        f"{record['rule']} "
        + " ".join(f"For {kind}: `{method}`." for kind, method in record["best"].items())
        + " In a model without gates, such as BERT, `lrp` is `logit`.",
        _behind(record),
    ]
    for name in dict.fromkeys(line["checkpoint"] for line in record["numbers"]):
        head, *rows = table(record["numbers"], name)
        parts.append(f"**{CHECKPOINTS[name].label}**\n\n" + table_text(head, rows))
    parts += [_atom_maps(entry) for entry in record["atom maps"].values()]
    return "\n" + "\n\n".join(part.rstrip() for part in parts) + "\n"


def _behind(record: Mapping[str, Any]) -> str:
    """Return the table of the default methods beside the best other ones."""
    rows = []
    for line in behind(record):
        if line["tokens"] != "no sinks":
            shown = f"{line['mean']:+.2f} [{line['low']:+.2f}, {line['high']:+.2f}]"
            column = TITLES[line["metric"]] + ("" if line["tokens"] == "all" else f", {line['tokens']}")
            verdict = "yes" if line["significant"] else "no"
            label = CHECKPOINTS[line["checkpoint"]].label
            rows.append((label, column, line["default"], line["method"], shown, str(line["count"]), verdict))
    head = ("checkpoint", "number", "default", "best other", "default minus other", "n", "below")
    defaults = ", ".join(f"`{method}` for {kind}" for kind, method in DEFAULTS.items())
    return (
        f"The default of `explain` ({defaults}) beside the method with the largest mean of the others that read at "
        f"most {PASSES} sequences, on the same inputs. Below: the 95 % interval of the paired difference lies below "
        "zero. The best other method is the best of about a dozen on these inputs, which favours it.\n\n"
        + table_text(head, rows)
    )


def _atom_maps(entry: Mapping[str, Any]) -> str:
    """Return the section on the atom maps of reactions."""
    lines = [(line["method"], _cell(line)) for line in entry["numbers"]]
    return (
        "### Atom maps\n\n"
        f"Head {HEAD} of layer {LAYER} of rxnmapper, counted from 0, maps the atoms of a product to those of the "
        "reactants, and its package reads the map off this head (Schwaller et al., 2021). hit@1 is the share of a "
        "product's atoms whose mapped atom, or one of equal bonds, is ranked first among the atoms of the reactants: "
        f"a mean over {entry['numbers'][0]['count']} reactions ({entry['atoms']} atoms), with a 95 % bootstrap over "
        "reactions. Maps are read in the row of the atom; other methods explain the logit of the atom's token under a "
        'mask. "Same text" ranks atoms by the length of the text around them that the product has too. The head '
        "itself defines the map, together with rules on elements and neighbours.\n\n"
        + table_text(("method", "hit@1"), lines)
    )

"""`docs/evidence/pretrained.md`, and the table of default methods, written from the record of `evidence real`."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evidence import section
from evidence.atom_maps import HEAD, LAYER
from evidence.classes import CLASSES
from evidence.knockout import KNOCKOUT
from evidence.pictures import COLOURS, figure
from evidence.rankings import BASELINES, DEFAULTS, METRICS, PASSES, ROW, TOKENS, Row, behind, beside_baselines
from evidence.rationales import RATIONALES
from evidence.record import RESULTS, Numbers
from evidence.section import Section
from evidence.truths import BIDIRECTIONAL, CAUSAL, CHECKPOINTS, DISTANT, PER_KIND, RECURRENT, distant_words
from tools.markers import table as table_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "pretrained"
"""Name of the page and of its picture."""

RECORD = RESULTS / "real.json"

SECTIONS: Mapping[str, Section] = {each.name: each for each in (KNOCKOUT, RATIONALES, CLASSES)}
"""Measurements beside the rankings, each a section of the page, by their names on the command line."""

COMPOSED = "alti (compose='rollout')"
"""The row of the default for models without logits."""

CAPTION = (
    "Spearman's correlation of scores and measured effects by method, mean and 95 % interval over the inputs of "
    "the reporting half; orange: the default of `explain`; grey: baselines that ignore the model."
)

COLUMNS, GREY = 3, "#8a90a0"

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


def kinds(methods: str = "", howto: str = "../howto/") -> str:
    """Return the table of the kinds of models with their default methods, from the recorded numbers.

    `methods`, `howto`: the folders of the methods' pages and of the guides, from the page of the table.
    """
    record = json.loads(RECORD.read_text())

    def link(name: str) -> str:
        return f"[`{name}`]({methods}{name}.md)"

    effects = f"[`effects`]({howto}effects.md)"
    rows = (
        (
            "Transformer, hybrid",
            f'{link("attn_lrp")} with split="thirds", the default',
            "counts what tokens decide by queries and keys, beside what they send",
            "does not add up; halves, as published, rank IgLM's tokens a little better and SmolLM2's worse; the token "
            "of the largest effect is mostly the last one, which recency names as often or more often",
            _by_how_much(record, CAUSAL),
        ),
        (
            "encoder, vision Transformer",
            f'{link("lrp")} with measure="log-odds", the default',
            "adds up to the log-odds exactly, with a remainder of the other tokens' entropy",
            "no pretrained vision Transformer was measured",
            _by_how_much(record, BIDIRECTIONAL),
        ),
        (
            "linear RNN, state-space model",
            f'{link("lrp")} with measure="log-odds", the default',
            "adds up to the log-odds exactly, with a remainder of the other tokens' entropy",
            f"counts what tokens send; {effects} measures what they decide",
            _by_how_much(record, RECURRENT),
        ),
        (
            "no logits",
            f'{link("alti")} with compose="rollout", the default',
            "needs no logit and no choice of a layer",
            "gives an attention sink about a third of each row",
            _by_how_much(record, None),
        ),
        (
            "any, to confirm",
            f"`explain(check=True)`, {effects}",
            "replaces tokens and runs the model",
            "costs a run for each replacement",
            "the truth of these numbers",
        ),
    )
    head = ("your model", "method", "why", "caveat", "rank correlation with the effect of replacing tokens")
    return table_text(head, rows)


def _by_how_much(record: Mapping[str, Any], kind: str | None) -> str:
    """Return the rank correlations of a kind's default on the reporting half, all tokens, and their gaps to recency.

    Without a kind: the least and the largest of `COMPOSED` over all checkpoints.
    """
    column = {"half": "report", "tokens": "all", "metric": "spearman"}

    def row(lines: Sequence[Row], **keys: str) -> Row | None:
        matches = [line for line in lines if all(line[key] == value for key, value in {**column, **keys}.items())]
        return matches[0] if matches else None

    names = [name for name, checkpoint in CHECKPOINTS.items() if kind in (None, checkpoint.kind)]
    if kind is None:
        means = [mean["mean"] for name in names if (mean := row(record["numbers"], checkpoint=name, method=COMPOSED))]
        return f"{min(means):.2f} to {max(means):.2f} on {len(means)} checkpoints"
    texts = []
    for name in names:
        mean = row(record["numbers"], checkpoint=name, method=DEFAULTS[kind])
        gap = row(record["differences"], checkpoint=name, method="recency")
        if mean is not None and gap is not None:
            texts.append(
                f"{CHECKPOINTS[name].label}: {mean['mean']:.2f}, {gap['mean']:+.2f} [{gap['low']:+.2f}, "
                f"{gap['high']:+.2f}] over recency (n = {mean['count']})"
            )
    return "<br>".join(texts)


def page() -> str:
    """Return the page on pretrained checkpoints, from the recorded numbers."""
    record = json.loads(RECORD.read_text())
    paragraphs = [
        "# Pretrained checkpoints",
        "Which method ranks first the tokens whose replacement changes the answer of a pretrained model most?",
        f"![{CAPTION}]({NAME}.png)\n\n{CAPTION}",
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
        _beside_baselines(record),
    ]
    for name in dict.fromkeys(line["checkpoint"] for line in record["numbers"]):
        head, *rows = table(record["numbers"], name)
        paragraphs.append(f"## {CHECKPOINTS[name].label}")
        if name == DISTANT:
            paragraphs.append(_distant_words())
        paragraphs.append(table_text(head, rows))
    paragraphs += [_atom_maps(entry) for entry in record["atom maps"].values()]
    paragraphs += [section.text_of(SECTIONS[name], numbers) for name, numbers in sections().items()]
    return "\n\n".join(text.rstrip() for text in paragraphs) + "\n"


def sections() -> dict[str, Numbers]:
    """Return the records of the sections that are measured, by name."""
    records = {name: section.read(each) for name, each in SECTIONS.items()}
    return {name: numbers for name, numbers in records.items() if numbers is not None}


def picture() -> "Figure":
    """Draw the rank correlations of every method on each checkpoint, with their intervals."""
    record = json.loads(RECORD.read_text())
    names = list(dict.fromkeys(line["checkpoint"] for line in record["numbers"]))
    drawn = figure(13, 4.3 * -(-len(names) // COLUMNS))
    axes = drawn.subplots(-(-len(names) // COLUMNS), COLUMNS, squeeze=False).flatten()
    for ax, name in zip(axes, names, strict=False):
        column = {"checkpoint": name, "half": "report", "tokens": "all", "metric": "spearman"}
        lines = [line for line in record["numbers"] if all(line[key] == value for key, value in column.items())]
        lines.sort(key=lambda line: line["mean"])
        ax.axvline(0, color="#c8ccd6", linewidth=0.8, zorder=0)
        for height, line in enumerate(lines):
            is_default = line["method"] == DEFAULTS[CHECKPOINTS[name].kind]
            colour = COLOURS[1] if is_default else GREY if line["method"] in BASELINES else COLOURS[0]
            ax.plot([line["low"], line["high"]], [height, height], color=colour, linewidth=1.4, alpha=0.6)
            ax.plot(line["mean"], height, "o", color=colour, markersize=5)
        ax.set_yticks(range(len(lines)), [line["method"] for line in lines], fontsize=7.5)
        ax.set_xlim(-0.8, 1)
        ax.set_title(CHECKPOINTS[name].label.replace("`", ""), fontsize=10, loc="right")
        ax.spines[["top", "right", "left"]].set_visible(False)
        ax.tick_params(left=False, labelsize=7.5)
    for ax in axes[len(names) :]:
        ax.axis("off")
    return drawn


def _behind(record: Mapping[str, Any]) -> str:
    """Return the table of the default methods beside the best other ones."""
    rows = []
    for line in behind(record):
        if line["tokens"] != "no sinks":
            verdict = "yes" if line["significant"] else "no"
            methods = (line["default"], line["method"])
            rows.append((*_checkpoint_and_number(line), *methods, _gap(line), str(line["count"]), verdict))
    head = ("checkpoint", "number", "default", "best other", "default minus other", "n", "below")
    defaults = ", ".join(f"`{method}` for {kind}" for kind, method in DEFAULTS.items())
    return (
        f"The default of `explain` ({defaults}) beside the method with the largest mean of the others that read at "
        f"most {PASSES} sequences, on the same inputs. Below: the 95 % interval of the paired difference lies below "
        "zero. The best other method is the best of about a dozen on these inputs, which favours it.\n\n"
        + table_text(head, rows)
    )


def _beside_baselines(record: Mapping[str, Any]) -> str:
    """Return the table of the default methods beside the baselines, where the last token is the explained one."""
    lines: dict[tuple[str, ...], dict[str, Row]] = {}
    for line in beside_baselines(record):
        lines.setdefault(tuple(line[key] for key in ROW), {})[line["method"]] = line
    rows = []
    for of_baselines in lines.values():
        gaps = [cell for name in BASELINES for cell in (_gap(of_baselines[name]), of_baselines[name]["verdict"])]
        recency = of_baselines["recency"]
        rows.append((*_checkpoint_and_number(recency), *gaps, str(recency["count"])))
    head = ("checkpoint", "number", *(cell for name in BASELINES for cell in (f"minus {name}", "default is")), "n")
    column = {"half": "report", "tokens": "all", "metric": "hit_at_1", "method": "recency"}
    shares = [
        f"{line['mean']:.2f} for {CHECKPOINTS[line['checkpoint']].label}"
        for line in record["numbers"]
        if all(line[key] == value for key, value in column.items())
        and CHECKPOINTS[line["checkpoint"]].kind != BIDIRECTIONAL
    ]
    return (
        "The default beside the baselines, for checkpoints whose last token is the explained one, on the same inputs. "
        "Above, below: the 95 % interval of the paired difference lies on that side of zero. hit@1 of `recency` over "
        f"all tokens is the share of inputs whose last token has the largest effect ({'; '.join(shares)}), so where "
        "it is near 1 no method can lie above it, and the numbers without the last token tell more.\n\n"
        + table_text(head, rows)
    )


def _distant_words() -> str:
    """Return the paragraph on the prompts whose answer distant words decide."""
    kinds = distant_words()
    return (
        f"The answers of these prompts of 14 to 24 tokens need words far from the end. They have {len(kinds)} kinds: "
        f"{', '.join(kinds)}. Of {sum(map(len, kinds.values()))} prompts that were written with an intended "
        f"word each, the first {PER_KIND} of each kind are read for which SmolLM2-135M predicts it, with and without "
        "begin-of-text. They are read with begin-of-text. No score and no effect selected a prompt."
    )


def _checkpoint_and_number(line: Row) -> tuple[str, str]:
    number = TITLES[line["metric"]] + ("" if line["tokens"] == "all" else f", {line['tokens']}")
    return CHECKPOINTS[line["checkpoint"]].label, number


def _gap(line: Row) -> str:
    return f"{line['mean']:+.2f} [{line['low']:+.2f}, {line['high']:+.2f}]"


def _atom_maps(entry: Mapping[str, Any]) -> str:
    """Return the section on the atom maps of reactions."""
    lines = [(line["method"], _cell(line)) for line in entry["numbers"]]
    return (
        "## Atom maps\n\n"
        f"Head {HEAD} of layer {LAYER} of rxnmapper, counted from 0, maps the atoms of a product to those of the "
        "reactants, and its package reads the map off this head (Schwaller et al., 2021). hit@1 is the share of a "
        "product's atoms whose mapped atom, or one of equal bonds, is ranked first among the atoms of the reactants: "
        f"a mean over {entry['numbers'][0]['count']} reactions ({entry['atoms']} atoms), with a 95 % bootstrap over "
        "reactions. Maps are read in the row of the atom; other methods explain the logit of the atom's token under a "
        'mask. "Same text" ranks atoms by the length of the text around them that the product has too. The head '
        "itself defines the map, together with rules on elements and neighbours.\n\n"
        + table_text(("method", "hit@1"), lines)
    )

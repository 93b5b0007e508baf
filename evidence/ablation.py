"""Text: edges of the most important token are cut in windows of layers, and ranked tokens are replaced."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from torch import nn

from evidence import truths
from evidence.ablation_measures import (
    ALL,
    DEFAULT,
    DISTANT,
    DRAWS,
    EFFECT,
    FRACTIONS,
    IMPORTANT,
    LAYERS,
    MASKINGS,
    METHODS,
    ORDERS,
    OTHER,
    OTHERS,
    OUTGOING,
    REPLACED,
    SOURCES,
    cut_rows,
    deletion_rows,
    metric,
    prompts,
    rank_rows,
    windows,
)
from evidence.claims import HERE, Claim, Results
from evidence.comparisons import Comparison, Term, better, bounded
from evidence.pictures import COLOURS, figure
from evidence.study import SEEDS, Size, Study, View
from unilinattn.evaluation import Table, mean_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CUTS, RANKS, DELETION = "cuts", "ranks", "deletion"
"""The tables."""

KNOCKOUT = "Endy et al. (ACL 2025)"

HALF = 0.71
"""The correlation of ranks that share half of their variance."""

LABELS = {"mamba2": "Mamba-2", "gated_deltanet": "gated DeltaNet"}

DRAWN = {EFFECT: "#1c1f2b", DEFAULT: COLOURS[1], "attribution": COLOURS[0], "latim": COLOURS[2], "recency": "#b9bdc9"}
"""Rankings of the picture, with their colours."""


class Ablation(Study):
    """Cuts and deletions on held-out text."""

    name = "ablation"
    title = "Cuts and deletions on text"
    question = "On real text, which layers carry the most important token, and do methods rank first what matters?"
    source = (
        'Endy et al., "Mamba Knockout for Unraveling Factual Information Flow" (ACL 2025), and Geva et al. (EMNLP '
        "2023), for the cuts; HMA ACL 4.3, Fig. 5, for the deletions"
    )
    text = f"""
Two linear RNNs of 1.4 million parameters, Mamba-2 of five layers and gated DeltaNet of four, learned the documentation
of Python packages. They read 60 prompts of held-out documents, at most two of each, after which both expect the same
next token; in half of them the last four tokens do not suffice. Each model was trained once, so n counts prompts, and
intervals are over prompts. All numbers are falls of the log-probability of the expected
token, in nats.

The truth of a token is the fall when it is replaced, the mean of {truths.DRAWS} random tokens. *Important* is the token
with the largest truth before the last one, *distant* that with the largest truth before the last four, *other* the
mean over {OTHERS} random ones; no method names them.

*Cuts*: the edge from a token to the last one is cut in all layers, or in a window of two consecutive
ones; residual streams, other edges and decays stay. Endy et al. cut the tokens of a subject in facts
that models of up to 2.8 billion parameters know; here it is one token, and the text is no list of facts. That the
distant token stands for their subjects was decided after its numbers were known; the same claims do not hold for the
most important token, which is mostly a neighbour of the last one. A correlation is the mean of its jackknife
pseudo-values over prompts.

*Deletions*: of the tokens before the last one the highest-ranked {" or ".join(f"{f:.0%}" for f in FRACTIONS)} are
replaced, by random tokens (mean of {DRAWS} draws, the same ones for every method) or by the mean embedding of the
prompt, and so are the lowest-ranked ones; numbers are means over both shares, on the first half of the prompts.
`effect` ranks by the truth, with other draws. `lrp` explains log-odds, the default of `explain` for these models; `raw`
and `latim` are means over layers.
"""
    caption = (
        "Left: fall of the log-probability when the edge from the most important token (solid) or the distant one "
        "(dashed) to the last token is cut in a window of layers, with 95 % intervals over prompts; diamonds: in all "
        "layers. Right: fall as ranked tokens are replaced by random ones, the highest first (solid) or the lowest "
        "first (dashed)."
    )
    unit = "prompts"
    size = Size(60, 0)
    quick = Size(3, 0)
    views = (
        View(
            CUTS,
            "Fall without the edges of the most important token and of others, by layers",
            [(model, column, f"{model}, {column}") for model in LABELS for column in (*SOURCES, OTHER)],
        ),
        View(
            RANKS,
            "Spearman's correlation, over prompts, of the fall by a cut and by the replacement of the same token",
            [(model, source, f"{model}, {source}") for model in LABELS for source in SOURCES],
        ),
        *(
            View(
                DELETION,
                f"Fall as tokens are replaced by {text}",
                [(model, metric(masking, order), f"{model}, {order}") for model in LABELS for order in ORDERS],
                note="Highest first: larger is better. Lowest first: smaller is better.",
            )
            for masking, text in MASKINGS.items()
        ),
    )

    def hosts(self, weights: Path, seed: int) -> dict[str, Callable[[], nn.Module]]:
        """Return functions that load the two linear RNNs, the same for every seed."""
        return {name: partial(_documented, name) for name in LABELS}

    def measure(
        self, hosts: Mapping[str, Callable[[], nn.Module]], seed: int, size: Size, out: Path
    ) -> dict[str, Table]:
        """Measure cuts and deletions."""
        if seed != SEEDS[0]:
            # Each model was trained once.
            return {}
        every = {name: prompts(name, size.scored) for name in hosts}
        cuts = Table(cut_rows(hosts, every))
        deleted = [
            row
            for name, load in hosts.items()
            for row in deletion_rows(name, load, every[name][: size.scored // 2], out)
        ]
        return {CUTS: cuts, RANKS: Table(rank_rows(cuts)), DELETION: Table(deleted)}

    def claims(self, results: Results) -> list[Claim]:
        """Return the claims of Endy et al., of HMA ACL, and of this library."""
        return _of_cuts() + _of_deletions()

    def picture(self, hosts: Mapping[str, Callable[[], nn.Module]], results: Results) -> "Figure":
        """Draw the falls by window and by fraction."""
        return _drawing(results)


def _documented(name: str) -> nn.Module:
    return truths.documented(name)[0]


def _middle(model: str) -> dict[str, float]:
    """Return the weights of the windows in the middle of a model: one, or the mean of two."""
    names = list(windows(model))
    central = names[(len(names) - 1) // 2 : len(names) // 2 + 1]
    return dict.fromkeys(central, 1 / len(central))


def _differences(source: str, more: str, less: str) -> list[Comparison]:
    """Return for each model that the fall is larger by a cut in one window, early, middle or late, than in another."""
    comparisons = []
    for model in LABELS:
        first, *_, last = windows(model)
        weights = {"early": {first: 1.0}, "middle": _middle(model), "late": {last: 1.0}}
        terms = [(weight, Term(CUTS, model, name, source)) for name, weight in weights[more].items()]
        terms += [(-weight, Term(CUTS, model, name, source)) for name, weight in weights[less].items()]
        comparisons.append(Comparison(f"{source}, {more} window less {less} one on {model}", tuple(terms), ">"))
    return comparisons


def _of_cuts() -> list[Claim]:
    more = [
        Comparison(
            f"fall, {IMPORTANT} less {OTHER} on {model}",
            ((1.0, Term(CUTS, model, ALL, IMPORTANT)), (-1.0, Term(CUTS, model, ALL, OTHER))),
            ">",
        )
        for model in LABELS
    ]
    return [
        Claim.of(
            "Cutting the edge from the most important token lowers log p more than from another token", HERE, more
        ),
        Claim.of(
            "From a distant token, a late window matters more than an early one",
            KNOCKOUT,
            _differences(DISTANT, "late", "early"),
        ),
        Claim.of(
            "From a distant token, a middle window matters more than an early one",
            KNOCKOUT,
            _differences(DISTANT, "middle", "early"),
        ),
        Claim.of(
            "From a distant token, a late window matters more than a middle one",
            HERE,
            _differences(DISTANT, "late", "middle"),
        ),
        Claim.of(
            "From the most important token, mostly a neighbour of the last one, later windows matter more than "
            "earlier ones",
            HERE,
            *(_differences(IMPORTANT, *pair) for pair in (("late", "early"), ("middle", "early"), ("late", "middle"))),
        ),
        Claim.of(
            "Cutting the edges from the distant token to every later one lowers log p more than the edge to the last "
            "token",
            HERE,
            better(CUTS, DISTANT, OUTGOING, ALL, tuple(LABELS)),
        ),
        Claim.of(
            "Replacing the important or distant token lowers log p more than cutting its edges to every later one",
            HERE,
            *(better(CUTS, source, REPLACED, OUTGOING, tuple(LABELS)) for source in SOURCES),
        ),
        Claim.of(
            "Cutting the edge to the last token ranks prompts as replacing the token does: half of the ranks' variance "
            "is shared",
            HERE,
            *(bounded(RANKS, source, ALL, tuple(LABELS), "≥", HALF) for source in SOURCES),
        ),
        Claim.of(
            "Cutting the edges to every later token ranks prompts as replacing the token does",
            HERE,
            *(bounded(RANKS, source, OUTGOING, tuple(LABELS), "≥", HALF) for source in SOURCES),
        ),
    ]


def _of_deletions() -> list[Claim]:
    def ranked(method: str, than: str, orders: Iterable[str] = ORDERS) -> list[Comparison]:
        return [
            comparison
            for masking in MASKINGS
            for order in orders
            for comparison in better(
                DELETION, metric(masking, order), method, than, tuple(LABELS), larger=order == ORDERS[0]
            )
        ]

    return [
        Claim.of(
            "Attribution ranks tokens better than raw attention and rollout",
            "HMA ACL 4.3, on other text and models",
            *(ranked("attribution", other) for other in ("raw", "rollout")),
        ),
        Claim.of(
            "Every method's highest tokens matter more than random ones",
            HERE,
            *(ranked(method, "random", ORDERS[:1]) for method in METHODS),
        ),
        Claim.of(
            "Every method's lowest tokens matter less than random ones",
            HERE,
            *(ranked(method, "random", ORDERS[1:]) for method in METHODS),
        ),
        Claim.of("The default, `lrp` of log-odds, ranks tokens better than recency", HERE, ranked(DEFAULT, "recency")),
        Claim.of(
            "The default ranks tokens better than `attribution` and `latim`",
            HERE,
            *(ranked(DEFAULT, other) for other in ("attribution", "latim")),
        ),
        Claim.of(
            "The tokens with the largest measured effects matter more than the highest ones of every method",
            HERE,
            *(ranked(EFFECT, method, ORDERS[:1]) for method in (*METHODS, "recency")),
        ),
    ]


def _drawing(results: Results) -> "Figure":
    drawn = figure(13, 3.8)
    left, *right = drawn.subplots(1, 1 + len(LABELS), width_ratios=[1.2, *[1] * len(LABELS)])
    rows = results.tables[CUTS][SEEDS[0]]
    for colour, (model, label) in zip(COLOURS, LABELS.items(), strict=False):
        depths = [(fmean(layers) + 0.5) / LAYERS[model] for layers in windows(model).values()]
        for source, style in zip(SOURCES, ("o-", "o--"), strict=True):
            falls = [
                mean_interval([row["value"] for row in rows.select(model=model, method=name, metric=source)])
                for name in windows(model)
            ]
            ends = [[fall.mean - fall.low for fall in falls], [fall.high - fall.mean for fall in falls]]
            name = label if source == IMPORTANT else None
            means = [fall.mean for fall in falls]
            left.errorbar(depths, means, ends, fmt=style, color=colour, label=name, capsize=2, markersize=4)
            left.plot(1.08, fmean(results.values(CUTS, model, ALL, source)), "D", color=colour, markersize=5)
    left.axhline(0, color="#c8ccd6", linewidth=0.8, zorder=0)
    left.set_xticks([0, 0.25, 0.5, 0.75, 1.08], ["0", "25 %", "50 %", "75 %", "all"])
    left.set_xlabel("depth of the middle of the window", fontsize=9)
    left.set_ylabel("fall of log p (nats)", fontsize=9)
    left.legend(frameon=False, fontsize=8)
    for ax, model in zip(right, LABELS, strict=True):
        for method, colour in DRAWN.items():
            for order, style in zip(ORDERS, ("o-", "o--"), strict=True):
                at_fractions = [
                    fmean(results.values(DELETION, model, method, metric("reference", order, fraction)))
                    for fraction in FRACTIONS
                ]
                name = method if order == ORDERS[0] else None
                ax.plot(FRACTIONS, at_fractions, style, color=colour, label=name, linewidth=1.4, markersize=4)
        ax.set_title(LABELS[model], fontsize=10, loc="left")
        ax.set_xticks(FRACTIONS, [f"{fraction:.0%}" for fraction in FRACTIONS])
        ax.set_xlabel("share of the tokens replaced", fontsize=9)
    right[-1].legend(frameon=False, fontsize=8, loc="center right")
    for ax in (left, *right):
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(labelsize=8)
    return drawn


STUDY = Ablation()

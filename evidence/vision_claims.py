"""The claims of the vision study: those of HMA (ACL) on images, and those of this library."""

from collections.abc import Sequence
from statistics import fmean

from evidence.claims import Claim, Outcome, Results, paired_interval
from evidence.vision_tables import METHODS, PERTURBED
from unilinattn.errors import InputError
from unilinattn.evaluation.table import PARTS

VIM, VIT, EVERY = ("vim",), ("vit",), ("vim", "vim_first", "vit")
BOTH = (*VIM, *VIT)
OF_HMA = ("pixel_accuracy", "mean_ap", "mean_iou")
MASKINGS = ("black", "grey", "background", "blur")
ON_PAR = 0.02
"""Largest difference of metrics that count as on par; the differences within HMA Table 5's discarding are below it."""


def claims(results: Results) -> list[Claim]:
    """Return the claims with their verdicts."""
    return [*_table_1(results), *_table_2(results), *_ablations(results), *_bias(results), *_here(results)]


def _table_1(results: Results) -> list[Claim]:
    def better(kind: str, method: str, than: str, models: Sequence[str]) -> Outcome:
        return results.better("perturbation", f"{kind} black", method, than, models, larger=kind == "negative")

    return [
        Claim.of(
            "On Mamba, attribution is better than raw attention and rollout by positive perturbation",
            "HMA Table 1",
            *(better("positive", "attribution", than, VIM) for than in ("raw", "rollout")),
        ),
        Claim.of(
            "On Mamba, rollout is better than raw attention and attribution by negative perturbation",
            "HMA Table 1",
            *(better("negative", "rollout", than, VIM) for than in ("raw", "attribution")),
        ),
        Claim.of(
            "On the Transformer, attribution is better than raw attention and rollout by both perturbations (here "
            "`attribution`, in the paper transformer attribution)",
            "HMA Table 1",
            *(
                better(kind, "attribution", than, VIT)
                for kind in ("positive", "negative")
                for than in ("raw", "rollout")
            ),
        ),
        Claim.of(
            "By positive perturbation Mamba is better than the Transformer for raw attention and rollout, and worse "
            "for attribution",
            "HMA 4.2, Table 1",
            *(
                between(results, "perturbation", "positive black", method, *pair, larger=False)
                for method, pair in (("raw", BOTH), ("rollout", BOTH), ("attribution", BOTH[::-1]))
            ),
        ),
        Claim.of(
            "By negative perturbation the Transformer is better than Mamba for all three methods",
            "HMA 4.2, Table 1",
            *(
                between(results, "perturbation", "negative black", method, "vit", "vim")
                for method in ("raw", "rollout", "attribution")
            ),
        ),
        Claim.of(
            "Mamba is more sensitive to black patches: its gap to the Transformer by negative perturbation narrows "
            "when patches are blurred instead",
            "HMA 4.2 (suggested)",
            narrower(results, ("raw", "rollout", "attribution")),
        ),
    ]


def _table_2(results: Results) -> list[Claim]:
    def better(metric: str, method: str, than: str, models: Sequence[str]) -> Outcome:
        return results.better("methods", metric, method, than, models)

    return [
        Claim.of(
            "By raw attention Mamba has more pixel accuracy and mIoU than the Transformer, which has more mAP",
            "HMA 4.2, Table 2",
            *(
                between(results, "methods", metric, "raw", *pair)
                for metric, pair in (("pixel_accuracy", BOTH), ("mean_iou", BOTH), ("mean_ap", BOTH[::-1]))
            ),
        ),
        Claim.of(
            "By rollout Mamba outperforms the Transformer in pixel accuracy, mAP and mIoU",
            "HMA 4.2, Table 2",
            *(between(results, "methods", metric, "rollout", *BOTH) for metric in OF_HMA),
        ),
        Claim.of(
            "Transformer attribution on the Transformer has the highest scores by every metric: more than Mamba's "
            "attribution, and than rollout and raw attention on the Transformer",
            "HMA 4.2, Table 2",
            *(between(results, "methods", m, "transformer attribution", "vit", "vim", "attribution") for m in OF_HMA),
            *(better(m, "transformer attribution", than, VIT) for m in OF_HMA for than in ("rollout", "raw")),
        ),
        Claim.of(
            "Mamba attribution consistently surpasses the method based on LRP",
            "HMA 4.2, Table 2",
            *(better(metric, "attribution", "lrp", VIM) for metric in OF_HMA),
        ),
        Claim.of(
            "On Mamba, attribution finds more than rollout, and rollout more than raw attention",
            "HMA Table 2",
            *(
                better(metric, *pair, VIM)
                for metric in OF_HMA
                for pair in (("attribution", "rollout"), ("rollout", "raw"))
            ),
        ),
        Claim.of(
            "Raw attention is best as the mean over layers: no less than at its best layer",
            "HMA 4.2",
            *(
                results.within("methods", metric, "raw, best layer", "raw", BOTH, most=ON_PAR)
                for metric in ("mean_ap", "foreground_ap")
            ),
        ),
        Claim.untested(
            "AUAC and AU-MSE of Mamba and Mamba-2 are on a par with the Transformer's on ARC-Easy",
            "HMA Tables 3 and 8",
            "pretrained language models of 130 million to 2.8 billion parameters are not part of this repository",
        ),
    ]


def _ablations(results: Results) -> list[Claim]:
    def no_more(other: str) -> list[Outcome]:
        return [results.within("table5", metric, other, "mean", VIM, most=ON_PAR) for metric in OF_HMA]

    def better(table: str, method: str, than: str) -> list[Outcome]:
        return [results.better(table, metric, method, than, VIM) for metric in OF_HMA]

    return [
        Claim.of(
            "The mean over heads is on a par with the other reductions or better",
            "HMA App. D, Table 5",
            *(one for other in ("max", "min") for one in no_more(other)),
        ),
        Claim.untested(
            "The product over heads has the most pixel accuracy of all reductions",
            "HMA Table 5",
            "the product over the 96 channels of this ViM underflows to zero",
        ),
        Claim.of("The mean over heads finds more than the minimum", "HMA Table 5", *better("table5", "mean", "min")),
        Claim.of(
            "Discarding the smallest scores of a row gains nothing",
            "HMA Table 5",
            *(one for share in (0.2, 0.4, 0.6, 0.8) for one in no_more(f"mean, discard {share}")),
        ),
        Claim.of(
            "Clamping negative scores finds more than keeping them or taking absolute values",
            "HMA App. D, Table 6",
            *(one for other in ("keep", "abs") for one in better("table6", "clamp", other)),
        ),
    ]


def _bias(results: Results) -> list[Claim]:
    def near(layer: int) -> Outcome:
        text = f"rank correlation with nearness above 0 in layer {layer}"
        return results.every("cls", "nearness", f"layer {layer}", ("vim", "vim_first"), lambda value: value > 0, text)

    return [
        Claim.of(
            "Patches near the CLS token influence it more, in the first layer and the last two, wherever it stands",
            "HMA 4.1, Figure 2",
            *(near(layer) for layer in (1, 3, 4)),
        )
    ]


def _here(results: Results) -> list[Claim]:
    def better(method: str, than: str, models: Sequence[str] = EVERY) -> Outcome:
        return results.better("methods", "foreground_ap", method, than, models)

    return [
        Claim.of(
            "One method finds the digit best on every architecture",
            "here",
            one_winner(results, "methods", [("foreground_ap", True)], tuple(METHODS), EVERY),
        ),
        Claim.of(
            "Every method finds more than random scores, by the average precision of the foreground",
            "here",
            all_beat(results, "random"),
        ),
        Claim.of(
            "Every method finds more than the nearness to the centre of the image",
            "here",
            all_beat(results, "centre"),
        ),
        Claim.of(
            "No method has more pixel accuracy than the prediction of no foreground at all",
            "here",
            *(
                results.within("methods", "pixel_accuracy", method, "all background", EVERY, most=0.0)
                for method in METHODS
            ),
        ),
        Claim.of(
            "`alti` finds more than `raw` on every architecture",
            "here",
            better("alti, best layer", "raw"),
            better("alti, best layer", "raw, best layer"),
        ),
        Claim.of(
            "`logit` finds more than `raw`, `rollout` and `attribution` on every architecture",
            "here",
            *(better("logit", than) for than in ("raw", "rollout", "attribution")),
        ),
        Claim.of("`lrp` finds more than `logit` on every architecture", "here", better("lrp", "logit")),
        Claim.of(
            "Attribution finds more with the CLS token first than in the middle",
            "here",
            between(results, "methods", "foreground_ap", "attribution", "vim_first", "vim"),
        ),
        Claim.of(
            "Removed in the order of the true mask, patches leave at most half of the accuracy, whatever replaces them",
            "here",
            *(
                results.every("perturbation", f"positive {masking}", "mask", BOTH, lambda value: value <= 0.5, masking)
                for masking in MASKINGS
            ),
        ),
        Claim.of(
            "The same method is best by positive and by negative perturbation, whatever replaces the patches",
            "here",
            one_winner(
                results,
                "perturbation",
                [
                    (f"{kind} {masking}", kind == "negative")
                    for kind in ("positive", "negative")
                    for masking in MASKINGS
                ],
                tuple(PERTURBED),
                BOTH,
            ),
        ),
    ]


def between(
    results: Results,
    table: str,
    metric: str,
    method: str,
    model: str,
    than: str,
    other: str | None = None,
    *,
    larger: bool = True,
) -> Outcome:
    """Return whether a method has a better number on one model than it, or `other`, on another model, for every seed.

    It is better if the confidence interval of the difference, by a bootstrap over the images, excludes zero.
    """
    other = method if other is None else other
    sign = 1 if larger else -1
    intervals = []
    for seed in results.tables[table]:
        rows = [results.rows(table, seed, *where, metric) for where in ((model, method), (than, other))]
        if [row["sample"] for row in rows[0]] != [row["sample"] for row in rows[1]]:
            raise InputError(f"{model} and {than} were measured on different images.")
        low, high = paired_interval(*([row[PARTS] for row in part] for part in rows))
        intervals.append(sorted((sign * low, sign * high)))
    pairs = zip(results.values(table, model, method, metric), results.values(table, than, other, metric), strict=True)
    gaps = [one - another for one, another in pairs]
    wins = sum(low > 0 for low, _ in intervals)
    losses = sum(high < 0 for _, high in intervals)
    text = (
        f"`{method}` on {model} against `{other}` on {than} by {metric}: better in {wins} of {len(gaps)}, worse in "
        f"{losses}, mean difference {fmean(gaps):+.3f}"
    )
    return Outcome(wins == len(gaps), text)


def narrower(results: Results, methods: Sequence[str]) -> Outcome:
    """Return whether the gap between ViT and ViM by negative perturbation is smaller with blur than with black."""

    def gaps(masking: str) -> list[float]:
        values = [
            [results.values("perturbation", model, method, f"negative {masking}") for method in methods]
            for model in ("vit", "vim")
        ]
        vit, vim = ([fmean(seeds) for seeds in zip(*part, strict=True)] for part in values)
        return [one - other for one, other in zip(vit, vim, strict=True)]

    black, blur = gaps("black"), gaps("blur")
    passed = sum(one > other for one, other in zip(black, blur, strict=True))
    return Outcome(
        passed == len(black),
        f"smaller gap in {passed} of {len(black)} seeds; mean gap {fmean(black):+.3f} with black and "
        f"{fmean(blur):+.3f} with blurred patches",
    )


def one_winner(
    results: Results,
    table: str,
    metrics: Sequence[tuple[str, bool]],
    methods: Sequence[str],
    models: Sequence[str],
) -> Outcome:
    """Return whether the mean over seeds ranks the same method first for every model and (metric, larger is better)."""
    winners = {}
    for model in models:
        for metric, larger in metrics:
            means = {method: fmean(results.values(table, model, method, metric)) for method in methods}
            best = (max if larger else min)(means, key=lambda method: means[method])
            winners[f"{model}, {metric}"] = f"`{best}` ({means[best]:.3f})"
    names = {text.split(" (")[0] for text in winners.values()}
    return Outcome(len(names) == 1, "; ".join(f"{where}: {text}" for where, text in winners.items()))


def all_beat(results: Results, baseline: str) -> Outcome:
    """Return whether every method is better than a baseline for every model and seed, and name those that are not."""
    found = {method: results.better("methods", "foreground_ap", method, baseline, EVERY) for method in METHODS}
    above = [f"`{method}`" for method, outcome in found.items() if outcome.holds]
    not_above = [f"`{method}`" for method, outcome in found.items() if not outcome.holds]
    text = f"better for every model and seed: {', '.join(above) or 'none'}; not so: {', '.join(not_above) or 'none'}"
    return Outcome(not not_above, text)

"""The claims of the vision study: those of HMA (ACL) on images, and those of this library."""

from collections.abc import Sequence

from evidence.claims import Claim
from evidence.comparisons import Comparison, Term, better, between, bounded, within
from evidence.vision_here import BOTH, ON_PAR, VIM, VIT, controlled, elsewhere, found
from evidence.vision_tables import coded

OF_HMA = ("pixel_accuracy", "mean_ap", "mean_iou")


def claims() -> list[Claim]:
    """Return the claims with their comparisons."""
    papers = [*_table_1(), *_table_2(), *_ablations(), *_table_9(), *_bias()]
    return [*papers, *_of_code(), *found(), *elsewhere(), *controlled()]


def _table_1() -> list[Claim]:
    def ranks(kind: str, method: str, than: str, models: Sequence[str]) -> list[Comparison]:
        return better("perturbation", f"{kind} black", method, than, models, larger=kind == "negative")

    return [
        Claim.of(
            "On Mamba, attribution is better than raw attention and rollout by positive perturbation",
            "HMA Table 1",
            *(ranks("positive", "attribution", than, VIM) for than in ("raw", "rollout")),
        ),
        Claim.of(
            "On Mamba, rollout is better than raw attention and attribution by negative perturbation",
            "HMA Table 1",
            *(ranks("negative", "rollout", than, VIM) for than in ("raw", "attribution")),
        ),
        Claim.of(
            "On the Transformer, attribution is better than raw attention and rollout by both perturbations (here "
            "`attribution`, in the paper transformer attribution)",
            "HMA Table 1",
            *(
                ranks(kind, "attribution", than, VIT)
                for kind in ("positive", "negative")
                for than in ("raw", "rollout")
            ),
        ),
        Claim.of(
            "By positive perturbation Mamba is better than the Transformer for raw attention and rollout, and worse "
            "for attribution",
            "HMA 4.2, Table 1",
            *(
                between("perturbation", "positive black", method, *pair, larger=False)
                for method, pair in (("raw", BOTH), ("rollout", BOTH), ("attribution", BOTH[::-1]))
            ),
        ),
        Claim.of(
            "By negative perturbation the Transformer is better than Mamba for all three methods",
            "HMA 4.2, Table 1",
            *(
                between("perturbation", "negative black", method, "vit", "vim")
                for method in ("raw", "rollout", "attribution")
            ),
        ),
        Claim.of(
            "Mamba is more sensitive to black patches: its gap to the Transformer by negative perturbation narrows "
            "when patches are blurred instead",
            "HMA 4.2 (suggested)",
            narrower(("raw", "rollout", "attribution")),
        ),
    ]


def _table_2() -> list[Claim]:
    def finds(metric: str, method: str, than: str, models: Sequence[str]) -> list[Comparison]:
        return better("methods", metric, method, than, models)

    return [
        Claim.of(
            "By raw attention Mamba has more pixel accuracy and mIoU than the Transformer, which has more mAP",
            "HMA 4.2, Table 2",
            *(
                between("methods", metric, "raw", *pair)
                for metric, pair in (("pixel_accuracy", BOTH), ("mean_iou", BOTH), ("mean_ap", BOTH[::-1]))
            ),
        ),
        Claim.of(
            "By rollout Mamba outperforms the Transformer in pixel accuracy, mAP and mIoU",
            "HMA 4.2, Table 2",
            *(between("methods", metric, "rollout", *BOTH) for metric in OF_HMA),
        ),
        Claim.of(
            "Transformer attribution on the Transformer has the highest scores by every metric: more than Mamba's "
            "attribution, and than rollout and raw attention on the Transformer",
            "HMA 4.2, Table 2",
            *(between("methods", m, "transformer attribution", "vit", "vim", "attribution") for m in OF_HMA),
            *(finds(m, "transformer attribution", than, VIT) for m in OF_HMA for than in ("rollout", "raw")),
        ),
        Claim.of(
            "Mamba attribution consistently surpasses the method based on LRP",
            "HMA 4.2, Table 2",
            *(finds(metric, "attribution", "lrp", VIM) for metric in OF_HMA),
        ),
        Claim.of(
            "On Mamba, attribution finds more than rollout, and rollout more than raw attention",
            "HMA Table 2",
            *(
                finds(metric, *pair, VIM)
                for metric in OF_HMA
                for pair in (("attribution", "rollout"), ("rollout", "raw"))
            ),
        ),
        Claim.of(
            "Raw attention is best as the mean over layers: no less than at its best layer",
            "HMA 4.2",
            *(
                within("methods", metric, "raw, best layer", "raw", BOTH, most=ON_PAR)
                for metric in ("mean_ap", "foreground_ap")
            ),
        ),
        Claim(
            "AUAC and AU-MSE of Mamba and Mamba-2 are on a par with the Transformer's on ARC-Easy",
            "HMA Tables 3 and 8",
            untested="language models of 130 million to 2.8 billion parameters are not part of this repository",
        ),
    ]


def _ablations() -> list[Claim]:
    def no_more(other: str) -> list[Comparison]:
        return [one for metric in OF_HMA for one in within("table5", metric, other, "mean", VIM, most=ON_PAR)]

    def finds(table: str, method: str, than: str) -> list[Comparison]:
        return [one for metric in OF_HMA for one in better(table, metric, method, than, VIM)]

    return [
        Claim.of(
            "The mean over heads is on a par with the other reductions or better",
            "HMA App. D, Table 5",
            *(one for other in ("max", "min") for one in no_more(other)),
        ),
        Claim.of(
            "The product over heads has more pixel accuracy than the other reductions (here its root, the geometric "
            "mean, because the product over 96 channels underflows)",
            "HMA Table 5",
            *(better("table5", "pixel_accuracy", "geometric-mean", other, VIM) for other in ("mean", "max", "min")),
        ),
        Claim.of("The mean over heads finds more than the minimum", "HMA Table 5", finds("table5", "mean", "min")),
        Claim.of(
            "Discarding the smallest scores of a row gains nothing",
            "HMA Table 5",
            *(one for share in (0.2, 0.4, 0.6, 0.8) for one in no_more(f"mean, discard {share}")),
        ),
        Claim.of(
            "Clamping negative scores finds more than keeping them or taking absolute values",
            "HMA App. D, Table 6",
            *(one for other in ("keep", "abs") for one in finds("table6", "clamp", other)),
        ),
    ]


def _table_9() -> list[Claim]:
    def surpasses(other: str) -> list[Comparison]:
        return [
            *better("activation", "auac", "attribution", other, VIM),
            *better("activation", "au_mse", "attribution", other, VIM, larger=False),
        ]

    return [
        Claim.of(
            "By AUAC and AU-MSE attribution surpasses rollout with the mean, the maximum and the minimum over heads "
            "(in the paper on language, here on images)",
            "HMA App. G, Table 9",
            *(surpasses(other) for other in ("rollout", "rollout, max", "rollout, min")),
        ),
        Claim.of(
            "By AUAC and AU-MSE attribution surpasses attribution without the clamp",
            "HMA App. G, Table 9",
            surpasses("attribution, keep"),
        ),
    ]


def _bias() -> list[Claim]:
    return [
        Claim.of(
            "Patches near the CLS token influence it more, in the first layer and the last two, wherever it stands",
            "HMA 4.1, Figure 2",
            *(bounded("cls", "nearness", f"layer {layer}", ("vim", "vim_first"), ">", 0) for layer in (1, 3, 4)),
        ),
        Claim.of(
            "After every layer the cosine similarity of two tokens is lower in Mamba than in the Transformer",
            "HMA arXiv App. 0.A, Figure 6",
            *(between("smoothing", "cosine", f"layer {layer}", "vim", "vit", larger=False) for layer in (1, 2, 3, 4)),
        ),
    ]


def _of_code() -> list[Claim]:
    """Return HMA's claims about Mamba by the code that was released with HMA."""

    def finds(method: str, than: str) -> list[Comparison]:
        return [one for metric in OF_HMA for one in better("methods", metric, coded(method), than, VIM)]

    def orders(kind: str, method: str, *others: str) -> list[Comparison]:
        metric, larger = f"{kind} black", kind == "negative"
        return [
            one
            for other in others
            for one in better("perturbation", metric, coded(method), coded(other), VIM, larger=larger)
        ]

    def ablated(table: str, label: str, *others: str) -> list[Comparison]:
        return [
            one
            for metric in OF_HMA
            for other in others
            for one in better(table, metric, coded(label), coded(other), VIM)
        ]

    source = "HMA {}, its released code"
    return [
        Claim.of(
            "On Mamba, attribution is better than raw attention and rollout by positive perturbation",
            source.format("Table 1"),
            orders("positive", "attribution", "raw", "rollout"),
        ),
        Claim.of(
            "On Mamba, rollout is better than raw attention and attribution by negative perturbation",
            source.format("Table 1"),
            orders("negative", "rollout", "raw", "attribution"),
        ),
        Claim.of(
            "On Mamba, attribution finds more than rollout, and rollout more than raw attention",
            source.format("Table 2"),
            finds("attribution", coded("rollout")),
            finds("rollout", coded("raw")),
        ),
        Claim.of(
            "Mamba attribution consistently surpasses the method based on LRP",
            source.format("4.2, Table 2"),
            finds("attribution", "lrp"),
        ),
        Claim.of(
            "The mean over heads finds more than the maximum and the minimum",
            source.format("Table 5"),
            ablated("table5", "mean", "max", "min"),
        ),
        Claim.of(
            "Clamping negative scores finds more than keeping them or taking absolute values",
            source.format("App. D, Table 6"),
            ablated("table6", "clamp", "keep", "abs"),
        ),
    ]


def narrower(methods: Sequence[str]) -> Comparison:
    """Return that the gap between ViT and ViM by negative perturbation is larger with black than with blurred patches.

    The gap is the mean over methods.
    """
    terms = tuple(
        (sign * side / len(methods), Term("perturbation", model, method, f"negative {masking}"))
        for masking, sign in (("black", 1), ("blur", -1))
        for model, side in (("vit", 1), ("vim", -1))
        for method in methods
    )
    return Comparison("gap of vit to vim by negative black less that by negative blur, mean of methods", terms, ">")

"""The claims of this library in the vision study."""

from collections.abc import Sequence

from evidence.claims import HERE, Claim
from evidence.comparisons import Comparison, Term, better, between, bounded, within
from evidence.vision_maps import ANOTHER
from evidence.vision_models import CONTROLS
from evidence.vision_tables import CONTROLLED, MASKINGS, METHODS, OF_CODE, PERTURBED, coded

VIM, VIT, EVERY = ("vim",), ("vit",), ("vim", "vim_first", "vit")
BOTH = (*VIM, *VIT)

ON_PAR = 0.02
"""Largest difference of metrics that count as on par; the differences within HMA Table 5's discarding are below it."""


def found() -> list[Claim]:
    """Return which methods find the digit, and whose order of patches changes the prediction."""

    def finds(method: str, than: str, models: Sequence[str] = EVERY) -> list[Comparison]:
        return better("methods", "foreground_ap", method, than, models)

    def all_find_more(baseline: str) -> list[Comparison]:
        return [one for method in METHODS for one in finds(method, baseline)]

    return [
        Claim.of(
            "`lrp` finds the digit best on every architecture",
            HERE,
            *(finds("lrp", other) for other in METHODS if other != "lrp"),
        ),
        Claim.of(
            "Every method finds more than random scores, by the average precision of the foreground",
            HERE,
            all_find_more("random"),
        ),
        Claim.of(
            "Every method finds more than the nearness to the centre of the image",
            HERE,
            all_find_more("centre"),
        ),
        Claim.of(
            "No method has more pixel accuracy than the prediction of no foreground at all",
            HERE,
            *(within("methods", "pixel_accuracy", method, "all background", EVERY, most=0.0) for method in METHODS),
        ),
        Claim.of(
            "`alti` finds more than `raw` on every architecture",
            HERE,
            finds("alti, best layer", "raw"),
            finds("alti, best layer", "raw, best layer"),
        ),
        Claim.of(
            "`logit` finds more than `raw`, `rollout` and `attribution` on every architecture",
            HERE,
            *(finds("logit", than) for than in ("raw", "rollout", "attribution")),
        ),
        Claim.of("`lrp` finds more than `logit` on every architecture", HERE, finds("lrp", "logit")),
        Claim.of(
            "With gamma = 0.25, as in MambaLRP, `lrp` finds more than without, on every architecture",
            HERE,
            finds("lrp, gamma 0.25", "lrp"),
        ),
        Claim.of(
            "Attribution finds more with the CLS token first than in the middle",
            HERE,
            between("methods", "foreground_ap", "attribution", "vim_first", "vim"),
        ),
        Claim.of(
            "Removed in the order of the true mask, patches leave at most half of the accuracy, whatever replaces them",
            HERE,
            *(bounded("perturbation", f"positive {masking}", "mask", BOTH, "≤", 0.5) for masking in MASKINGS),
        ),
        Claim.of(
            "`logit` is better than `raw`, `rollout` and `attribution` by positive and by negative perturbation, "
            "whatever replaces the patches",
            HERE,
            *(
                better("perturbation", f"{kind} {masking}", "logit", other, BOTH, larger=kind == "negative")
                for kind in ("positive", "negative")
                for masking in MASKINGS
                for other in PERTURBED
                if other != "logit"
            ),
        ),
    ]


def elsewhere() -> list[Claim]:
    """Return that maps are those of their image: they do better on it than the maps of another image."""
    masks = [("methods", metric, True) for metric in ("pixel_accuracy", "foreground_ap")]
    changes = [("perturbation", "positive black", False), ("perturbation", "negative black", True)]

    def gains(method: str) -> list[Comparison]:
        other, models = f"{method}, {ANOTHER}", VIM if method in OF_CODE else BOTH
        return [
            one
            for table, metric, larger in (*masks, *changes)
            for one in better(table, metric, method, other, models, larger=larger)
        ]

    def little(method: str) -> list[Comparison]:
        other = f"{method}, {ANOTHER}"
        return [
            one
            for table, metric, larger in (*masks, *changes)
            for one in within(table, metric, *((method, other) if larger else (other, method)), VIM, most=ON_PAR)
        ]

    others = [method for method in METHODS if method not in PERTURBED]
    return [
        *(
            Claim.of(
                f"`{method}` does better with its map of an image than with that of another one", HERE, gains(method)
            )
            for method in (*PERTURBED, *OF_CODE)
        ),
        Claim.of(
            "The other methods find more in their map of an image than in that of another one",
            HERE,
            *(better("methods", "foreground_ap", method, f"{method}, {ANOTHER}", BOTH) for method in others),
        ),
        *(
            Claim.of(f"On ViM `{method}` loses at most {ON_PAR} with the map of another image", HERE, little(method))
            for method in ("raw", "rollout", coded("raw"), coded("rollout"))
        ),
    ]


def controlled() -> list[Claim]:
    """Return that methods find more in trained models than in controls."""

    def gains(ending: str) -> list[Comparison]:
        pairs = [*((method, model) for method in CONTROLLED for model in BOTH), *((code, "vim") for code in OF_CODE)]
        return [
            Comparison(
                f"foreground_ap, `{method}` on {model} less that on {model} with {ending}",
                (
                    (1.0, Term("methods", model, method, "foreground_ap")),
                    (-1.0, Term("controls", f"{model}, {ending}", method, "foreground_ap")),
                ),
                ">",
            )
            for method, model in pairs
        ]

    return [
        Claim.of(f"Methods find more in a trained model than in one with {ending}", HERE, gains(ending))
        for ending in CONTROLS
    ]

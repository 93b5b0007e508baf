"""The claims of this library on problems whose answer no single token determines."""

from collections.abc import Mapping
from typing import Any

from evidence.claims import HERE, Claim
from evidence.comparisons import Comparison, better, bounded
from evidence.convergence import CONVERGED
from unilinattn.methods.default import CAUSAL, OTHER

DEFAULTS = {"mamba2": OTHER.name, "transformer": CAUSAL.label}
"""The row of the default of `explain` on each architecture; `lrp` is here for a logit."""

OF_DEFAULT = f"`{CAUSAL.label}` on the Transformer and `{OTHER.name}` on Mamba-2"

MODELS = tuple(DEFAULTS)

METHODS: Mapping[str, Any] = {
    "raw": "raw",
    "latim l2": "latim",
    "alti": "alti",
    "rollout": "rollout",
    "attribution": "attribution",
    "contribution": "contribution",
    "alti rollout": ("alti", {"compose": "rollout"}),
    "logit": "logit",
    "lrp": "lrp",
    "attn_lrp": "attn_lrp",
    CAUSAL.label: CAUSAL,
    "gradient": "gradient",
    "input x gradient": "input_x_gradient",
    "integrated gradients": CONVERGED,
}
"""The methods; the first three keep a layer axis, of which the scored layer is chosen on other problems."""

CLAIMED = ("raw", "latim l2", "attribution", "logit", "gradient", "input x gradient", "integrated gradients")
"""Methods that have a claim on each task, besides the default."""

TASKS = ("shared values", "two hops", "complements", "sums")
WITH_COPIES = TASKS[:2]
"""Tasks in which the answer stands at several positions of the context, one of which was asked for."""

EXPLAINED = {task: MODELS[:1] if task == "two hops" else MODELS for task in TASKS}
"""The models of each task whose answers are explained: those that learned it from every seed."""

BASELINES = ("random", "recency", "same token", "asked token")
"""Rows that do not read the model, but for its answer."""

AGREEMENT = 0.9
"""AP of the measured effects for the decisive tokens above which both truths agree."""


def of_methods() -> list[Claim]:
    """Return the claims."""

    def default(task: str, metric: str, than: str) -> list[Comparison]:
        return [one for model in EXPLAINED[task] for one in better(task, metric, DEFAULTS[model], than, [model])]

    claims = [
        Claim.of(
            f"The measured effects agree with the construction: their AP for the decisive tokens is above {AGREEMENT}",
            HERE,
            *(bounded(task, "ap", "effect", EXPLAINED[task], ">", AGREEMENT) for task in TASKS),
        ),
        Claim.of(
            "`attn_lrp`, which counts what tokens decide, finds more than `logit`, which counts what they send",
            HERE,
            *(better(task, "ap", "attn_lrp", "logit", EXPLAINED[task]) for task in TASKS),
        ),
        Claim.of(
            f"Of equal tokens that hold the answer, {OF_DEFAULT} find the one that was asked for more often than "
            "chance",
            HERE,
            *(
                bounded(task, "right_copy", DEFAULTS[model], [model], ">", 0.5)
                for task in WITH_COPIES
                for model in EXPLAINED[task]
            ),
        ),
    ]
    for task in TASKS:
        claims += [
            Claim.of(
                f"{task.capitalize()}: {OF_DEFAULT} rank the decisive tokens better than every baseline",
                HERE,
                *(default(task, "ap", baseline) for baseline in BASELINES),
            ),
            Claim.of(
                f"{task.capitalize()}: {OF_DEFAULT} rank tokens by their effects better than every baseline",
                HERE,
                *(default(task, "spearman", baseline) for baseline in BASELINES),
            ),
        ]
        claims += [
            Claim.of(
                f"{task.capitalize()}: `{method}` ranks the decisive tokens better than every baseline",
                HERE,
                *(better(task, "ap", method, baseline, EXPLAINED[task]) for baseline in BASELINES),
            )
            for method in CLAIMED
        ]
    return claims

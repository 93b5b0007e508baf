"""The claims on passkeys and frequent words, those of LaTIM and those of this library."""

from collections.abc import Mapping, Sequence
from typing import Any

from evidence.answers import SCORED_LENGTHS
from evidence.baselines import NEW_MIXER, RANDOM, of_default, of_training
from evidence.claims import HERE, Claim, Results
from evidence.comparisons import Comparison, better, bounded
from evidence.operators import by_operators
from evidence.questions import PAIRS
from unilinattn.methods.default import CAUSAL

MODELS = ("mamba", "mamba2", "transformer")
"""The architectures of the study."""

RANKS = ("first word", "second word", "third word")
BASELINES = ("random", "recency", "primacy")

METHODS: Mapping[str, Any] = {
    "raw": "raw",
    "latim l2": "latim",
    "alti": "alti",
    "rollout": "rollout",
    "attribution": "attribution",
    "alti rollout": ("alti", {"compose": "rollout"}),
    "alti_logit": "alti_logit",
    "logit": "logit",
    "lrp": "lrp",
    "attn_lrp": "attn_lrp",
    CAUSAL.label: CAUSAL,
    **by_operators({"input_x_gradient": "input_x_gradient"}),
}
"""Methods of passkeys: the first three of one layer, chosen on other contexts."""

OF_WORDS: Mapping[str, Any] = {
    "raw": "raw",
    "raw, mean": ("raw", {"layers": "mean"}),
    "latim l2": "latim",
    "latim l2, mean": ("latim", {"layers": "mean"}),
    "alti": "alti",
    "logit": "logit",
    "lrp": "lrp",
    "attn_lrp": "attn_lrp",
    CAUSAL.label: CAUSAL,
}
"""Methods of frequent words; LaTIM averages its scores over the layers (Fig. 3 and 9)."""

LAYERED = 3
"""Number of methods of passkeys that keep a layer axis."""

CONTROLLED = {RANDOM: [*METHODS], NEW_MIXER: [*METHODS][LAYERED:]}
"""Methods that explain the controls; the map of one layer does not depend on later mixers."""


def _erring(results: Results, table: str) -> list[str]:
    """Return the models with wrong answers of every seed."""
    tables = results.tables.get(table, {}).values()
    return [model for model in MODELS if tables and all(any(row["model"] == model for row in one) for one in tables)]


def of_answers() -> list[Claim]:
    """Return LaTIM's claims on the answers of Mamba-2."""

    def more(row: str, than: str) -> list[Comparison]:
        return better("accuracy", "accuracy", row, than, ["mamba2"])

    few, many = "1 pair", f"{max(PAIRS)} pairs"
    short, long = (f"{many}, {length} tokens" for length in (SCORED_LENGTHS[0], SCORED_LENGTHS[-1]))
    return [
        Claim.of("More pairs lower the recall of Mamba-2", "LaTIM 4.3, Table 5", more(few, many)),
        Claim.of("Longer contexts lower the recall of Mamba-2", "LaTIM 4.3, Table 5", more(short, long)),
        Claim("Larger models recall less", "LaTIM 4.3, Table 5", untested="models of one size are trained here"),
        Claim.of(
            "Recall is better if the asked pair is the first",
            "LaTIM D.3, Table 6",
            *(more(f"{pairs} pairs, first", f"{pairs} pairs, later") for pairs in (2, 4)),
        ),
        Claim.of(
            "Recall is worse if the asked pair is the first (the text contradicts its Table 6)",
            "LaTIM 4.3",
            *(more(f"{pairs} pairs, later", f"{pairs} pairs, first") for pairs in (2, 4)),
        ),
        Claim.of(
            "The third most frequent word is named right less often than the first",
            "LaTIM 4.3",
            more(RANKS[0], RANKS[2]),
        ),
        Claim(
            "Mamba models of up to 1.4B parameters struggle with frequent words",
            "LaTIM 4.3",
            untested="the pretrained checkpoints are not part of this repository",
        ),
    ]


def of_scores(results: Results) -> list[Claim]:
    """Return LaTIM's claims on the scores of Mamba-2."""
    models = ["mamba2"]

    def positive(table: str, method: str) -> list[Comparison]:
        return bounded(table, "lead", method, models, ">", 0)

    def on_errors(text: str, source: str, table: str, *comparisons: list[Comparison]) -> Claim:
        if "mamba2" not in _erring(results, table):
            return Claim(text, source, untested="Mamba-2 gave no wrong answer")
        return Claim.of(text, source, *comparisons)

    return [
        on_errors(
            "In a wrong answer, LaTIM (l2) looks at the predicted or the right value, and Mamba-Attention elsewhere",
            "LaTIM 4.3 and D.3, Fig. 8",
            "wrong passkeys",
            better("wrong passkeys", "either_hit", "latim l2", "raw", models),
        ),
        on_errors(
            "In a wrong answer, LaTIM (l2) shows that the model looks at another pair than the asked one",
            "LaTIM 4.3, Fig. 3",
            "wrong passkeys",
            positive("wrong passkeys", "latim l2"),
        ),
        Claim.of(
            "The scores of LaTIM (l2), averaged over layers, stand on the occurrences of the frequent word",
            "LaTIM 4.3, Fig. 3",
            better("words", "ap", "latim l2, mean", "random", models),
        ),
        on_errors(
            "If a wrong word is named, LaTIM (l2) does not stand on the right word",
            "LaTIM 4.3, Fig. 3",
            "wrong words",
            positive("wrong words", "latim l2, mean"),
        ),
        Claim.of(
            "The attention on a repeated word falls from its first occurrences to its last",
            "LaTIM 4.3 and D.3, Fig. 9",
            _falls(models),
        ),
        Claim(
            "Models rely on the form of words rather than on their frequency",
            "LaTIM 4.3",
            untested="a word is one token here",
        ),
    ]


def _falls(models: Sequence[str]) -> list[Comparison]:
    return bounded("words", "first_half", "latim l2, mean", models, ">", 0.5)


def of_methods(results: Results) -> list[Claim]:
    """Return the claims of this library."""

    def precise(method: str, than: str) -> list[Comparison]:
        return better("passkeys", "ap", method, than, MODELS)

    claims = [
        Claim.of("`alti` finds more than `raw` on every architecture", HERE, precise("alti", "raw")),
        Claim.of("`latim` finds more than `raw` on every architecture", HERE, precise("latim l2", "raw")),
        Claim.of(
            "`logit` is the best method of all layers",
            HERE,
            *(precise("logit", other) for other in list(METHODS)[LAYERED:] if other != "logit"),
        ),
        Claim.of(
            "The attention on a repeated word falls from its first occurrences to its last on every architecture",
            HERE,
            _falls(MODELS),
        ),
    ]
    if erring := _erring(results, "wrong passkeys"):
        claims += [
            Claim.of(
                f"The best key of `{method}` holds the predicted value in most wrong answers",
                HERE,
                bounded("wrong passkeys", "hit_at_1", method, erring, ">", 0.5),
            )
            for method in ("raw", "latim l2", "alti", "logit")
        ]
    claims += [
        Claim.of(
            f"`{method}` finds passkeys better than every baseline",
            HERE,
            *(precise(method, baseline) for baseline in BASELINES),
        )
        for method in METHODS
    ]
    return [
        *claims,
        *of_default("passkeys", [*METHODS][LAYERED:], MODELS),
        *of_training("passkeys", "ap", CONTROLLED, MODELS),
    ]

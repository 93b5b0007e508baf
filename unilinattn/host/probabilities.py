"""The probabilities that logits stand for: a softmax over tokens or classes, a sigmoid for each label, or none."""

from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn

LogitKind = Literal["class", "label", "output"]
"""Exclusive tokens or classes with a softmax, labels with a sigmoid each, or the numbers of a regression."""

LABELS = "multi_label_classification"
"""Value of `config.problem_type` of models in which each label has a probability, independent of the others."""

NO_SOFTMAX = {
    "label": "a sigmoid of each label's logit is its probability, so the logit is the log-odds",
    "output": "the outputs of a regression have no probabilities",
}
"""Why a measure by a softmax does not apply to a kind of logits."""


def logit_kind(host: nn.Module, logits: Float[Tensor, "batch *position logit"]) -> LogitKind:
    """Return the kind of a model's logits, by the `config` of transformers and by their number.

    Logits of positions are those of tokens or classes: the heads of transformers for these ignore `problem_type`. A
    classifier with one logit for each sequence is a regression, unless it is the only label.
    """
    if logits.ndim != 2:
        return "class"
    config = getattr(host, "config", None)
    problem = getattr(config, "problem_type", None)
    if getattr(config, "num_labels", None) != logits.shape[-1]:
        problem = None
    if problem == LABELS:
        return "label"
    return "output" if problem == "regression" or logits.shape[-1] == 1 else "class"


def log_probabilities(logits: Float[Tensor, "*batch logit"], kind: LogitKind) -> Float[Tensor, "*batch logit"] | None:
    """Return the logarithm of each logit's probability, None for the outputs of a regression."""
    if kind == "output":
        return None
    return nn.functional.logsigmoid(logits) if kind == "label" else logits.log_softmax(-1)

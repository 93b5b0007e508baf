"""Sentences about outputs that no token has a share of."""

from collections.abc import Sequence

from torch import Tensor

OF_SUM = 1e-2
"""Largest distance from 1 of the sum of probabilities in half precision."""


def without_shares(read: Sequence[tuple[Tensor, str | None]]) -> str:
    """Return why a scalar has no shares, by the outputs that it reads and the functions that made those frozen."""
    clause = next(filter(None, (_of_softmax(value) for value, _ in read)), "")
    name = next(filter(None, (name for _, name in read)), None)
    if name is not None and not clause:
        return (
            f"the scalar depends on a result of {name!r}, which is a constant of the frozen run, like the weights of "
            f"attention, so no token has a share of it. Let the model return the values before {name!r}, or explain it "
            "by method='input_x_gradient' or method='knockout', which differentiate or rerun the model."
        )
    return f"the scalar does not depend on an output of the model that depends on its tokens{clause or '.'}"


def _of_softmax(value: Tensor) -> str:
    """Return the clause of a refusal on an output of probabilities or their logarithms, empty for other outputs."""
    if value.ndim < 2 or value.shape[-1] < 2:
        return ""
    total, log_total = (each.double().sum(-1) for each in (value, value.exp()))
    is_p = bool((value >= 0).all() and ((total - 1).abs() < OF_SUM).all())
    if not is_p and not bool(((log_total - 1).abs() < OF_SUM).all()):
        return ""
    name, function = ("probabilities", "softmax") if is_p else ("log probabilities", "log_softmax")
    return (
        f": it returns {name}, and the result of a {function} is a constant of the frozen run, like the weights of "
        "attention, so no token has a share of it. Let the model return its logits, the values before the "
        f"{function}."
    )

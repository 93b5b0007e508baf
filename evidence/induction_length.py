"""Induction at the length of the paper: models that were trained on shorter sequences (Induction Table 2)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from evidence.claims import HERE, Claim
from evidence.comparisons import Comparison, Relation, bounded
from evidence.mechanism import last_answers
from evidence.rows import proportion
from evidence.study import View
from evidence.training import scored_seed
from unilinattn.evaluation import Table
from unilinattn.examples.tasks import Induction

TABLE = "long sequences"
LENGTH = 255
SEQUENCES = 8
"""Sequences for each one that is explained."""

WITHOUT, WITH = "without", "with"

TRAINED = f"conv_ssm_{LENGTH}_key"
"""The model that is trained at this length: without it, a convolution and an SSM forget the special token."""
TRAINED_ROW = f"conv_ssm, trained on {LENGTH}"

MARGIN = 0.05
"""How much less than the paper's an accuracy may be."""


def view(paper: Mapping[str, Sequence[str]], trained_length: int) -> View:
    """Return the table; `paper`: accuracies of each model without and with the special token."""
    return View(
        TABLE,
        f"Accuracy at the last position of {LENGTH} tokens",
        [("", WITHOUT, "without special token"), ("", WITH, "with special token")],
        {
            "paper, without": {name: pair[0] for name, pair in paper.items()},
            "paper, with": {**{name: pair[1] for name, pair in paper.items()}, TRAINED_ROW: paper["conv_ssm"][1]},
        },
        f"The models of the table above, trained on {trained_length} tokens, and one that is trained on {LENGTH}, as "
        "those of the paper are.",
    )


def measure(
    hosts: Mapping[str, Callable[[], nn.Module]], tasks: Mapping[str, Induction], seed: int, scored: int
) -> Table:
    """Return a row for each model and sequence.

    `hosts`: functions that load the models of a seed. `tasks`: the task by the end of a model's name. `scored`: number
    of sequences that the study explains.
    """
    rows = []
    for model, load in hosts.items():
        name = model.removesuffix("_key")
        ending = model.removeprefix(name)
        name = TRAINED_ROW if model == TRAINED else name
        batch = replace(tasks[ending], length=LENGTH).sample(SEQUENCES * scored, scored_seed(seed))
        rows += proportion(name, WITH if ending else WITHOUT, last_answers(load(), batch).tolist())
    return Table(rows)


def claims() -> list[Claim]:
    """Return the claims of the paper's Table 2, at its length."""
    source, suffix = "Induction Table 2", f"on sequences of {LENGTH} tokens"

    def every(metric: str, models: Iterable[str], relation: Relation, bound: float) -> list[Comparison]:
        return [one for model in models for one in bounded(TABLE, metric, model, [""], relation, bound)]

    return [
        Claim.of(
            f"Two blocks reach 94.8 % and one 92.9 % {suffix} (here: at most {100 * MARGIN:g} points less)",
            source,
            every(WITHOUT, ["mamba_x2"], ">", 0.948 - MARGIN),
            every(WITHOUT, ["mamba_x1"], ">", 0.929 - MARGIN),
        ),
        Claim.of(
            f"A convolution and a selective SSM reach 90.3 % {suffix} (here: at most {100 * MARGIN:g} points less)",
            source,
            every(WITHOUT, ["conv_ssm"], ">", 0.903 - MARGIN),
        ),
        Claim.of(
            f"Neither the convolution nor the SSM solves the task without the other {suffix}",
            source,
            every(WITHOUT, ["conv", "ssm"], "<", 0.3),
            every(WITH, ["conv", "ssm"], "<", 0.3),
        ),
        Claim.of(
            f"With a special token every model with a convolution and an SSM is always right {suffix}",
            source,
            every(WITH, [TRAINED_ROW, "mamba_x1", "mamba_x2"], ">", 0.99),
        ),
        Claim.of(
            f"Models that were trained on shorter sequences with a special token are always right {suffix}",
            HERE,
            every(WITH, ["conv_ssm", "mamba_x1", "mamba_x2"], ">", 0.99),
        ),
    ]

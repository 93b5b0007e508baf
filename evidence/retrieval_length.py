"""Passkeys in contexts of up to 1,024 tokens, by models that were trained on short ones (LaTIM 4.3, Table 5)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from evidence.answers import answers
from evidence.claims import HERE, Claim
from evidence.comparisons import Comparison, Term, better, bounded
from evidence.questions import passkeys
from evidence.rows import proportion
from evidence.study import View
from evidence.training import scored_seed
from unilinattn.evaluation import Table

TABLE = "long contexts"
LENGTHS = (64, 128, 256, 512, 1024)
PAIRS = {"1 pair": 1, "2 pairs": 2, "4 pairs": 4}

RIGHT = 0.9
"""Share of right answers from which a model finds passkeys."""

PAPER: Mapping[str, Mapping[int, tuple[float, ...]]] = {
    "LaTIM Mamba-2 130M": {1024: (0.998, 0.582, 0.281), 2048: (0.997, 0.573, 0.308)},
    "LaTIM Mamba-2 370M": {1024: (1.0, 0.576, 0.331), 2048: (0.98, 0.551, 0.341)},
}
"""LaTIM Table 5: 1, 2 and 4 pairs by the number of tokens."""


def _row(length: int) -> str:
    return f"{length} tokens"


def view(headings: Mapping[str, str], trained_length: int) -> View:
    """Return the table; `headings`: those of the models by name."""
    return View(
        TABLE,
        "Share of right answers by the length of the context",
        [(model, pairs, f"{heading}, {pairs}") for model, heading in headings.items() for pairs in PAIRS],
        {
            f"{size}, {' / '.join(map(str, PAIRS.values()))}": {
                _row(length): " / ".join(map("{:.3f}".format, shares)) for length, shares in by_length.items()
            }
            for size, by_length in PAPER.items()
        },
        f"The models were trained on at most {trained_length} tokens, with none at longer ones; LaTIM's are pretrained "
        "language models.",
    )


def measure(hosts: Mapping[str, Callable[[], nn.Module]], seed: int, scored: int, step: int) -> Table:
    """Return a row for each model, length, number of pairs and answer.

    `hosts`: functions that load the models of passkeys of a seed. `scored`: number of contexts. `step`: difference of
    the seeds of two lengths.
    """
    rows: list[dict[str, Any]] = []
    for model, load in hosts.items():
        host = load()
        for at, length in enumerate(LENGTHS):
            for metric, pairs in PAIRS.items():
                drawn = passkeys(scored, scored_seed(seed) + step * at, length=length, pairs=pairs)
                right = [answer.right for answer in answers(host, drawn)]
                rows += proportion(_row(length), metric, right, model=model)
    return Table(rows)


def claims(models: Sequence[str]) -> list[Claim]:
    """Return LaTIM's claims on Mamba-2, and one of this library on all `models`."""
    few, *_, many = PAIRS
    short, long = _row(LENGTHS[0]), _row(LENGTHS[-1])
    more_pairs = Comparison(
        f"accuracy at {long}, {few} less {many} on mamba2",
        ((1.0, Term(TABLE, "mamba2", long, few)), (-1.0, Term(TABLE, "mamba2", long, many))),
        ">",
    )
    return [
        Claim.of(
            f"Mamba-2 finds a single passkey in {long}",
            "LaTIM 4.3, Table 5",
            bounded(TABLE, few, long, ["mamba2"], ">", RIGHT),
        ),
        Claim.of(f"More pairs lower the recall of Mamba-2 at {long}", "LaTIM 4.3, Table 5", more_pairs),
        Claim.of(
            f"Contexts of {long} lower the recall of Mamba-2, compared with {short}",
            "LaTIM 4.3, Table 5",
            *(better(TABLE, pairs, short, long, ["mamba2"]) for pairs in PAIRS),
        ),
        Claim.of(
            f"A model of every architecture finds a single passkey in {long}, without training at this length",
            HERE,
            bounded(TABLE, few, long, models, ">", RIGHT),
        ),
    ]

"""`Effects`: the effect of other tokens on a logit, split into content, control and interaction."""

from dataclasses import dataclass
from math import floor, log10
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from unilinattn.aligned import aligned
from unilinattn.results.explained import quoted

SHOWN = 24
"""Most rows of the table that `Effects` prints."""


class Replaced(NamedTuple):
    """Tokens that were replaced at once.

    Attributes:
        sequence: the index of the sequence.
        first, last: the first token, and the one after the last, counted over real tokens.
        text: the texts of the tokens, or their ids without a tokenizer.
        draws: number of replacements.
    """

    sequence: int
    first: int
    last: int
    text: str
    draws: int


@dataclass(frozen=True, eq=False, repr=False)
class Effects:
    """Means over replacements of effect = content + control + interaction, in units of the logit; prints as a table.

    Attributes:
        model: the model's class name.
        by: "tokens", "layer" or "head".
        logits: the explained logit of each sequence: its token or class, or its number.
        value: the logit of each sequence on the inputs.
        rows: the replaced tokens.
        parts: the layers or heads of the second axis, empty by tokens.
        effect: the fall of the logit.
        content: the part that the values send along factors of the inputs.
        control: the part that the factors of the inputs decide about their values.
        interaction: the part that needs both.
        content_by_token: the content of every token of the sequence, padding included; its sum over the tokens, and by
            layer or head over the parts, is `content` (see `effects`).
        gap: the largest absolute difference between an effect and the sum of its three parts, over all replacements.
        warnings: a sentence for each doubt that `trust="warn"` lets pass.
    """

    model: str
    by: str
    logits: tuple[str, ...]
    value: Float[Tensor, " batch"]
    rows: tuple[Replaced, ...]
    parts: tuple[str, ...]
    effect: Float[Tensor, "row *part"]
    content: Float[Tensor, "row *part"]
    control: Float[Tensor, "row *part"]
    interaction: Float[Tensor, "row *part"]
    content_by_token: Float[Tensor, "row *part token"]
    gap: float
    warnings: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Show the logit, and a line for each row, of many those with the largest effects."""
        values = ", ".join(
            f"{name} = {value:.4g}" for name, value in zip(self.logits, self.value.tolist(), strict=True)
        )
        draws = sorted({row.draws for row in self.rows})
        count = f"{draws[0]}" if len(draws) == 1 else f"{draws[0]} to {draws[-1]}"
        head = (
            f"Effects by {self.by} on a logit of {self.model}: {values}\n"
            f"  replacements: {count} for each row; gap: {self.gap:.1e}"
        )
        width = max(1, len(self.parts))
        largest = max((float(x.abs().max()) for x in (self.effect, self.content, self.control)), default=0.0)
        decimals = 3 if not 0 < largest < 1 else 2 - floor(log10(largest))
        numbers = [x.reshape(-1).tolist() for x in (self.effect, self.content, self.control, self.interaction)]
        indices = list(range(len(numbers[0])))
        note = ""
        if len(indices) > SHOWN:
            indices = sorted(sorted(indices, key=lambda index: -abs(numbers[0][index]))[:SHOWN])
            note = f"\n  the {SHOWN} largest effects of {len(numbers[0])}"
        lines = [["token", "text", *(["part"] if self.parts else []), "effect", "content", "control", "interaction"]]
        for index in indices:
            row = self.rows[index // width]
            where = f"{row.first}" if row.last == row.first + 1 else f"{row.first}-{row.last - 1}"
            where = where if len(self.value) == 1 else f"{row.sequence}: {where}"
            part = [self.parts[index % width]] if self.parts else []
            lines.append([where, quoted(row.text), *part, *(f"{column[index]:z.{decimals}f}" for column in numbers)])
        first = 3 if self.parts else 2
        return f"{head}\n{aligned(lines, right=[0, *range(first, first + 4)], indent=2)}{note}"

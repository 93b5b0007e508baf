"""Scalars of outputs in which a target names no logits: lengths, similarities, and rows of logits of other things."""

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unilinattn.host.logits import Logit, chosen_ids, logits_in, one_each, picked, relative
from unilinattn.host.vectors import Path, at_path, expression
from unilinattn.options.bases import VECTOR_OF_TOKEN


class OutputScalar(ABC):
    """A function of a model's output, with a number for each sequence, that knows those of the traced output.

    Its `repr` says what it is, in results.
    """

    @abstractmethod
    def of(self, output: Any, sequences: Int[Tensor, " run"]) -> Float[Tensor, " run"]:
        """Return the number of each row of an output, of which `sequences` are the traced sequences."""

    def __call__(self, output: Any) -> Float[Tensor, " batch"]:
        """Return the number of each traced sequence in an output of all of them, in order."""
        return self.of(output, torch.arange(self.count, device="cpu"))

    @property
    @abstractmethod
    def count(self) -> int:
        """The number of traced sequences."""


@dataclass(frozen=True, eq=False, repr=False)
class VectorLength(OutputScalar):
    """The length of a sequence's vectors in the output: its inner product with its direction in the traced output.

    It is linear in the output, so that shares of it add up without a remainder, and its gradient is that of the length.
    After a final norm vectors of all inputs have about one length; along a constant direction they do not.

    Attributes:
        path: where the tensor is in the output.
        direction: the vectors of the traced output divided by their length, zero where they do not count.
        rows: the position of the only vector of each sequence that counts, None for all.
        of_tokens: whether these are positions of the layers' tokens, which a target counts.
    """

    path: Path
    direction: Float[Tensor, "batch ..."]
    rows: tuple[int, ...] | None
    of_tokens: bool

    @property
    def count(self) -> int:
        """The number of traced sequences."""
        return len(self.direction)

    def of(self, output: Any, sequences: Int[Tensor, " run"]) -> Float[Tensor, " run"]:
        """Return the inner product of each row with the direction of its sequence."""
        vectors = at_path(output, self.path)
        direction = self.direction[sequences.to(self.direction.device)].to(vectors)
        return (vectors * direction).flatten(1).sum(1)

    def __repr__(self) -> str:
        if self.of_tokens:
            return f"{VECTOR_OF_TOKEN} in {expression(self.path)}"
        rows = "" if self.rows is None else f"row {', '.join(map(str, dict.fromkeys(self.rows)))} of "
        return f"the length of {rows}{expression(self.path)}"


@dataclass(frozen=True, repr=False)
class PairSimilarity(OutputScalar):
    """The similarity of the two inputs of each sequence, such as an image and a text: the diagonal of a table.

    Attributes:
        path: where the table is in the output.
        pairs: the number of traced sequences.
    """

    path: Path
    pairs: int

    @property
    def count(self) -> int:
        """The number of traced sequences."""
        return self.pairs

    def of(self, output: Any, sequences: Int[Tensor, " run"]) -> Float[Tensor, " run"]:
        """Return the diagonal of the table."""
        return at_path(output, self.path).diagonal()

    def __repr__(self) -> str:
        return f"the diagonal of {expression(self.path)}"


@dataclass(frozen=True, eq=False, repr=False)
class RowLogit(OutputScalar):
    """A logit of a row of logits that are not those of tokens, such as an object query or a frame of speech.

    Attributes:
        rows: the row of each sequence.
        ids: the id of the logit, or of a pair of them, of each sequence.
        measure: "logit", or that of `Relative`.
        sizes: those of `plain_sizes`.
    """

    rows: Int[Tensor, " batch"]
    ids: Int[Tensor, "batch id"]
    measure: str
    sizes: Collection[int]

    @classmethod
    def in_output(
        cls, output: Any, rows: Int[Tensor, " batch"], logit: Logit, measure: str, sizes: Collection[int]
    ) -> "RowLogit":
        """Return the scalar of the prediction, or of other logits, in the rows of the traced output.

        Raises `InputError` for an id that is out of range.
        """
        logits = logits_in(output, sizes)
        assert logits is not None
        ids = chosen_ids(_at_rows(logits.detach(), rows), logit)
        return cls(rows, ids.cpu(), measure if ids.shape[-1] == 1 else "logit", sizes)

    @property
    def count(self) -> int:
        """The number of traced sequences."""
        return len(self.rows)

    def of(self, output: Any, sequences: Int[Tensor, " run"]) -> Float[Tensor, " run"]:
        """Return the logit of each row of the output."""
        sequences, logits = sequences.cpu(), logits_in(output, self.sizes)
        assert logits is not None
        at_rows = _at_rows(logits, self.rows[sequences])
        ids = self.ids[sequences].to(logits.device)
        if self.measure != "logit":
            return relative(at_rows, ids, self.measure)
        return one_each(picked(at_rows, ids), len(sequences))

    def __repr__(self) -> str:
        number = {"log-odds": "log-odds of logit", "centered": "centred logit"}.get(self.measure, self.measure)
        ids = [" less ".join(map(str, row)) for row in self.ids.tolist()]
        pairs = dict.fromkeys(zip(ids, self.rows.tolist(), strict=True))
        return f"the {number} " + ", ".join(f"{name} in row {row}" for name, row in pairs)


def _at_rows(logits: Float[Tensor, "run row logit"], rows: Int[Tensor, " run"]) -> Float[Tensor, "run logit"]:
    return logits[torch.arange(len(rows), device=logits.device), rows.to(logits.device)]


def values_of(function: Any, output: Any, sequences: Int[Tensor, " run"]) -> Float[Tensor, " run"]:
    """Return the number of a function of the output for each row, of which `sequences` are the traced sequences."""
    value = function.of(output, sequences) if isinstance(function, OutputScalar) else function(output)
    return one_each(value, len(sequences))

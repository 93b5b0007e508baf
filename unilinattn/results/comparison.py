"""`Comparison`: results of several models and methods on one input, with their pictures and their page."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxtyping import Bool
from torch import Tensor

from unilinattn.results import pages, plots
from unilinattn.results.attribution import Attribution
from unilinattn.results.file import write_text
from unilinattn.results.table import ScoreTable
from unilinattn.viz import blocks

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Comparison(ScoreTable[Attribution]):
    """Results of several models and methods on one input; `comparison[model][method]` is an `Attribution`.

    Raises `InputError` if it is empty or holds an entry that is no `Attribution`.
    """

    _kind = Attribution

    def plot(self, *, batch: int = 0, expected: Bool[Tensor, "..."] | None = None) -> "Figure":
        """Draw one sequence as a grid: one column per model, one row per method and layer.

        `batch`: index of the sequence. `expected`: a boolean pattern to outline, (batch, query, key); it is omitted for
        results without a query axis.

        Raises `MissingExtraError` if matplotlib is missing, and `InputError` if `batch` or `expected` does not fit.
        """
        return plots.comparison(self, batch=batch, expected=expected)

    def to_html(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        batch: int | Sequence[int] = 0,
        expected: Bool[Tensor, "..."] | None = None,
    ) -> str:
        """Return the comparison as one self-contained HTML page, and write it to `path` if given.

        `batch`: index or indices of the sequences. `expected`: a boolean pattern to outline, as in `plot`.

        Raises `InputError` if `batch` or `expected` does not fit, and `ResultFileError` if `path` cannot be written.
        """
        return write_text(path, pages.comparison_page(self, batch=batch, expected=expected))

    def _repr_html_(self) -> str:
        return blocks.fragment(pages.comparison(self))

"""`Comparison`: results of several models and methods on one input, with their pictures and their page."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxtyping import Bool
from torch import Tensor

from unilinattn.results import pages, plots
from unilinattn.results.attribution import Attribution
from unilinattn.results.file import write_text
from unilinattn.results.table import ScoreTable
from unilinattn.viz import blocks

if TYPE_CHECKING:
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure


class Comparison(ScoreTable[Attribution]):
    """Results of several models and methods on one input; `comparison[model][method]` is an `Attribution`.

    Raises `InputError` if it is empty or holds an entry that is no `Attribution`.
    """

    _kind = Attribution

    def plot(
        self,
        *,
        batch: int = 0,
        expected: Bool[Tensor, "..."] | None = None,
        layer: int | None = None,
        cmap: "str | Colormap | None" = None,
        vmax: float | None = None,
        image: Any = None,
    ) -> "Figure":
        """Draw one sequence as a grid: one column per model, one row per method and layer.

        `batch`: index of the sequence. `expected`: a boolean pattern to outline, (batch, query, key), which is omitted
        for results without a query axis, or (batch, key) for results of a target. `layer`: position of the only layer
        to draw of results with a layer axis. `cmap`, `vmax` and `image` are those of `Attribution.plot`.

        Raises `MissingExtraError` if matplotlib is missing, `InputError` if `batch`, `expected`, `layer` or `image`
        does not fit, and `OptionError` for an unknown `cmap` or a `vmax` that is not positive.
        """
        return plots.comparison(self, batch=batch, expected=expected, layer=layer, cmap=cmap, vmax=vmax, image=image)

    def to_html(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        batch: int | Sequence[int] = 0,
        expected: Bool[Tensor, "..."] | None = None,
        image: Any = None,
    ) -> str:
        """Return the comparison as one self-contained HTML page, and write it to `path` if given.

        `batch`: index or indices of the sequences. `expected`: a boolean pattern to outline, as in `plot`. `image`: the
        picture that the model read, drawn beneath the scores of its patches, as in `plot`.

        Raises `InputError` if `batch`, `expected` or `image` does not fit, and `ResultFileError` if `path` cannot be
        written.
        """
        body = pages.comparison(self, batch=batch, expected=expected, image=image)
        return write_text(path, blocks.page(f"Comparison of {', '.join(self)}", [], first=body))

    def _repr_html_(self) -> str:
        return blocks.fragment(pages.comparison(self))

"""Methods of attention maps."""

from collections.abc import Sequence
from typing import Self

from pydantic import model_validator

from unilinattn.options.bases import Composable, Composed, MapOptions

QUESTION = "The same by attention maps"


class Raw(MapOptions, Composable):
    """The attention map of each layer, mean_h alpha_h (HMA ACL 4.2).

    Scores: (layer, batch, query, key), without `query` for a target, without `layer` for layers="mean", which HMA
    found best. With compose="rollout" it is A_n ... A_1 with A_l = I + mean_h alpha_l: the method `rollout`, for a
    choice of layers. With by_head=True the scores are (layer, batch, head, query, key), the map alpha_h of each head
    that `heads` selects; `sign`, `discard` and `normalize` apply to each of them.

    Raises `OptionError` for an unknown option or value, and `UncoveredError` if the maps of the layers cannot be
    stacked or composed, or have different numbers of heads with by_head=True.

    >>> import unilinattn as ula
    >>> model = ula.examples.load("induction", "mamba")
    >>> ids = ula.examples.TASKS["induction"].sample(1, seed=0).input_ids
    >>> result = ula.explain(model, ids, method=ula.methods.Raw(by_head=True), target=-1)
    >>> result.dims
    ('layer', 'batch', 'head', 'key')
    """

    question = QUESTION
    needs = ("layers", "maps")

    @model_validator(mode="after")
    def _each_head(self) -> Self:
        if self.by_head and isinstance(self.heads, str) and self.heads != "mean":
            raise ValueError(
                f"by_head=True keeps every head, so heads={self.heads!r} has nothing to reduce; leave heads out for "
                "all of them, or give an index or a list"
            )
        return self

    @property
    def selected_heads(self) -> int | Sequence[int] | None:
        """The heads of the head axis, None for all."""
        return None if isinstance(self.heads, str) else self.heads


class Rollout(MapOptions, Composed):
    """Attention rollout: rho = A_n ... A_1 with A_l = I + mean_h alpha_l (HMA ACL Eq. 21-22).

    A step of parallel layers sums their maps: I + sum_l mean_h alpha_l. Scores: (batch, query, key), without `query`
    for a target. For a target only its row is multiplied by the layers' maps: in linear time and without any map, if
    the options keep the plain mean over heads.

    Extras: "log2_scale" (batch, query), only if a row is beyond the range of the scores' dtype. Row i of rho is then
    scores_i 2**log2_scale_i.

    Raises `OptionError` for an unknown option or value, and `UncoveredError` if layers are on different streams.

    Also Abnar and Zuidema (2020), who average with the identity and renormalise rows: see `normalize`.

    >>> import unilinattn as ula
    >>> model = ula.examples.load("induction", "mamba")
    >>> ids = ula.examples.TASKS["induction"].sample(1, seed=0).input_ids
    >>> result = ula.explain(model, ids, method=ula.methods.Rollout(normalize="rows"), target=-1)
    >>> result.dims
    ('batch', 'key')
    """

    question = QUESTION
    needs = ("composition", "maps")

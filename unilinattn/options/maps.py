"""Methods of attention maps."""

from collections.abc import Sequence
from typing import Self

from pydantic import model_validator

from unilinattn.options.bases import Composable, PublishedOptions

QUESTION = "The same by attention maps"


class Raw(PublishedOptions, Composable):
    """The attention map of each layer, mean_h alpha_h (HMA ACL 4.2).

    Scores: (layer, batch, query, key), without `query` for a target, without `layer` for layers="mean", which HMA
    found best. With compose="rollout" it is A_n ... A_1 with A_l = I + mean_h alpha_l: the method `rollout`, for a
    choice of layers. With by_head=True the scores are (layer, batch, head, query, key), the map alpha_h of each head
    that `heads` selects; `sign`, `discard` and `normalize` apply to each of them.

    With variant="published-code" the scores are (batch, key), sum_l mean_h minmax(alpha_lh)_CLS / n over the n layers
    from `start_layer` on, as in `generate_raw_attn` of the released code (vim/xai_utils.py). It differs from HMA ACL
    4.2: the rows of CLS are rescaled to 0..1 over all channels and keys of a layer, layers before 15/24 of the depth
    are left out, and CLS itself counts as zero.

    Raises `OptionError` for an unknown option or value, and `UncoveredError` if the maps of the layers cannot be
    stacked or composed, or have different numbers of heads with by_head=True; with variant="published-code"
    `InputError` for a target that is not the only token which class logits read.

    >>> import unilinattn as ula
    >>> model = ula.examples.load("induction", "mamba")
    >>> ids = ula.examples.TASKS["induction"].sample(1, seed=0).input_ids
    >>> result = ula.explain(model, ids, method=ula.methods.Raw(by_head=True), target=-1)
    >>> result.dims
    ('layer', 'batch', 'head', 'key')
    """

    question = QUESTION
    needs = ("layers", "maps")

    @property
    def has_layer_axis(self) -> bool:
        """Whether the scores have a layer axis."""
        return super().has_layer_axis and not self.is_published

    @model_validator(mode="after")
    def _code_layers(self) -> Self:
        if self.start_layer and not self.is_published:
            raise ValueError("start_layer belongs to variant='published-code'; layers=[...] selects layers")
        return self

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


class Rollout(PublishedOptions):
    """Attention rollout: rho = A_n ... A_1 with A_l = I + mean_h alpha_l (HMA ACL Eq. 21-22).

    A step of parallel layers sums their maps: I + sum_l mean_h alpha_l. Scores: (batch, query, key), without `query`
    for a target. For a target only its row is multiplied by the layers' maps: in linear time and without any map, if
    the options keep the plain mean over heads.

    Extras: "log2_scale" (batch, query), only if a row is beyond the range of the scores' dtype. Row i of rho is then
    scores_i 2**log2_scale_i.

    With variant="published-code" the scores are (batch, key), the row of CLS of `generate_rollout` in the released code
    (vim/xai_utils.py). It differs from Eq. 21-22: every row of a layer's map is that of CLS, without CLS itself; rows
    of A_l are divided by their signed sum 1 + s_l; layers before 15/24 of the depth are left out; and negative scores
    are set to zero. The product is then a weighted sum of the rows, sum_l r_l / prod_{m >= l} (1 + s_m).

    Raises `OptionError` for an unknown option or value, and `UncoveredError` if layers are on different streams; with
    variant="published-code" `InputError` for a target that is not the only token which class logits read.

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

"""Methods that weight maps and contributions by the gradient of a logit."""

from typing import Literal, Self

from pydantic import Field, model_validator

from unilinattn.options.bases import Composed, GradientMapOptions, PublishedOptions, ScalarOptions, Sign

QUESTION = "Which of these flows did the logit use? Weighted by its gradient"


class Contribution(ScalarOptions, Composed):
    """Contribution x gradient: rho = B_n ... B_1 with B_ij = delta_ij + (dy_i . T_ij x_j)^+.

    T_ij x_j is the exact contribution of token j to output i of a layer (see `latim`), and dy_i the gradient of the
    logit with respect to that output: the model's own, not that of the frozen operators. `attribution` (HMA ACL Eq. 24)
    takes the product of a mean gradient and a mean attention weight instead. The logit is the model's prediction at the
    target, or that of the option `logit`. Without a target row i takes the gradient of the logit at position i: a
    forward and a backward pass of the model, and all pairs of each layer, for each token. A model with one vector of
    logits for each sequence, or a function as `logit`, has one gradient for all rows. Scores: (batch, query, key),
    without `query` for a target.

    Raises `OptionError` for an unknown option or value, `InputError` for a model without logits, and
    `UncoveredError` if layers are on different streams.

    >>> import unilinattn as ula
    >>> model = ula.examples.load("induction", "mamba")
    >>> ids = ula.examples.TASKS["induction"].sample(1, seed=0).input_ids
    >>> result = ula.explain(model, ids, method=ula.methods.Contribution(sign="abs"), target=-1)
    >>> result.dims
    ('batch', 'key')
    """

    question = QUESTION
    needs = ("logit", "composition", "contributions", "gradients")

    sign: Sign = Field(
        default="clamp",
        description="negative products of gradient and contribution kept, set to zero, or made positive",
    )


class Attribution(ScalarOptions, PublishedOptions):
    """Mamba-Attribution: rho = B_n ... B_1 with B_ij = delta_ij + (g_i abar_ij)^+ (HMA ACL Eq. 24).

    abar is the mean map, and g_i the mean over channels of d logit / d y'_i, where y' is the input of the output
    projection: the gradient of the model itself, not of the frozen operators. The logit is the model's prediction at
    the target, or that of the option `logit`. Without a target row i takes the gradient of the logit at position i:
    a forward and a backward pass of the model for each token. A model with one vector of logits for each sequence, or
    a function as `logit`, has one gradient for all rows. Scores: (batch, query, key), without `query` for a target.
    The options `gradient` and `gradient_axis` change g as their descriptions say; `contribution` replaces the product
    g_i abar_ij by exact vectors.

    With variant="published-code" the scores are (batch, key), the row of CLS of `generate_mamba_attr` in the released
    code (vim/xai_utils.py). It differs from Eq. 24: each channel of the rows of CLS is clamped before the mean, and
    rescaled to 0..1 over all channels and keys of a layer; g is the gradient of the residual stream after the layer,
    set to zero where negative, its maximum over channels, rescaled to 0..1 over the tokens, and multiplies the keys;
    the layers are composed as in the variant of `rollout`.

    Raises `OptionError` for an unknown option or value, `InputError` for a model without logits, and
    `UncoveredError` if layers are on different streams; with variant="published-code" `InputError` for a target that is
    not the only token which the logit reads.

    >>> import unilinattn as ula
    >>> model = ula.examples.load("induction", "mamba")
    >>> ids = ula.examples.TASKS["induction"].sample(1, seed=0).input_ids
    >>> result = ula.explain(model, ids, method=ula.methods.Attribution(gradient="per-head"), target=-1)
    >>> result.dims
    ('batch', 'key')
    """

    question = QUESTION
    needs = ("logit", "composition", "maps", "gradients", "inner gradients")

    sign: Sign = Field(
        default="clamp", description="negative products of gradient and map kept, set to zero, or made positive"
    )
    gradient: Literal["mean", "per-head"] = Field(
        default="mean",
        description="'mean' multiplies the mean of g over all channels by the mean map; 'per-head' multiplies the mean "
        "of g over a head's channels by the head's map, applies `sign`, and then takes the mean over heads, instead of "
        "`heads`",
    )
    gradient_axis: Literal["row", "key"] = Field(
        default="row", description="g of the query or of the key: g_i abar_ij (Eq. 24) or abar_ij g_j"
    )

    @model_validator(mode="after")
    def _compatible(self) -> Self:
        if self.gradient == "per-head" and self.heads != "mean":
            raise ValueError("gradient='per-head' takes the mean over heads after the product; leave heads out")
        return self

    @property
    def by_head(self) -> bool:
        """Whether each head has its gradient, so that the maps of all heads are needed."""
        return self.gradient == "per-head"


class AttentionGrad(GradientMapOptions):
    """Gradient-weighted attention: rho = B_n ... B_1 with B = I + mean_h (grad alpha_h o alpha_h)^+.

    Chefer et al. (2021), generic attention explainability. grad alpha_hij = sum_p (d logit / d o)_ihp v_jhp, where o is
    the output of the layer's core and v its input, so it is defined for every structure with heads; the gradient is
    that of the model itself. A head of several parallel cores, such as two directions, sums their products before the
    clamp. The logit, and the gradients without a target, are those of `attribution`.

    Scores: (batch, query, key), without `query` for a target.

    Raises the errors of `attribution`, and `UncoveredError` for layers with cores in series or complex cores.

    >>> import unilinattn as ula
    >>> model = ula.examples.load("induction", "mamba")
    >>> ids = ula.examples.TASKS["induction"].sample(1, seed=0).input_ids
    >>> result = ula.explain(model, ids, method=ula.methods.AttentionGrad(), target=-1)
    >>> result.dims
    ('batch', 'key')
    """

    question = QUESTION
    needs = ("logit", "composition", "matrices", "gradients")


class TransformerAttribution(GradientMapOptions):
    """Transformer attribution: rho = B_n ... B_1 with B = I + mean_h (grad alpha_h o R_h)^+ (HMA ACL Eq. 23).

    Chefer et al. (CVPR 2021). R is the relevance of alpha by the rules of `lrp`: R_hij = alpha_hij sum_p r_ihp v_jhp
    / 2, with the gradient r of `lrp`'s frozen model at the core's output o and the core's input v. The rule of matrix
    products gives half of the relevance of o = alpha v to alpha. The gradient is that of `attention_grad`.

    Scores: (batch, query, key), without `query` for a target. `completeness_gap` is that of `lrp`, of the worst target.

    Raises the errors of `attention_grad` and of `lrp`.

    >>> import unilinattn as ula
    >>> model = ula.examples.load("induction", "mamba")
    >>> ids = ula.examples.TASKS["induction"].sample(1, seed=0).input_ids
    >>> result = ula.explain(model, ids, method=ula.methods.TransformerAttribution(), target=-1)
    >>> result.completeness_gap < 1e-4
    True
    """

    question = QUESTION
    needs = ("logit", "composition", "matrices", "gradients", "half rule", "core relevances")

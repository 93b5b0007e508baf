"""Methods that share a logit among the tokens."""

from typing import Literal

from pydantic import Field

from unilinattn.options.bases import ScalarOptions, SharesOptions

QUESTION = "How much did each token add to this logit? The numbers add up to it"


class Logit(SharesOptions):
    """Exact shares of the tokens in a logit, which add up to it with the bias: gradient x embedding, model frozen.

    Every factor that the input decided is frozen: the layers are their operators, and in the code between them slopes
    of activations, scales of norms, gates and routers' weights are constants, as in MambaLRP (Jafari et al., 2024)
    without its half rule. The logit, that of the model's prediction at the target or of the option `logit`, is then an
    affine function of the tokens' embeddings. Without a target row i explains the logit at position i, a backward pass
    for each token. A model with one vector of logits for each sequence, or a function as `logit`, has no query axis.

    Scores: (batch, query, key), without `query` for a target, and with a `layer` axis in front by depth and by layer.
    Extras, with the same axes but `key`: `bias`, the share of biases and other constants; `remainder`, the part that is
    not linear in the output, zero for a logit; `logit`, the explained value; and `gap`, the absolute difference between
    it and the sum of the parts.

    - by="tokens": shares + bias + remainder = logit. The extra `embedding`, with the axes of the scores, is the part of
      each share from constants that are added to the token's embedding, such as its position. `cancellation` is the
      ratio (sum |shares| + |bias|) / |logit|: 1 if all have one sign, large if shares cancel.
    - by="depth": row l has the shares of the stream that enters the block of layer l, and `bias` those of the constants
      that are added later: shares + bias + remainder = logit in every row, and `cancellation` is the ratio of the row.
    - by="layer": row l has sum_i g_i . T_ij x_j, where g is the gradient at the output y of layer l and x its input,
      and `bias` is sum_i g_i . b_i: shares + bias = `part`, the part sum_i g_i . y_i of the logit that passes through
      the layer. Parts of several layers overlap, since what passes through one layer may pass through later ones.

    `completeness_gap` is the largest gap relative to the logit.

    Raises `OptionError` for an unknown option or value, `InputError` for a logit that is not there, `UncoveredError`
    for code without a frozen form, and `ExactnessError` if the shares miss their sum; with trust="warn" the result
    keeps a warning instead.

    >>> import unilinattn as ula
    >>> model = ula.examples.load("induction", "mamba")
    >>> ids = ula.examples.TASKS["induction"].sample(1, seed=0).input_ids
    >>> result = ula.explain(model, ids, method=ula.methods.Logit(by="tokens"), target=-1)
    >>> result.completeness_gap < 1e-4
    True
    """

    question = QUESTION
    needs = ("logit", "frozen run")

    by: Literal["tokens", "depth", "layer"] = Field(
        default="tokens",
        description="shares of the tokens' embeddings; by 'depth' of the stream that enters each layer's block; by "
        "'layer' the part of the logit that passes through each layer's output, sum_i g_i . T_ij x_j",
    )

    @property
    def has_layer_axis(self) -> bool:
        """Whether the scores have a layer axis: by depth and by layer."""
        return self.by != "tokens"


class Lrp(SharesOptions):
    """Layer-wise relevance propagation: gradient x embedding, where a value and its gate share relevance equally.

    The method is `logit` with one other rule. Where `logit` freezes the activated factor of a product, each factor gets
    half of the product's relevance, in the layers' output gates and in the code between the layers: the rules of
    MambaLRP (Jafari et al., 2024), for every architecture. A factor with an activation of f(0) != 0, such as a sigmoid
    gate, stays frozen, because half of its relevance would be that of the constant f(0). So does a gate inside of a
    core (H3 and Hyena with several channels per head), and one that an adapter reads from a capture of the host's run.

    With `gamma`, the linear layers and convolutions of the model's blocks follow the gamma rule, by which MambaLRP
    explains images: of the products x_j w_jk and the bias that sum to z_k, those with the sign of z_k count 1 + gamma
    times as much, and all are scaled so that their sum is z_k. Products that cancel then send less relevance back. The
    weights of cores and skips, convolutions recorded from images, layers that read several tensors, and the head
    follow the plain rule.

    Scores, extras and `completeness_gap` are those of `logit`; relevances, bias and remainder add up to the logit.

    Raises the errors of `logit`.

    >>> import unilinattn as ula
    >>> model = ula.examples.load("induction", "mamba")
    >>> ids = ula.examples.TASKS["induction"].sample(1, seed=0).input_ids
    >>> result = ula.explain(model, ids, method=ula.methods.Lrp(), target=-1)
    >>> result.completeness_gap < 1e-4
    True
    """

    question = QUESTION
    needs = ("logit", "half rule")

    gamma: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="by how much products that have the sign of their sum count more; MambaLRP takes 0.25 for images",
    )


class AttnLrp(SharesOptions):
    """AttnLRP for every architecture: the relevance of each token, by what it sent and by what it decided.

    The rules are those of Achtibat et al. (ICML 2024) for Transformers, and the same ones for every token mixer. Only
    the scales of norms and the slopes of activations are frozen. Of the product of a layer's matrix and its values, the
    values get half of the relevance, and the factors of the matrix half, by their derivative: attention weights through
    softmax to queries and keys, step sizes, decays, strengths, B and C. A matrix that is linear in queries and keys
    gives half of its part to each, and a key shares its half with the step size that scales it. A value and its gate
    share their product too.

    With split="thirds" the values get a third, and the factors of the matrix two thirds. Then values, queries and keys
    have equal parts, where halves, taken of one product after the other, leave a quarter to each of queries and keys.

    Scores: (batch, query, key), without `query` for a target. Extras with the same axes: `content`, what the token
    sent along frozen factors, and `control`, the part of the score on paths through at least one factor: what the token
    decided. Extra without `key`: `logit`, the explained value.

    Scores do not add up to the logit: relevance is lost where a derivative of a softmax or of a decay is not the share
    of its argument. The sum of `content` is not checked: `Logit(measure="centered")` returns these numbers with their
    bias and completeness gap. The effects of another input, which content and control approximate, are measured by
    `unilinattn.effects`.

    Raises `OptionError` for an unknown option or value, `InputError` for a logit that is not there, `UncoveredError`
    for code whose products are hidden, such as a recurrent kernel or an autograd function of another package.

    >>> import unilinattn as ula
    >>> model = ula.examples.load("induction", "mamba")
    >>> ids = ula.examples.TASKS["induction"].sample(1, seed=0).input_ids
    >>> result = ula.explain(model, ids, method=ula.methods.AttnLrp(), target=-1)
    >>> sorted(result.extras)
    ['content', 'control', 'logit']
    """

    question = "What did each token send, and what did it decide, for this logit?"
    needs = ("logit", "live run")

    measure: Literal["logit", "centered", "log-odds"] = Field(
        default="centered", description=SharesOptions.model_fields["measure"].description
    )

    split: Literal["halves", "thirds"] = Field(
        default="halves",
        description="the parts of values and of the matrix that mixes them: 'halves', as published, leave queries and "
        "keys a quarter each; of 'thirds' values, queries and keys get one each",
    )


class AltiLogit(ScalarOptions):
    """ALTI-Logit: C_it = sum_l sum_j (T^l_ij x_j . U) R^{l-1}_jt, token t's part of what layers add to a logit.

    LaTIM Eq. 7-8; Ferrando et al. (2023). U is the gradient of the logit at the last residual sum, through the frozen
    final norm and head; T^l_ij excludes the residual stream, which would be counted once in each layer; R^l = P^l ...
    P^1 is the product of ALTI's maps up to layer l, R^0 the identity. Two more parts make the scores complete: the
    stream that enters the first layer, delta_it x0_i . U, and the vectors f^l that the host adds between two layers
    (MLPs, their biases included), sum_l (f^l_i . U) R^l_it.

    Scores: (batch, query, key), without `query` for a target. Extras, with the same axes but `key`: `bias`, the
    biases of the layers, of the final norm and of the head; `remainder`, the part that is not linear in the output,
    zero for a logit; `logit`, the value that scores, bias and remainder add up to; `gap`, the absolute difference
    between it and their sum; and `cancellation`, (sum |scores| + |bias|) / |logit|. `completeness_gap` is the largest
    gap relative to the logit. If a host does not mask padding, the contributions of padding are part of the gap.

    Raises `OptionError` for an unknown option or value, `InputError` for a logit that is not there, `UncoveredError`
    for a layer without a residual stream outside its module, for a stream that is normed between layers (post-norm)
    and for layers that cannot be composed, `StreamError` if stream and output do not add up, and `ExactnessError`
    if the scores miss the logit.

    >>> import unilinattn as ula
    >>> model = ula.examples.load("induction", "mamba")
    >>> ids = ula.examples.TASKS["induction"].sample(1, seed=0).input_ids
    >>> result = ula.explain(model, ids, method=ula.methods.AltiLogit(), target=-1)
    >>> result.completeness_gap < 1e-4
    True
    """

    question = QUESTION
    needs = ("logit", "composition", "residual", "contributions", "frozen run", "last stream")

"""Methods of the vectors that tokens contribute to each layer's outputs."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from unilinattn.options.bases import Activation, Discard, Normalize, ThroughHeads

QUESTION = "Where does information flow between the layers? By the vectors that tokens contribute"


class Alti(ThroughHeads):
    """ALTI: C_ij proportional to [||y_i||_1 - ||y_i - T_i(x_j)||_1]^+, rows that sum to 1 (LaTIM Eq. 6).

    y_i is the residual stream plus the layer's output, biases included; T_ii includes the stream. With
    residual=False y_i is the output and T_ii has no stream. A row in which every entry is clipped is one-hot on its
    own token.

    Scores: (layer, batch, query, key), without `query` for a target. With compose="rollout" the steps are composed,
    P_n ... P_1, without a further identity, and there is no layer axis; layers that run in parallel then share a row:
    y_i is the stream plus all their outputs. `stream_error` of the result is the error of stream plus outputs against
    the host's next stream, by layer.

    With by_head=True the scores are (layer, batch, head, query, key). The units of y_i are then the pairs of a head and
    a key and, apart, the residual r_i: the stream, and a residual inside the module. With T^h_i(x_j) as in `latim`,

        C^h_ij proportional to [||y_i||_1 - ||y_i - T^h_i(x_j)||_1]^+
        R_i    proportional to [||y_i||_1 - ||y_i - r_i||_1]^+,   sum_hj C^h_ij + R_i = 1

    and R is extras["residual"] (layer, batch, query), 1 for a row in which every unit is clipped. With `heads` the
    units are those heads, or without `by_head` their sum for each key, and the residual; other heads are no units.
    This is this library's extension of LaTIM Eq. 6. The sum of "cancellation" is then over heads and keys.

    Extras: "cancellation" (layer, batch, query), the ratio sum_j ||T_i(x_j)||_1 / ||sum_j T_i(x_j)||_1 of the layer's
    contributions, without bias and stream (see `vectors.cancellation`). Composed layers have one for each step.

    Raises `OptionError` for an unknown option or value, `UncoveredError` for a layer whose residual stream is
    unknown, for layers that cannot be stacked or composed, and for different numbers of heads with by_head=True;
    `StreamError` if stream and output do not add up.

    >>> import unilinattn as ula
    >>> model = ula.examples.load("induction", "mamba")
    >>> ids = ula.examples.TASKS["induction"].sample(1, seed=0).input_ids
    >>> result = ula.explain(model, ids, method=ula.methods.Alti(compose="rollout"), target=-1)
    >>> result.dims
    ('batch', 'key')
    """

    question = QUESTION
    needs = ("layers", "residual", "contributions")

    activation: Activation = Field(
        default="exact", description="'exact' freezes the activation's slope; the others are LaTIM's f (LaTIM Eq. 19)"
    )
    residual: bool = Field(
        default=True,
        description="whether y_i and T_ii include the residual stream; False: y_i is the output. By heads it is a unit "
        "apart, whose share is extras['residual']",
    )

    @model_validator(mode="after")
    def _along_the_stream(self) -> Self:
        if self.compose == "rollout" and not self.residual:
            raise ValueError("compose='rollout' multiplies maps along the residual stream, which residual=False drops")
        return self


class Latim(ThroughHeads):
    """LaTIM: C_ij = ||T_i(x_j)||_p, the norm of token j's contribution to output i (LaTIM Eq. 5, Table 1).

    T_i(x_j) is exact by default; `activation` selects one of the paper's splits of the activation over the
    convolution's taps. Scores: (layer, batch, query, key), without `query` for a target. The residual inside a module
    is part of T_ii for any `residual`.

    With compose="rollout" the scores are A_n ... A_1 without a layer axis: A_ij = C_ij / sum_k C_ik of a step, T_ii
    with the residual stream (LaTIM Eq. 4). Layers that run in parallel are summed before the norm. LaTIM does not
    compose its norms; the product of norms with the residual and normalised rows is that of GlobEnc (Modarressi et
    al., 2022), after Kobayashi et al. (2021) and Abnar and Zuidema (2020).

    With by_head=True the scores are (layer, batch, head, query, key): ||T^h_i(x_j)||_p for each head that `heads`
    selects, where T^h_i(x_j) passes through head h of the core, a block of channels, and through the stages after it:
    T_i(x_j) = sum_h T^h_i(x_j). Gate and norm are frozen; the columns of the output projection that read head h carry
    it. With `heads` and without `by_head` the scores are ||sum_h T^h_i(x_j)||_p over these heads. A residual inside a
    module, the stream and the bias pass through no head. This split is an extension of LaTIM.

    With sketch=k the norms are estimates ||S T_i(x_j)||, S a k x d matrix of random signs over sqrt(k) that `seed`
    draws: the squared norm is unbiased, with a relative standard deviation of at most sqrt(2 / k) (Achlioptas, 2003).
    S is multiplied into the output projection once, so that all pairs cost k / d of the norms. `exact_keys` computes
    those keys of each row again whose estimates are the largest. Extras then include "standard_error", the root mean
    square over the estimated real keys of each row, in the unit of the scores before `discard` and `normalize`.

    Extras: "bias", the norm of the bias at each query (with bias="column"); "cancellation" at each query, the ratio
    sum_j ||T_i(x_j)||_p / ||sum_j T_i(x_j)||_p without bias and stream (see `vectors.cancellation`); and
    "decomposition_error" of each layer: ||sum_j T_i(x_j) + bias_i - y_i|| / ||y_i|| over the computed real rows, the
    worst sequence. The completeness gap is that of the worst layer. Composed layers have one of each for a step. Of
    split contributions, the sum of "cancellation" is over heads and keys, and the parts that pass through no selected
    head are added to the decomposition.

    Raises `OptionError` for an unknown option or value, `UncoveredError` for layers that cannot be stacked or
    composed, that have no activation to split, whose residual stream is unknown, or that have different numbers of
    heads with by_head=True, and `StreamError` if stream and output do not add up.

    >>> import unilinattn as ula
    >>> model = ula.examples.load("induction", "mamba")
    >>> ids = ula.examples.TASKS["induction"].sample(1, seed=0).input_ids
    >>> result = ula.explain(model, ids, method=ula.methods.Latim(p=1), target=-1)
    >>> result.dims
    ('layer', 'batch', 'key')
    """

    question = QUESTION
    needs = ("layers", "contributions")

    p: float = Field(default=2.0, ge=1, description="order of the norm, at least 1; float('inf') for the maximum")
    activation: Activation = Field(
        default="exact",
        description="'exact' freezes the activation's slope; the others are LaTIM's f, applied to each tap of the "
        "convolution (LaTIM Eq. 19)",
    )
    bias: Literal["column", "query"] = Field(
        default="column",
        description="'column' returns the bias's norm in extras['bias']; 'query' adds its vector to T_ii",
    )
    residual: bool = Field(
        default=False,
        description="whether T_ii includes the residual stream that the host adds outside the module; "
        "compose='rollout' includes it",
    )
    sketch: int | None = Field(
        default=None,
        ge=1,
        description="None computes the norms of all pairs; a number estimates them by a random projection of the "
        "output to that many dimensions, with a relative standard error of at most 1 / sqrt(2 sketch)",
    )
    seed: int = Field(default=0, ge=0, description="seed of the random projection")
    exact_keys: int = Field(
        default=0,
        ge=0,
        description="with `sketch`, the number of keys with the largest estimates in each row that are exact",
    )
    discard: Discard = 0.0
    normalize: Normalize = "none"

    @model_validator(mode="before")
    @classmethod
    def _composed(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Include the stream and normalise rows for compose="rollout", and refuse other values."""
        if options.get("compose") != "rollout":
            return options
        needed = {"residual": True, "normalize": "rows"}
        for name, value in needed.items():
            if options.get(name, value) != value:
                raise ValueError(
                    "compose='rollout' multiplies maps that include the residual stream and whose rows sum to 1: leave "
                    f"{name}={options[name]!r} out"
                )
        return {**options, **needed}

    @model_validator(mode="after")
    def _l2_only(self) -> Self:
        if self.sketch is None:
            if self.exact_keys:
                raise ValueError(f"exact_keys={self.exact_keys} is of estimated norms; give sketch too")
            return self
        plain = {"p": 2.0, "activation": "exact", "bias": "column", "residual": False, "compose": "none"}
        for name, value in plain.items():
            if getattr(self, name) != value:
                raise ValueError(f"a sketch estimates the l2 norms of exact contributions: leave {name} out")
        if self.is_through_heads:
            raise ValueError("a sketch estimates the norms of whole contributions; leave heads and by_head out")
        return self

    @model_validator(mode="after")
    def _no_head(self) -> Self:
        if self.is_through_heads and (self.residual or self.bias == "query"):
            name = "residual=True" if self.residual else "bias='query'"
            raise ValueError(f"the residual stream and the bias pass through no head; leave {name} out")
        return self

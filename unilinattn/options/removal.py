"""Methods that run the model without some tokens or edges."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, Protocol, Self, runtime_checkable

from pydantic import Field, InstanceOf, field_serializer, field_validator, model_validator

from unilinattn.options.bases import Baseline, ScalarOptions, Seed, function_name

QUESTION = "Which tokens or edges, if removed, change the output? The model runs again for each"


@runtime_checkable
class Trace(Protocol):
    """A `unilinattn.Trace`, known here by two attributes, because its module imports torch."""

    @property
    def model(self) -> str:
        """The name of the model's class."""

    @property
    def layers(self) -> Sequence[Any]:
        """The traced layers."""


class Knockout(ScalarOptions):
    """Knockout: the drop of the target's logit when a token's edges to other tokens are cut in the running model.

    score_j = f - f(cut of j). f(cut of j) is the logit of a run in which every layer returns y_i - sum over i != j of
    T_ij x_j, with the operators of that run (see `unilinattn.cut`), and f that of the run without cuts. The logit is
    the model's prediction without cuts, or that of the option `logit`. Geva et al. (EMNLP 2023) cut attention edges
    before the softmax; Endy et al. ("Mamba Knockout", ACL 2025) set entries of Mamba's matrices to zero, as here.

    Scores: (batch, query, key) with the drop at every query, without `query` for a target, for a model with one vector
    of logits for each sequence and for a function as `logit`. With `edges` they are (batch, query, key), the drop for
    the target when the edge from key to query is cut, and zero for other edges. With `window` a layer axis is first.

    Raises `OptionError` for an unknown option or value, `InputError` for edges outside the sequence or above the
    diagonal of a causal layer and for a model without logits, and `UncoveredError` for a layer that mixes several
    tensors at once.

    >>> import unilinattn as ula
    >>> model = ula.examples.load("induction", "mamba")
    >>> ids = ula.examples.TASKS["induction"].sample(1, seed=0).input_ids
    >>> result = ula.explain(model, ids, method=ula.methods.Knockout(layers=[0]), target=-1)
    >>> result.dims
    ('batch', 'key')
    """

    question = QUESTION
    needs = ("logit", "composition", "cuts")

    layers: Literal["all"] | int | Annotated[Sequence[int | str], Field(min_length=1)] = Field(
        default="all", description="layers that are cut: every layer, an index, or a list of indices or names"
    )
    window: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="None cuts the layers together; a number cuts that many consecutive ones of them around each "
        "layer, fewer at the ends, and gives the scores a layer axis (Geva et al. 2023)",
    )
    edges: Annotated[Sequence[tuple[int, int]], Field(min_length=1)] | None = Field(
        default=None,
        description="None cuts all edges of a token to other tokens, one token after the other; a list of pairs "
        "(query, key) cuts these, one edge after the other, and needs a target. Positions count padding, negative "
        "ones from the end",
    )
    heads: int | Annotated[Sequence[int], Field(min_length=1)] | Callable[[Any], Any] | None = Field(
        default=None,
        description="heads of the layers' cores that are cut, or a function from a layer's operator to them; None for "
        "all",
    )
    channels: int | Annotated[Sequence[int], Field(min_length=1)] | Callable[[Any], Any] | None = Field(
        default=None, description="the same for single channels of the cores (feature knockout, Endy et al. 2025)"
    )
    replace: Literal["zero", "mean"] | InstanceOf[Trace] = Field(
        default="zero",
        description="values in place of x_j in the cut T_ij x_j: none, the mean of the layer's input over the real "
        "tokens, or those of a trace of other inputs",
    )
    measure: Literal["logit", "log-probability"] = Field(
        default="logit", description="the effect is the drop of the logit, or of its log-probability in nats"
    )

    @field_validator("edges", mode="before")
    @classmethod
    def _pairs(cls, edges: Any) -> Any:
        # A tensor, and a saved result, hold each pair as a list.
        lists = isinstance(edges, list | tuple) and all(isinstance(pair, list | tuple) for pair in edges)
        return [tuple(pair) for pair in edges] if lists else edges

    @field_serializer("heads", "channels", "replace")
    def _names(self, value: Any) -> Any:
        if isinstance(value, Trace):
            return f"another run of {value.model}"
        return function_name(value) if callable(value) else value

    @model_validator(mode="after")
    def _one_selection(self) -> Self:
        if self.heads is not None and self.channels is not None:
            raise ValueError("heads and channels both restrict the cut; give one of them")
        if self.measure != "logit" and callable(self.logit):
            raise ValueError(f"measure={self.measure!r} needs a token or class id, and logit is a function")
        return self


class Occlusion(ScalarOptions):
    """Occlusion: the drop of the logit when a token's embedding is replaced by a baseline (Zeiler and Fergus, 2014).

    captum's `Occlusion` over the presence of the real tokens, one sequence after the other: token j keeps its embedding
    or takes that of the baseline, in windows that move by one token. The logit is the model's prediction at the target
    with all tokens, or that of the option `logit`. Scores: (batch, key); a model with logits at every position needs a
    target.

    Raises `OptionError` for an unknown option or value, without a target, and for a window longer than a sequence,
    `InputError` for a logit that is not there and for a baseline id that the model does not know, `MissingExtraError`
    without captum.

    >>> import unilinattn as ula
    >>> model = ula.examples.load("induction", "mamba")
    >>> ids = ula.examples.TASKS["induction"].sample(1, seed=0).input_ids
    >>> result = ula.explain(model, ids, method=ula.methods.Occlusion(window=2), target=-1)
    >>> result.dims
    ('batch', 'key')
    """

    question = QUESTION
    needs = ("logit", "one target", "embeddings")

    baseline: Baseline = "zero"
    window: int = Field(
        default=1,
        ge=1,
        description="tokens replaced together; a token's score is the mean over the windows that hold it",
    )


class KernelShap(ScalarOptions):
    """Kernel SHAP: Shapley values of the tokens for the logit, by weighted least squares (Lundberg and Lee, 2017).

    The features are the real tokens of each sequence; an absent token takes the embedding of the baseline. If all
    2^M - 2 proper coalitions of M tokens fit into `n_samples`, the scores are the exact Shapley values, which solve the
    fit over all coalitions (Theorem 2). Otherwise captum's `KernelShap` draws coalitions, and the regression is solved
    in float64, so scikit-learn is not needed. The logit is the model's prediction at the target with all tokens, or
    that of the option `logit`. Scores: (batch, key); a model with logits at every position needs a target. The scores
    add up to the difference between the logit and that without tokens, if drawn up to the error of the regression,
    which weights these two samples heavily. Extras: `logit` and, without tokens, `baseline`. `completeness_gap` is the
    largest of these errors relative to the difference.

    Raises the errors of `occlusion`, and `OptionError` for fewer samples than unknowns.

    >>> import unilinattn as ula
    >>> model = ula.examples.load("induction", "mamba")
    >>> ids = ula.examples.TASKS["induction"].sample(1, seed=0).input_ids
    >>> result = ula.explain(model, ids, method=ula.methods.KernelShap(n_samples=200), target=-1)
    >>> result.dims
    ('batch', 'key')
    """

    question = QUESTION
    needs = ("logit", "one target", "embeddings")

    baseline: Baseline = "zero"
    n_samples: int = Field(
        default=500,
        ge=4,
        description="largest number of coalitions for each sequence; if all 2^M - 2 of its M tokens fit, the scores "
        "are exact, else they are drawn, all tokens and none included, and M + 2 is the least",
    )
    seed: Seed = 0

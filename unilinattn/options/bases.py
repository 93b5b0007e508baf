"""Options that several methods share, as bases of their classes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_serializer, field_validator, model_validator

from unilinattn.errors import OptionError
from unilinattn.options.base import Options

Activation = Literal["exact", "silu", "relu", "identity", "taylor1", "taylor2"]
Discard = Annotated[
    float,
    Field(
        ge=0,
        lt=1,
        description="fraction of each row's lowest scores set to zero, counted over the sequence's real keys; the "
        "target's column (without a target, each row's own token) is never dropped (HMA ACL Table 5)",
    ),
]
Normalize = Annotated[
    Literal["none", "rows", "min-max"],
    Field(
        description="'rows' divides each row by the sum of its absolute values, because a signed row may sum to zero "
        "or less; 'min-max' rescales the absolute values of each sequence's map to 0..1 (HMA ACL 4.1)"
    ),
]
Sign = Literal["keep", "clamp", "abs"]
Baseline = Annotated[
    Literal["zero", "mean-embedding"] | Annotated[int, Field(ge=0)],
    Field(description="vector of an absent token: zero, the mean of the vectors of all ids, or that of a token id"),
]
Seed = Annotated[int, Field(ge=0, description="seed of the random numbers")]

VECTOR_OF_TOKEN = "the length of the vector"
"""How the option `logit` of a result begins if it names the vector of the target (see `host.scalars`)."""

CODE_OPTIONS = ("variant", "start_layer", "scope", "heads", "sign", "logit")
"""Options that variant="published-code" reads."""


@dataclass(frozen=True)
class Relative:
    """One logit relative to the others; the only logit of a sequence is itself.

    Attributes:
        logit: a token or class id, or None for the prediction.
        measure: "centered", the logit less the mean of all logits, which no probability depends on; or "log-odds",
            log p - log(1 - p), the logit less the logarithm of the sum of exp over the other logits.
    """

    logit: int | None = None
    measure: Literal["centered", "log-odds"] = "centered"


class MapOptions(Options):
    """The L x L map of a layer and its postprocessing; the options apply in the order of the fields."""

    scope: Literal["core", "mixer", "unified"] = Field(
        default="core",
        description="stages that form the attention matrix; the entries of 'layer' are vectors: see 'latim', 'alti'",
    )
    heads: (
        Literal["mean", "max", "min", "abs-mean", "product", "geometric-mean"]
        | int
        | Annotated[Sequence[int], Field(min_length=1)]
    ) = Field(
        default="mean",
        description="reduction over heads (channels in 'unified'), one head, or a list of heads to average "
        "(HMA ACL Tables 5 and 9); 'geometric-mean' is the root of the size of the product over the heads, with the "
        "product's sign, and never underflows",
    )
    sign: Sign = Field(
        default="keep", description="negative scores kept, set to zero, or made positive (HMA ACL Table 6)"
    )
    discard: Discard = 0.0
    normalize: Normalize = "none"

    @property
    def is_linear(self) -> bool:
        """Whether the map is the plain mean over heads, by which a row can be multiplied in linear time."""
        return self.sign == "keep" and self.is_plain

    @property
    def is_plain(self) -> bool:
        """Whether the map is the mean over heads, changed at most by `sign`, which treats each entry by itself."""
        return self.heads == "mean" and self.discard == 0 and self.normalize == "none"


class Layerwise(Options):
    """Options of methods that keep a layer axis."""

    layers: Literal["all", "mean"] | int | Annotated[Sequence[int | str], Field(min_length=1)] = Field(
        default="all", description="every layer, the mean over all of them, an index, or a list of indices or names"
    )

    @property
    def has_layer_axis(self) -> bool:
        """Whether the scores have a layer axis."""
        return self.layers != "mean"


class Composable(Layerwise):
    """Options of methods that keep a layer axis, and can keep a head axis or compose the layers."""

    compose: Literal["none", "rollout"] = Field(
        default="none",
        description="'none' keeps a layer axis; 'rollout' multiplies the steps' maps, the last one leftmost",
    )
    by_head: bool = Field(
        default=False, description="whether the scores have a head axis (channels where a head is one channel wide)"
    )

    @model_validator(mode="after")
    def _one_axis(self) -> Self:
        if self.compose == "rollout" and self.layers == "mean":
            raise ValueError("compose='rollout' multiplies the layers' maps, so layers='mean' has none to average")
        if self.by_head and self.compose == "rollout":
            raise ValueError("compose='rollout' multiplies maps of whole layers; leave by_head out")
        if self.by_head and self.layers == "mean":
            raise ValueError("heads of different layers have nothing in common; choose layers instead of layers='mean'")
        return self

    @property
    def has_layer_axis(self) -> bool:
        """Whether the scores have a layer axis."""
        return super().has_layer_axis and self.compose == "none"


class ThroughHeads(Composable):
    """Options of methods that reduce the contributions which pass through heads."""

    heads: int | Annotated[Sequence[int], Field(min_length=1)] | None = Field(
        default=None,
        description="one head or a list of heads: only the part of each contribution that passes through them, summed "
        "unless `by_head`; None for whole contributions, or with `by_head` for every head",
    )

    @model_validator(mode="after")
    def _whole_layers(self) -> Self:
        if self.heads is not None and self.compose == "rollout":
            raise ValueError("compose='rollout' multiplies maps of whole layers; leave heads out")
        return self

    @property
    def is_through_heads(self) -> bool:
        """Whether contributions are split by heads."""
        return self.by_head or self.heads is not None

    @property
    def without_stream(self) -> str:
        """The end of an error for a layer whose residual stream is unknown; compositions need the stream."""
        return "" if self.compose == "rollout" else " Use residual=False for the layer's output without a stream."


class Composed(Options):
    """Options of methods that compose layers."""

    start_layer: Annotated[int, Field(ge=0)] | Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0,
        description="index of the first layer, or its depth as a share of the layers, rounded down; the layers before "
        "it are left out",
    )


class PublishedOptions(MapOptions, Composed):
    """Options of the methods of attention maps that the code of HMA has for images.

    The code is vim/xai_utils.py of github.com/AmeenAli/HiddenMambaAttn. It takes layers 15 to 23 of 24.
    """

    variant: Literal["formula", "published-code"] = Field(
        default="formula",
        description="'published-code' computes the scores of CLS as the code that was released with HMA does, which "
        "differs from the printed equation; it starts at 15/24 of the depth",
    )

    @model_validator(mode="before")
    @classmethod
    def _start(cls, options: Any) -> Any:
        return {"start_layer": 15 / 24, **options} if options.get("variant") == "published-code" else options

    @model_validator(mode="after")
    def _of_code(self) -> Self:
        if self.is_published:
            for name, field in type(self).model_fields.items():
                if name not in CODE_OPTIONS and getattr(self, name) != field.default:
                    raise ValueError(
                        f"variant='published-code' has no {name}; leave it out. It takes {', '.join(CODE_OPTIONS[1:])}"
                    )
        return self

    @property
    def is_published(self) -> bool:
        """Whether the scores are those of the released code."""
        return self.variant == "published-code"


def function_name(function: Callable[..., Any]) -> str:
    """Return the name of a function in a result, without the functions around it."""
    name: str | None = getattr(function, "__qualname__", None)
    return repr(function) if name is None else name.rpartition("<locals>.")[2]


class ScalarOptions(Options):
    """Options of methods that explain a scalar of the model's output."""

    logit: int | str | tuple[int | str, int | str] | Callable[[Any], Any] | None = Field(
        default=None,
        description="a token or class id, the text of a token, a pair of them for the difference, a scalar function of "
        "the model's output, or None for the model's own prediction, without logits the similarity of a pair or the "
        "length of its output's vector",
    )

    @field_validator("logit", mode="before")
    @classmethod
    def _pair(cls, logit: Any) -> Any:
        # A saved result stores a pair as a list.
        return tuple(logit) if isinstance(logit, list) else logit

    @field_serializer("logit")
    def _function_name(self, logit: Any) -> Any:
        return function_name(logit) if callable(logit) else logit

    @property
    def scalar(self) -> int | tuple[int, int] | Callable[[Any], Any] | None:
        """The explained scalar, `logit` without texts; raises `OptionError` for a text that no tokenizer has read."""
        match self.logit:
            case (int() as first, int() as second):
                return first, second
            case str() | (_, _):
                raise OptionError(
                    f"{self.name} does not accept logit={self.logit!r} without a tokenizer, which turns a text into "
                    f"its id. logit: {type(self).model_fields['logit'].description}."
                )
            case logit:
                return logit


class SharesOptions(ScalarOptions):
    """Options of methods that share a scalar among the tokens."""

    measure: Literal["logit", "centered", "log-odds"] = Field(
        default="logit",
        description="the explained number: the logit; 'centered', the logit less the mean of all logits, on which no "
        "probability depends; or 'log-odds', log p - log(1 - p). A pair of logits and a function stay",
    )

    @property
    def scalar(self) -> Any:
        """The explained scalar, `logit` without texts; raises `OptionError` for a text that no tokenizer has read."""
        logit = super().scalar
        if self.measure == "logit" or not (logit is None or isinstance(logit, int)):
            return logit
        return Relative(logit, self.measure)


class GradientMapOptions(ScalarOptions, Composed):
    """Options of methods that weight attention matrices by their gradients."""

    sign: Sign = Field(
        default="clamp", description="negative weighted entries of each head kept, set to zero, or made positive"
    )

"""Bases of the options of methods: each has a default and a description, is checked, and is stored in every result."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self, get_args

import numpy as np
import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)

from unilinattn.errors import OptionError, nearest
from unilinattn.tracing.trace import Target

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


class Options(BaseModel):
    """Base class of every method's options: frozen, without unknown names and without silent conversions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _plain_numbers(cls, given: Any) -> Any:
        """Convert numbers and arrays of NumPy and torch to plain Python values."""
        return {name: _plain(value) for name, value in given.items()}

    @property
    def has_layer_axis(self) -> bool:
        """Whether the method's scores have a layer axis."""
        return False

    @classmethod
    def of(cls, method: str, given: Mapping[str, Any]) -> Self:
        """Check the options given to a method.

        Raises `OptionError` with the method, the given value, the accepted ones and the nearest of them.
        """
        try:
            return cls.model_validate(dict(given))
        except ValidationError as error:
            raise OptionError(_message(cls, method, given, error)) from None

    def stored(self, target: Target | None) -> dict[str, Any]:
        """Return the options and the target as plain Python values, for the result."""
        plain = torch.as_tensor(target).tolist() if target is not None else None
        return {**self.model_dump(), "target": plain}


class MapOptions(Options):
    """The L x L map of a layer and its postprocessing; the options apply in the order of the fields."""

    scope: Literal["core", "mixer", "unified"] = Field(
        "core",
        description="stages that form the attention matrix; the entries of 'layer' are vectors: see 'latim', 'alti'",
    )
    heads: (
        Literal["mean", "max", "min", "abs-mean", "product", "geometric-mean"]
        | int
        | Annotated[Sequence[int], Field(min_length=1)]
    ) = Field(
        "mean",
        description="reduction over heads (channels in 'unified'), one head, or a list of heads to average "
        "(HMA ACL Tables 5 and 9); 'geometric-mean' is the root of the size of the product over the heads, with the "
        "product's sign, and never underflows",
    )
    sign: Literal["keep", "clamp", "abs"] = Field(
        "keep", description="negative scores kept, set to zero, or made positive (HMA ACL Table 6)"
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
        "all", description="every layer, the mean over all of them, an index, or a list of indices or names"
    )

    @property
    def has_layer_axis(self) -> bool:
        """Whether the scores have a layer axis."""
        return self.layers != "mean"


class Composable(Layerwise):
    """Options of methods that keep a layer axis, and can keep a head axis or compose the layers."""

    compose: Literal["none", "rollout"] = Field(
        "none",
        description="'none' keeps a layer axis; 'rollout' multiplies the steps' maps, the last one leftmost",
    )
    by_head: bool = Field(
        False, description="whether the scores have a head axis (channels where a head is one channel wide)"
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
        None,
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

    start_layer: int = Field(0, ge=0, description="index of the first layer; the layers before it are the identity")


class ScalarOptions(Options):
    """Options of methods that explain a scalar of the model's output."""

    logit: int | tuple[int, int] | Callable[[Any], Any] | None = Field(
        None,
        description="a token or class id, a pair of them for the difference, a scalar function of the model's output, "
        "or None for the model's own prediction",
    )

    @field_validator("logit", mode="before")
    @classmethod
    def _pair(cls, logit: Any) -> Any:
        # A saved result stores a pair as a list.
        return tuple(logit) if isinstance(logit, list) else logit

    @field_serializer("logit")
    def _named(self, logit: Any) -> Any:
        return getattr(logit, "__qualname__", repr(logit)) if callable(logit) else logit


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    return value.tolist() if isinstance(value, np.generic | np.ndarray | torch.Tensor) else value


def _message(model: type[Options], method: str, given: Mapping[str, Any], error: ValidationError) -> str:
    finding = error.errors()[0]
    name = str(finding["loc"][0]) if finding["loc"] else ""
    if finding["type"] == "extra_forbidden":
        return f"{method} takes no option {name!r}" + nearest(name, model.model_fields)
    reason = finding["msg"].removeprefix("Value error, ")
    if name not in model.model_fields:
        return f"{method}: {reason}."
    field, value = model.model_fields[name], given[name]
    choices = _choices(field.annotation)
    tail = nearest(value, choices) if isinstance(value, str) and choices else f": {reason}."
    return f"{method} does not accept {name}={value!r}{tail} {name}: {field.description}."


def _choices(annotation: Any) -> list[str]:
    """Return the strings among the literals of a type, unions included."""
    return [choice for part in get_args(annotation) for choice in ([part] if isinstance(part, str) else _choices(part))]

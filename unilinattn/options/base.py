"""The base class of every method: its name, question and needs as data, and its options as checked fields."""

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from unilinattn.errors import OptionError, nearest

Need = Literal[
    "logit",
    "one target",
    "layers",
    "composition",
    "residual",
    "contributions",
    "maps",
    "matrices",
    "gradients",
    "inner gradients",
    "frozen run",
    "half rule",
    "core relevances",
    "live run",
    "last stream",
    "cuts",
    "embeddings",
    "embedding gradients",
]
"""A facility of a trace that a method uses; `methods.needs` states each and tries it."""


class Options(BaseModel):
    """A method with its options: frozen, without unknown names and without silent conversions.

    A subclass is a method, its docstring the description and its fields the options; an object is a method with some
    values of them. Raises `OptionError` with the given value, the accepted ones and the nearest of them.

    Attributes:
        name: name of the method, by default that of its class in lower case with underscores.
        question: the question that the method answers; methods of one family share it.
        needs: facilities of a trace that the method uses with its default options; without them it is never
            recommended.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: ClassVar[str]
    question: ClassVar[str] = ""
    needs: ClassVar[tuple[Need, ...] | None] = None

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Name the method after its class, unless the class states a name."""
        if "name" not in vars(cls):
            cls.name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**options)
        except ValidationError as error:
            raise OptionError(_message(type(self), options, error)) from None
        # Validators add options that others imply, such as those of compose="rollout".
        object.__setattr__(self, "__pydantic_fields_set__", set(options))

    def __str__(self) -> str:
        return repr(self)

    def __repr_args__(self) -> Any:
        return self.keywords.items()

    @model_validator(mode="before")
    @classmethod
    def _plain_numbers(cls, options: Any) -> Any:
        """Convert numbers and arrays of NumPy and torch to plain Python values."""
        return {name: _plain(value) for name, value in options.items()}

    @property
    def keywords(self) -> dict[str, Any]:
        """The options of the call that made the object, without the defaults."""
        return {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}

    @property
    def label(self) -> str:
        """The name of the method, with the options of the call."""
        return label_of(self.name, self.keywords)

    @property
    def has_layer_axis(self) -> bool:
        """Whether the method's scores have a layer axis."""
        return False

    @classmethod
    def summary(cls) -> str:
        """Return the first line of the description."""
        return first_line(cls)


def refuse_class(method: object) -> None:
    """Raise `OptionError` for the class of a method in place of an object of it."""
    if isinstance(method, type) and issubclass(method, Options):
        raise OptionError(f"{method.__name__} is the class of a method; give an object of it, {method.__name__}().")


def first_line(documented: object) -> str:
    """Return the first line of the docstring of a class or function."""
    return (documented.__doc__ or "").strip().split("\n", 1)[0]


def label_of(name: str, options: Mapping[str, Any]) -> str:
    """Return the name of a row of results: that of the method, with its options if there are any."""
    return f"{name} ({', '.join(f'{key}={value!r}' for key, value in options.items())})" if options else name


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    return value.tolist() if hasattr(value, "tolist") else value


def _message(method: type[Options], options: Mapping[str, Any], error: ValidationError) -> str:
    finding = error.errors()[0]
    option = str(finding["loc"][0]) if finding["loc"] else ""
    if finding["type"] == "extra_forbidden":
        return f"{method.name} takes no option {option!r}" + nearest(option, method.model_fields)
    reason = finding["msg"].removeprefix("Value error, ")
    if option not in method.model_fields:
        return f"{method.name}: {reason}."
    field, value = method.model_fields[option], options[option]
    choices = _choices(field.annotation)
    tail = nearest(value, choices) if isinstance(value, str) and choices else f": {reason}."
    return f"{method.name} does not accept {option}={value!r}{tail} {option}: {field.description}."


def _choices(annotation: Any) -> list[str]:
    """Return the strings among the literals of a type, unions included."""
    return [
        choice
        for argument in get_args(annotation)
        for choice in ([argument] if isinstance(argument, str) else _choices(argument))
    ]

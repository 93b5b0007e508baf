"""`ScoreTable`: results by model and method, without their pictures."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from unilinattn.aligned import aligned
from unilinattn.errors import InputError, OptionError, nearest
from unilinattn.optional import import_extra
from unilinattn.results.labels import encodable
from unilinattn.results.scores import Scores, axes_text, count_kinds

if TYPE_CHECKING:
    import pandas

Value = TypeVar("Value")
Result = TypeVar("Result", bound=Scores)


class _Unknown(OptionError, KeyError):
    """Raised for a name that is not in a mapping of results; also a KeyError, so that `in` and `get` work."""

    __str__ = Exception.__str__


class _Named(Mapping[str, Value], Generic[Value]):
    """A read-only mapping whose error for an unknown name shows the nearest one."""

    _noun = "method"

    def __init__(self, entries: Mapping[str, Value]) -> None:
        self._entries = MappingProxyType({encodable(name): value for name, value in entries.items()})

    def __getitem__(self, name: str) -> Value:
        if name not in self._entries:
            raise _Unknown(f"There is no {self._noun} {name!r} here{nearest(name, self._entries)}")
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)

    def __repr__(self) -> str:
        return f"<{self._noun}s: {', '.join(self)}>"


class ScoreTable(_Named[Mapping[str, Result]], Generic[Result]):
    """The data of a `Comparison`: results by model and method, each of class `_kind`.

    Raises `InputError` if it is empty or holds an entry of another class.
    """

    _noun = "model"
    _kind: type[Scores] = Scores

    def __init__(self, results: Mapping[str, Mapping[str, Result]]) -> None:
        super().__init__({model: _Named(methods) for model, methods in results.items()})
        if not any(self.values()):
            raise InputError("A comparison needs at least one model with at least one result; it was given none.")
        for model, method, result in self.results():
            if not isinstance(result, self._kind):
                raise InputError(
                    f"{model}, {method}: a comparison holds {self._kind.__name__}, not {type(result).__name__}."
                )

    @property
    def methods(self) -> tuple[str, ...]:
        """The names of all methods, in the order in which the models list them."""
        return tuple(dict.fromkeys(method for methods in self.values() for method in methods))

    def results(self) -> Iterator[tuple[str, str, Result]]:
        """Yield (model, method, result) for every result."""
        for model, methods in self.items():
            for method, result in methods.items():
                yield model, method, result

    def table(self) -> str:
        """Return an aligned text table, one line per result, with its axes and worst reconstruction error."""
        rows = [("model", "mixers", "method", "scope", "scores", "reconstruction error")]
        for model, method, result in self.results():
            axes = axes_text(result)
            error = f"{worst[1]:.1e}" if (worst := result.worst_error) is not None else "-"
            rows.append((model, count_kinds(result.kinds) or "-", method, result.scope or "-", axes, error))
        return aligned(rows)

    def __repr__(self) -> str:
        return f"Comparison of {len(self)} models, {len(self.methods)} methods\n{self.table()}"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        model, method, _ = next(self.results())
        raise InputError(
            f"A comparison holds {sum(map(len, self.values()))} results with different axes, which are no array; take "
            f"one of them, such as np.asarray(comparison[{model!r}][{method!r}]), or `to_dataframe()`."
        )

    def to_dataframe(self) -> "pandas.DataFrame":
        """Return the long format of all results in one table, with the first columns `model` and `method`.

        Raises `MissingExtraError` if pandas is missing.
        """
        package = import_extra("pandas", "xarray")
        frames = []
        for model, method, result in self.results():
            frame = result.to_dataframe()
            frame.insert(0, "model", model)
            frame.insert(1, "method", method)
            frames.append(frame)
        return package.concat(frames, ignore_index=True)

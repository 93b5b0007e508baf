"""The vectors in the output of a model, and the expressions that name its tensors."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

NAMES = ("logits", "last_hidden_state")
"""Entries of an output that are its vectors, if it has one of them."""

Path = tuple[str | int, ...]
"""The keys and indices that lead to a tensor in an output."""


def vectors_in(output: Any, tokens: tuple[int, ...] | None = None) -> tuple[Path, Tensor] | None:
    """Return the vectors that a model returns, and where: an entry of `NAMES`, or else the first tensor of numbers.

    Of a list of feature maps the last is taken. Of the outputs of several towers inside of an output it is the last one
    with vectors of `tokens`, (batch, length), if there is one. None for an output without numbers.
    """
    if isinstance(output, Tensor):
        return ((), output) if output.is_floating_point() and output.ndim else None
    candidates = _candidates(output)
    first = next(candidates, None)
    if first is None or not isinstance(first[0][-1], str) or len(first[0]) == 1:
        return first
    of_tokens = [each for each in (first, *candidates) if each[1].ndim == 3 and tuple(each[1].shape[:2]) == tokens]
    return of_tokens[-1] if of_tokens else first


def _candidates(output: Any) -> Iterator[tuple[Path, Tensor]]:
    """Yield the vectors of each entry of an output in order, only those of `NAMES` if there are any."""
    if isinstance(output, Mapping):
        names = [name for name in NAMES if isinstance(output.get(name), Tensor)]
        entries: Sequence[tuple[Any, Any]] = [(name, output[name]) for name in names or output if "loss" not in name]
    else:
        entries = list(enumerate(output)) if type(output) in (tuple, list) else []
    for key, value in entries:
        if type(value) in (tuple, list) and value and isinstance(value[-1], Tensor):
            key, value = (key, -1), value[-1]
        inner = vectors_in(value)
        if inner is not None:
            yield (*(key if isinstance(key, tuple) else (key,)), *inner[0]), inner[1]


def at_path(output: Any, path: Path) -> Tensor:
    """Return a tensor of an output by the keys and indices that lead to it."""
    for key in path:
        output = output[key] if not isinstance(key, str) or isinstance(output, Mapping) else getattr(output, key)
    return output


def expression(path: Path, output: Any = None) -> str:
    """Return a path as an expression, such as `out.last_hidden_state`; with `output`, one that reads this output."""
    names = ["out"]
    for key in path:
        value = None if output is None else at_path(output, (key,))
        # A plain dictionary has no attributes but its methods.
        is_attribute = isinstance(key, str) and (output is None or getattr(output, key, None) is value)
        names.append(f".{key}" if is_attribute else f"[{key!r}]")
        output = value
    return "".join(names)


def pair_table(output: Any) -> Path | None:
    """Return the path of a table of similarities of all pairs of two inputs, such as `logits_per_image`, or None."""
    entries = output.items() if isinstance(output, Mapping) else ()
    tables = (key for key, x in entries if "logits_per_" in str(key) and isinstance(x, Tensor) and x.ndim == 2)
    return next(((key,) for key in tables), None)


def example(output: Any, *, rows: int = 1) -> str:
    """Return a function of an output with a number for each sequence, such as `lambda out: out.logits[:, -1, 0]`.

    `rows`: number of rows of the output for each sequence, such as those of codebooks, of which the first one is read.
    """
    if (table := pair_table(output)) is not None:
        return f"lambda out: {expression(table, output)}.diagonal()"
    vectors = vectors_in(output)
    if vectors is None:
        return "lambda out: out.last_hidden_state[:, -1, 0]"
    path, tensor = vectors
    every = ":" if rows == 1 else f"::{rows}"
    indices = [every, "-1", *["0"] * (tensor.ndim - 2)] if tensor.ndim == 3 else [every, *["0"] * (tensor.ndim - 1)]
    return f"lambda out: {expression(path, output)}[{', '.join(indices)}]"

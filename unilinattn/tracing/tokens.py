"""Find the tensor that enters a model's first block: the vectors of its tokens."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from math import prod
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn import functional

from unilinattn.call.axes import as_tokens, channel_axis, in_shape
from unilinattn.call.exactness import layer_tolerance, relative_error
from unilinattn.errors import UncoveredError
from unilinattn.host.inputs import call_host, ids_name
from unilinattn.host.isolation import runs_in_gradient_mode
from unilinattn.host.observer import Functions
from unilinattn.host.run import run
from unilinattn.tracing.changed_inputs import changed_input
from unilinattn.tracing.layer import Layer

NAMED = 4
"""Largest number of shapes that an error names."""


OTHER_VECTORS = (
    "the vectors that enter the model's first block differ between two runs on the same inputs, as where a model draws "
    "random numbers, or with a hook that calls torch functions in one of them; remove the hooks of the model."
)
"""Why a run has no vectors of the tokens."""


@dataclass(frozen=True)
class TokenTensor:
    """The tensor of a run that has the vectors of the tokens.

    Attributes:
        vectors: the tensor of the traced inputs.
        axis: its axis of channels.
        sequences: the number of sequences of a tensor whose axes are (token, batch, channel), None for another one.
    """

    vectors: Tensor
    axis: int = -1
    sequences: int | None = None

    @property
    def grid(self) -> tuple[int, int] | None:
        """The (rows, columns) of the tokens of an image, None for a sequence."""
        if self.vectors.ndim != 4:
            return None
        rows, columns = self.vectors.shape[2:] if self.axis == 1 else self.vectors.shape[1:3]
        return rows, columns

    def tokens(self, tensor: Tensor) -> Shaped[Tensor, "batch token channel"]:
        """Return the tensor of a run as vectors of tokens."""
        return as_tokens(tensor, self.sequences, self.axis)

    def in_host(self, vectors: Float[Tensor, "batch token channel"]) -> Tensor:
        """Return the vectors of the tokens of any number of sequences as the host's tensor."""
        if self.sequences is not None:
            return vectors.transpose(0, 1)
        return in_shape(vectors, torch.Size((len(vectors), *self.vectors.shape[1:])), self.axis)

    def is_same(self, vectors: Tensor) -> bool:
        """Tell whether the tensor of another run on the traced inputs has the same numbers."""
        limit = layer_tolerance(vectors.dtype)
        return vectors.shape == self.vectors.shape and not relative_error(vectors, self.vectors) > limit

    def require_same(self, vectors: Tensor) -> None:
        """Raise `UncoveredError` if a run on the traced inputs has another tensor."""
        if not self.is_same(vectors):
            raise UncoveredError(OTHER_VECTORS)


@dataclass(frozen=True)
class TokenArgument(TokenTensor):
    """The argument of the model that has the vectors of the tokens, by its `name`."""

    name: str = ""


@dataclass(frozen=True)
class TokenCall(TokenTensor):
    """The call of a torch function that returns the vectors of the tokens.

    Attributes:
        function: the function.
        number: the number of the call among those of this function with a result of this shape, from 0.
    """

    function: Any = None
    number: int = -1

    def counts(self, function: Any, result: Any) -> bool:
        """Tell whether a call is one of those that `number` counts, whose results differ in their axis of sequences."""
        if function != self.function or not isinstance(result, Tensor) or result.ndim != self.vectors.ndim:
            return False
        axis = 0 if self.sequences is None else 1
        return all(a == b for n, (a, b) in enumerate(zip(result.shape, self.vectors.shape, strict=True)) if n != axis)

    def finder(self) -> Callable[[Any, Any], bool]:
        """Return a function of the calls of one run in order, true for this call."""
        numbers = count()
        return lambda function, result: self.counts(function, result) and next(numbers) == self.number


def find_tokens(
    model: nn.Module,
    arguments: Mapping[str, Any],
    layers: Sequence[Layer],
    *,
    in_lists: bool = False,
    batch: int | None = None,
) -> TokenCall | TokenArgument:
    """Return the function call whose result enters the first block as the tokens of the layers, or the argument.

    `in_lists` says that only blocks in a list of modules count, if there are any: a module around a decoder may get the
    tokens of the encoder first. With `batch`, the layers may read windows of a tensor of `batch` sequences that enters
    a block around the first one.

    Raises `UncoveredError` if the layers have different numbers of sequences or tokens, or if no such tensor enters a
    block.
    """
    shapes = list(dict.fromkeys(tuple(layer.input.shape[:2]) for layer in layers))
    if len(shapes) > 1:
        raise UncoveredError(
            f"the layers of {type(model).__name__} have different (sequences, tokens): "
            f"{', '.join(map(str, shapes[:NAMED]))}, so the vectors of its tokens are not those of one stream."
        )
    blocks, (first, _, call) = block_names(model, layers), layers[0].name.partition("#")
    if in_lists:
        blocks = frozenset(filter(_in_list, blocks)) or blocks
    widths = {layer.input.shape[-1] for layer in layers}
    calls: list[tuple[Any, Any]] = []
    # The calls of the first layer's module before that of the layer, as of an encoder that read another text.
    calls_before, reached = int(call or 1) - 1, 0

    def record(func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        calls.append((func, result))
        return result

    class Entered(Exception):
        pass

    def enter(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal reached
        is_around = f"{first}.".startswith(f"{name}." if name else "")
        is_next = reached == calls_before
        reached += name == first
        if calls_before and not (is_around and is_next):
            return
        # The functions that the host calls are counted, not those of this hook.
        with torch._C.DisableTorchFunction():
            stream = first_stream((*args, *kwargs.values()), shapes[0])
            # What a module around all blocks gets may be projected before it is the stream.
            if stream is not None and (_in_list(name) or stream.shape[-1] in widths):
                raise Entered(stream, -1)
            stream = first_stream((*args, *kwargs.values()), shapes[0][::-1])
            if stream is not None and stream.shape[-1] in widths:
                raise Entered(stream, -1, shapes[0][0])
            if layers[0].axes.inputs == 1 or is_around:
                # (batch, channel, token), which the layer reads or a block around it turns.
                stream = first_stream((*args, *kwargs.values()), (shapes[0][0], layers[0].input.shape[2], shapes[0][1]))
                if stream is not None:
                    raise Entered(stream, 1)
            sequences = first_stream((*args, *kwargs.values()))
            if is_around and _in_list(name) and sequences is not None and len(sequences) == batch:
                raise Entered(sequences, -1)
            if is_around:
                for image in (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.ndim > 3):
                    axis = channel_axis(module, image.shape)
                    # The layers may read windows of an image, which are sequences of them.
                    if axis is not None and as_tokens(image, axis=axis).shape[:2].numel() == prod(shapes[0]):
                        raise Entered(image, axis)

    def first_entered() -> tuple[Tensor, int, int | None]:
        for name, module in model.named_modules():
            if name in blocks or name == first:
                module.register_forward_pre_hook(partial(enter, name), with_kwargs=True, prepend=True)
        try:
            call_host(model, arguments)
        except Entered as entered:
            return (*entered.args, None)[:3]
        raise UncoveredError(
            f"no block of {type(model).__name__} received a tensor of {shapes[0][0]} sequences with {shapes[0][1]} "
            "tokens, which its layers have, so the vectors of its tokens are unknown."
        )

    stream, axis, sequences = run(model, first_entered, observer=Functions(record))
    argument = next((name for name, value in arguments.items() if value is stream), None)
    if argument is not None:
        return TokenArgument(stream, axis, sequences, argument)
    matches = [number for number, (_, result) in enumerate(calls) if result is stream]
    if not matches:
        raise UncoveredError("no function of torch returned the stream that enters the model's first block.")
    alike = TokenCall(stream, axis, sequences, calls[matches[-1]][0])
    earlier = [alike.counts(*call) for call in calls[: matches[-1]]]
    return replace(alike, number=sum(earlier))


@runs_in_gradient_mode(False)
def first_of_ids(model: nn.Module, arguments: Mapping[str, Any], layers: Sequence[Layer]) -> int | None:
    """Return the number of tokens that a model puts before those of its ids, None if it is unknown.

    The vectors that enter the first block move with the ids of the same tokens.
    """
    if (name := ids_name(arguments)) is None:
        return None
    # The model may accept no other ids, or add tokens among them.
    with suppress(Exception):
        before, other = find_tokens(model, arguments, layers), changed_input(model, arguments, name)
        after = find_tokens(model, other, layers)
        moved = (before.tokens(before.vectors) != after.tokens(after.vectors)).any(-1)
        changed = arguments[name] != other[name]
        added = moved.shape[1] - changed.shape[1]
        placed = {start: functional.pad(changed, (start, added - start)) for start in range(added + 1)}
        fits = [start for start, expected in placed.items() if torch.equal(expected, moved)]
        return fits[0] if len(fits) == 1 else None
    return None


def at_call(call: TokenCall, change: Callable[[Tensor], Tensor]) -> Functions:
    """Pass the result of the call that returns the tokens' vectors through a function, in one run."""
    is_call = call.finder()
    return Functions(lambda func, args, kwargs, result: change(result) if is_call(func, result) else result)


def replaced_at_call(call: TokenCall, vectors: Tensor, reached: list[TokenCall] | None = None) -> Functions:
    """Replace the result of the call that returns the tokens' vectors, in one run; `reached` gets the call then."""

    def replace(result: Tensor) -> Tensor:
        if reached is not None:
            reached.append(call)
        # The host may write into the copy.
        return vectors.reshape(result.shape).to(result, copy=True)

    return at_call(call, replace)


def require_own_tokens(
    model: nn.Module, arguments: Mapping[str, Any], ids: Tensor | None, layers: Sequence[Layer]
) -> None:
    """Raise `UncoveredError` if the layers have other numbers of sequences or tokens than the ids of the input."""
    if ids is None:
        return
    batch, length = layers[0].output.shape[:2]
    if ids.shape == (batch, length):
        return
    other = [name for name, value in arguments.items() if isinstance(value, Tensor) and value.is_floating_point()]
    if other:
        raise UncoveredError(
            f"{type(model).__name__} reads {' and '.join(other)} and {ids.shape[1]} ids, and its first layer "
            f"has {length} tokens: two inputs reach its output, and shares are those of the tokens of one."
        )
    if ids.shape[0] != batch:
        raise UncoveredError(
            f"the layers of {type(model).__name__} have {batch} sequences, and its input has {ids.shape[0]} rows of "
            "ids: the model changes the batch, so a token of its layers is not one id."
        )
    raise UncoveredError(
        f"the layers of {type(model).__name__} have {length} tokens, and its input has {ids.shape[1]} ids: the model "
        "adds tokens, such as a tuned prompt, and their part in the output is unknown. Give the model inside of it "
        "inputs_embeds with all tokens."
    )


def block_names(model: nn.Module, layers: Sequence[Layer]) -> frozenset[str]:
    """Return the paths of the modules that contain layers, down to those in a list, and of their siblings there.

    A layer that is in no list of modules is a block by itself.
    """
    names = set()
    for layer in layers:
        path = layer.name.split("#")[0].split(".")
        blocks = [count for count in range(len(path) + 1) if _in_list(".".join(path[:count]))]
        names |= {".".join(path[:count]) for count in range(max(blocks, default=len(path)) + 1)}
    lists = {name.rpartition(".")[0] for name in names if _in_list(name)}
    siblings = {name for name, _ in model.named_modules() if _in_list(name)}
    return frozenset(names | {name for name in siblings if name.rpartition(".")[0] in lists})


def blocks_of(model: nn.Module, groups: Sequence[Sequence[Layer]]) -> dict[tuple[str, int], int]:
    """Return the number of the group of layers to which each call of a block belongs, by its path.

    The blocks are `block_names` of one group; of several, those blocks that are only in one. Call 0 stands for all
    calls of a block. A block whose calls have the same layer in each of several groups, as of an encoder of two texts,
    has the calls from 1.
    """
    names = [block_names(model, layers) for layers in groups]
    if len(names) > 1:
        names = [frozenset(filter(_in_list, each)) or each for each in names]
    counts = Counter(chain.from_iterable(names))
    numbers = {(name, 0): number for number, each in enumerate(names) for name in each if counts[name] == 1}
    for name in filter(lambda name: counts[name] > 1, counts):
        calls = [
            (layer.name.partition("#"), number)
            for number, layers in enumerate(groups)
            for layer in layers
            if layer.name.startswith(f"{name}.")
        ]
        first = calls[0][0][0] if calls else None
        # Two streams may have different layers in one block.
        by_call = {int(call or 1): number for (path, _, call), number in calls if path == first}
        if len({*by_call.values()}) == counts[name]:
            numbers |= {(name, call): number for call, number in by_call.items()}
    return numbers


def _in_list(name: str) -> bool:
    """Tell whether the path of a module ends with its place in a list of modules."""
    return name.rpartition(".")[2].isdigit()


def first_stream(values: Sequence[Any], shape: tuple[int, ...] | None = None) -> Tensor | None:
    """Return the first (batch, length, channel) tensor of a call's arguments, whose shape begins with a given one."""
    streams = (x for x in values if isinstance(x, Tensor) and x.is_floating_point() and x.ndim == 3)
    return next((x for x in streams if shape is None or tuple(x.shape[: len(shape)]) == shape), None)

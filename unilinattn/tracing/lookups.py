"""The vectors of a model's token ids: where a run computes them, and their replacement in another run."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from unilinattn.call.exactness import layer_tolerance, relative_error
from unilinattn.call.nested import mapped, tensors
from unilinattn.host.inputs import call_host
from unilinattn.host.observer import Functions

IDS = 4096
"""Largest number of ids that are embedded at once for the mean over a vocabulary."""


FILLS = ("where", "masked_fill")
"""Names of functions that put a number in the place of some ids."""


@dataclass(frozen=True)
class Lookup:
    """Turns each id into its vector: an embedding module, or a lookup in a table outside of such a module.

    Attributes:
        embed: returns the vectors of ids.
        rows: the number of ids that have a vector, None if it is unknown.
        source: the module or the table.
    """

    embed: Callable[[Int[Tensor, "batch token"]], Float[Tensor, "batch token channel"]]
    rows: int | None
    source: nn.Module | Tensor

    def mean(self, ids: Int[Tensor, "batch token"], rows: int) -> Float[Tensor, " channel"]:
        """Return the mean vector of the first `rows` ids, in float64; `ids` gives their dtype and device."""
        every = torch.arange(rows, dtype=ids.dtype, device=ids.device)
        return torch.stack([self.embed(chunk[None])[0].double().sum(0) for chunk in every.split(IDS)]).sum(0) / rows


class TokenIds:
    """The token ids in a run of a model: the argument, and tensors with the same numbers that functions made of it."""

    def __init__(self, ids: Int[Tensor, "batch length"]) -> None:
        """Begin with the argument."""
        self.shape = ids.shape
        self._tensors = [ids]
        # (token, batch), as of a host whose blocks have tokens before sequences.
        self._transposed: list[Tensor] = []
        self._looked_up_transposed = False

    def is_ids(self, value: Any) -> bool:
        """Tell whether a value holds the ids in their order; a part, such as one codebook, begins at the same place.

        Or it holds them by token, and then by sequence.
        """
        orders = (*self._tensors, *self._transposed)
        return isinstance(value, Tensor) and any(_views(value, ids) for ids in orders)

    def looks_up(self, function: Any, args: Sequence[Any], result: Any) -> bool:
        """Tell whether a call of a torch function looks the ids up in a table.

        Call it for every function of the run: a result with the numbers of the ids, as of a clamp or another dtype, is
        followed as the ids, also if one number takes the place of some, such as of those that mark an image.
        """
        if function is functional.embedding:
            if len(args) < 2 or not self.is_ids(args[0]):
                return False
            self._looked_up_transposed = any(_views(args[0], ids) for ids in self._transposed)
            return True
        if isinstance(result, Tensor) and not result.is_floating_point() and result.numel() == self.shape.numel():
            copies = any(map(self.is_ids, args)) and not self.is_ids(result)
            if copies and self._same_numbers(result, but_for_one=getattr(function, "__name__", "") in FILLS):
                self._tensors.append(result)
            elif copies and min(self.shape) > 1 and torch.equal(self._tensors[0].mT, result):
                self._transposed.append(result)
        return False

    def _same_numbers(self, result: Tensor, *, but_for_one: bool) -> bool:
        ids, numbers = self._tensors[0].flatten(), result.flatten()
        if torch.equal(ids, numbers):
            return True
        others = numbers[ids != numbers]
        return but_for_one and len(others) < len(ids) and bool((others == others[0]).all())

    def by_token(self, vectors: Float[Tensor, "*axes channel"]) -> Float[Tensor, "batch token channel"]:
        """Return vectors of the last lookup, whose ids a host may have flattened, by sequence and token."""
        if self._looked_up_transposed:
            return vectors.reshape(*self.shape[::-1], vectors.shape[-1]).transpose(0, 1).contiguous()
        return vectors.reshape(*self.shape, vectors.shape[-1])

    def as_looked_up(self, vectors: Float[Tensor, "batch token channel"], shape: torch.Size) -> Tensor:
        """Return vectors by sequence and token in the shape of the result of the last lookup."""
        return (vectors.transpose(0, 1) if self._looked_up_transposed else vectors).reshape(shape)


class Lookups:
    """The lookups of a model's token ids.

    An embedding module is the outermost module without a token-mixing layer that reads the ids alone and gives each id
    a vector that depends neither on its position nor on the other ids: an `nn.Embedding`, one that scales or norms its
    rows, one with an adapter beside it. Outside of such modules the calls of `torch.nn.functional.embedding` are
    lookups.

    Attributes:
        lookups: each lookup once, in order of the first calls.
        vectors: the vectors of the model's ids, one tensor for each lookup.
    """

    lookups: list[Lookup]
    vectors: list[Float[Tensor, "batch token channel"]]

    def __init__(self, model: nn.Module, arguments: Mapping[str, Any], layers: Iterable[str], name: str) -> None:
        """Run the model once; inside `isolated`.

        `layers` are the paths of the token-mixing layers, and `name` is that of the argument with the ids.
        """
        self.lookups, self.vectors, self._name = [], [], name
        mixing = {path.split("#")[0] + "." for path in layers}
        outside = [
            module
            for path, module in model.named_modules()
            if path and not any(x.startswith(f"{path}.") for x in mixing)
        ]
        reads = _Reads(TokenIds(arguments[name]))
        with _hooked(outside, reads.enter, reads.leave), Functions(reads.called):
            call_host(model, arguments)
        embedding = [read for read in reads.found if read.gives_own_vectors()]
        self._modules = {
            read.source: Lookup(read.embed, read.rows, read.source)
            for read in embedding
            if isinstance(read.source, nn.Module) and not any(other in embedding for other in read.inside)
        }
        for read in reads.found:
            is_lookup = isinstance(read.source, Tensor) or read.source in self._modules
            if not is_lookup or any(other.source in self._modules for other in read.inside):
                continue
            if read.vectors is not None and not any(_same(other.source, read.source) for other in self.lookups):
                self.lookups.append(Lookup(read.embed, read.rows, read.source))
                self.vectors.append(read.vectors)

    @contextmanager
    def replaced(
        self, arguments: Mapping[str, Any], vectors: Sequence[Float[Tensor, "run token channel"]]
    ) -> Iterator[None]:
        """Return other vectors, one tensor for each lookup, in runs of the model on `arguments`."""

        def replace(lookup: Lookup, result: Tensor, ids: TokenIds) -> Tensor:
            index = next(index for index, other in enumerate(self.lookups) if _same(other.source, lookup.source))
            # The host may write into the copy.
            return ids.as_looked_up(vectors[index], result.shape).to(result, copy=True)

        with self._intercepted(arguments, replace):
            yield

    @contextmanager
    def _intercepted(
        self, arguments: Mapping[str, Any], change: Callable[[Lookup, Tensor, TokenIds], Tensor]
    ) -> Iterator[None]:
        """Pass the result of every lookup of the ids among `arguments`, and these, through a function."""
        ids = TokenIds(arguments[self._name])
        open_modules: list[nn.Module] = []

        def in_table(func: Any, args: Any, kwargs: Any, result: Any) -> Any:
            if not ids.looks_up(func, args, result) or open_modules:
                return result
            table = args[1]
            return change(Lookup(lambda more: functional.embedding(more, table), len(table), table), result, ids)

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if _reads_only(ids, args, kwargs):
                open_modules.append(module)

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            if not _reads_only(ids, args, kwargs):
                return None
            open_modules.remove(module)
            return output if open_modules else change(self._modules[module], output, ids)

        with _hooked(self._modules, enter, leave), Functions(in_table):
            yield


@dataclass(eq=False)
class _Read:
    """A call of a module with the token ids as its only tensor, or a lookup of the ids in a table.

    Attributes:
        source: the module or the table.
        call: the arguments of the module.
        inside: the calls of modules of this kind that are running.
        output: what the call returned, if that is one vector for each id.
        vectors: the output by sequence and token.
        rows: the number of rows of the table, or the smallest one of those in which the module looked the ids up.
    """

    source: nn.Module | Tensor
    call: tuple[tuple[Any, ...], dict[str, Any]]
    inside: tuple["_Read", ...]
    output: Float[Tensor, "*axes channel"] | None = None
    vectors: Float[Tensor, "batch token channel"] | None = None
    rows: int | None = None

    def embed(self, ids: Int[Tensor, "batch token"]) -> Float[Tensor, "batch token channel"]:
        """Return the vectors of other ids."""
        if isinstance(self.source, Tensor):
            return functional.embedding(ids, self.source)
        args, kwargs = mapped(self.call, lambda t: ids.flatten() if t.ndim == 1 else ids)
        result: Tensor = self.source(*args, **kwargs)
        return result.reshape(*ids.shape, result.shape[-1])

    def gives_own_vectors(self) -> bool:
        """Tell whether a module gives each id one vector: the same at its position as twice in a sequence by itself."""
        if self.output is None or isinstance(self.source, Tensor):
            return False
        (ids,) = tensors(self.call)
        try:
            alone = self.embed(ids.reshape(-1, 1).repeat(1, 2))
        # The module may accept no sequences of two tokens.
        except Exception:
            return False
        expected = self.output.reshape(-1, 1, self.output.shape[-1]).expand(-1, 2, -1)
        return alone.shape == expected.shape and relative_error(alone, expected) <= layer_tolerance(alone.dtype)


class _Reads:
    """Records the calls of modules that read the token ids and no other tensor, and lookups of the ids in tables."""

    def __init__(self, ids: TokenIds) -> None:
        self._ids, self._open = ids, list[_Read]()
        self.found: list[_Read] = []

    def called(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """Note a lookup in a table."""
        if self._ids.looks_up(func, args, result):
            table = args[1]
            for read in self._open:
                read.rows = min(len(table), read.rows or len(table))
            self._note(_Read(table, ((), {}), tuple(self._open), rows=len(table)), result)
        return result

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note a call that reads the ids."""
        if _reads_only(self._ids, args, kwargs):
            self._open.append(_Read(module, (args, kwargs), tuple(self._open)))

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Note its output, if that is one vector for each id."""
        if _reads_only(self._ids, args, kwargs):
            self._note(self._open.pop(), output)

    def _note(self, read: _Read, output: Any) -> None:
        vectors = output if isinstance(output, Tensor) and output.is_floating_point() else None
        if vectors is not None and vectors.shape[:-1].numel() == self._ids.shape.numel():
            # The host may write into the output.
            read.output = vectors.detach().clone()
            read.vectors = self._ids.by_token(read.output)
        self.found.append(read)


def _reads_only(ids: TokenIds, args: Any, kwargs: Any) -> bool:
    read = list(tensors((args, kwargs)))
    return len(read) == 1 and ids.is_ids(read[0])


def _views(value: Tensor, ids: Tensor) -> bool:
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        # Inside `vmap` tensors have no storage.
        return False
    if value.data_ptr() != ids.data_ptr() or value.numel() != ids.numel() or value.dtype != ids.dtype:
        return False
    return value.is_contiguous() if value.shape != ids.shape else value.stride() == ids.stride()


def _same(source: nn.Module | Tensor, other: nn.Module | Tensor) -> bool:
    if isinstance(source, Tensor) and isinstance(other, Tensor):
        return source.data_ptr() == other.data_ptr()
    return source is other


@contextmanager
def _hooked(modules: Iterable[nn.Module], enter: Callable[..., None], leave: Callable[..., Any]) -> Iterator[None]:
    """Call functions before and after modules: they see the arguments and the output that the host's hooks changed."""
    with ExitStack() as handles:
        for module in modules:
            handles.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            handles.callback(module.register_forward_hook(leave, with_kwargs=True).remove)
        yield

"""The vectors of a model's token ids: where a run computes them, and their replacement in another run."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from unilinattn.call.exactness import relative_error
from unilinattn.tracing.inputs import call_host, token_ids
from unilinattn.tracing.nested import mapped, tensors
from unilinattn.tracing.trust import tolerance

IDS = 4096
"""Largest number of ids that are embedded at once for the mean over a vocabulary."""


@dataclass(frozen=True)
class Lookup:
    """A computation that gives each id a vector of its own: an embedding module, or a lookup in a table outside one.

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
        return torch.stack([self.embed(part[None])[0].double().sum(0) for part in every.split(IDS)]).sum(0) / rows


class Lookups:
    """The lookups of a model's token ids.

    An embedding module is the outermost module that reads the ids alone and gives each id a vector that depends neither
    on its position nor on the other ids: an `nn.Embedding`, one that scales or norms its rows, one with an adapter
    beside it. Outside of such modules the calls of `torch.nn.functional.embedding` are lookups.

    Attributes:
        lookups: each lookup once, in order of the first calls.
        vectors: the vectors of the model's ids, one tensor for each lookup.
    """

    lookups: list[Lookup]
    vectors: list[Float[Tensor, "batch token channel"]]

    def __init__(self, model: nn.Module, given: Mapping[str, Any]) -> None:
        """Run the model twice; inside `isolated`."""
        self.lookups, self.vectors = [], []
        self._model = model
        ids = _ids(given)
        reads = _Reads(ids)
        with reads.installed(model):
            call_host(model, given)
        embedding = [read for read in reads.found if read.gives_own_vectors(ids)]
        self._modules = {
            read.module: Lookup(read.embed, read.rows, read.module)
            for read in embedding
            if not any(other in embedding for other in read.inside)
        }
        with self._intercepted(given, self._record):
            call_host(model, given)

    @contextmanager
    def replaced(
        self, given: Mapping[str, Any], vectors: Sequence[Float[Tensor, "run token channel"]]
    ) -> Iterator[None]:
        """Return other vectors, one tensor for each lookup, in runs of the model on the arguments `given`."""

        def replace(lookup: Lookup, result: Tensor) -> Tensor:
            at = next(at for at, other in enumerate(self.lookups) if _same(other.source, lookup.source))
            # The host may write into the copy.
            return vectors[at].reshape(result.shape).to(result, copy=True)

        with self._intercepted(given, replace):
            yield

    def _record(self, lookup: Lookup, result: Tensor) -> Tensor:
        if not any(_same(other.source, lookup.source) for other in self.lookups):
            self.lookups.append(lookup)
            self.vectors.append(result.detach().clone())
        return result

    @contextmanager
    def _intercepted(self, given: Mapping[str, Any], change: Callable[[Lookup, Tensor], Tensor]) -> Iterator[None]:
        """Pass the result of every lookup of the ids among `given` through a function."""
        ids = _ids(given)
        open_modules: list[nn.Module] = []

        class Tables(TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = func(*args, **(kwargs or {}))
                if open_modules or not _looks_up(func, args, ids):
                    return result
                table = args[1]
                return change(Lookup(lambda more: functional.embedding(more, table), len(table), table), result)

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if _reads_only(ids, args, kwargs):
                open_modules.append(module)

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            if not _reads_only(ids, args, kwargs):
                return None
            open_modules.remove(module)
            return output if open_modules else change(self._modules[module], output)

        with _hooked(self._modules, enter, leave), Tables():
            yield


@dataclass(eq=False)
class _Read:
    """A call of a module with the token ids as its only tensor.

    Attributes:
        module: the module.
        call: its arguments.
        inside: the other calls of this kind that are running.
        output: what it returned.
        rows: the smallest number of rows of the tables in which it looked the ids up.
    """

    module: nn.Module
    call: tuple[tuple[Any, ...], dict[str, Any]]
    inside: tuple["_Read", ...]
    output: Any = None
    rows: int | None = None

    def embed(self, ids: Int[Tensor, "batch token"]) -> Tensor:
        """Call the module on other ids."""
        args, kwargs = mapped(self.call, lambda _: ids)
        result: Tensor = self.module(*args, **kwargs)
        return result

    def gives_own_vectors(self, ids: Int[Tensor, "batch token"]) -> bool:
        """Tell whether each id has one vector, at other positions and beside other ids too."""
        first = self.output
        if not isinstance(first, Tensor) or not first.is_floating_point() or first.shape[:-1] != ids.shape:
            return False
        # Smaller ids are in the vocabulary.
        others = torch.where(ids > 0, ids - 1, ids + 1)
        try:
            moved = self.embed(torch.cat([others, ids], 1))[:, ids.shape[1] :]
        # The module may have positions for the given ids only.
        except Exception:
            return False
        return moved.shape == first.shape and relative_error(moved, first) <= tolerance(first.dtype)


class _Reads(TorchFunctionMode):
    """Records the calls of modules that read the token ids and no other tensor."""

    def __init__(self, ids: Int[Tensor, "batch token"]) -> None:
        super().__init__()
        self._ids, self._open = ids, list[_Read]()
        self.found: list[_Read] = []

    @contextmanager
    def installed(self, model: nn.Module) -> Iterator[None]:
        """Record during the runs of a model."""
        with _hooked(model.modules(), self._enter, self._leave), self:
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _looks_up(func, args, self._ids):
            for read in self._open:
                read.rows = min(len(args[1]), read.rows or len(args[1]))
        return func(*args, **(kwargs or {}))

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if _reads_only(self._ids, args, kwargs):
            self._open.append(_Read(module, (args, kwargs), tuple(self._open)))

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if _reads_only(self._ids, args, kwargs):
            read = self._open.pop()
            read.output = output.detach().clone() if isinstance(output, Tensor) else None
            self.found.append(read)


def _ids(given: Mapping[str, Any]) -> Int[Tensor, "batch token"]:
    ids = token_ids(given)
    assert ids is not None
    return ids


def _looks_up(function: Any, args: Any, ids: Tensor) -> bool:
    return function is functional.embedding and len(args) > 1 and _is(args[0], ids)


def _reads_only(ids: Tensor, args: Any, kwargs: Any) -> bool:
    read = list(tensors((args, kwargs)))
    return len(read) == 1 and _is(read[0], ids)


def _is(value: Tensor, ids: Tensor) -> bool:
    """Tell whether a tensor holds the ids; a part of them, such as one codebook, may begin at the same place."""
    return value.data_ptr() == ids.data_ptr() and value.numel() == ids.numel()


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

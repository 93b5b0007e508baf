"""`Source` of a stream's vectors, and the inputs that reach the output beside those of all streams."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unilinattn.call.nested import tensors
from unilinattn.errors import UncoveredError
from unilinattn.host.indices import checked_indices
from unilinattn.host.inputs import call_host, ids_name
from unilinattn.host.isolation import runs_in_gradient_mode
from unilinattn.host.logits import logits_in
from unilinattn.host.run import run
from unilinattn.host.vectors import vectors_in
from unilinattn.tracing.changed_inputs import changed_input, has_numbers, mixed_channels
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.lookups import Lookups
from unilinattn.tracing.token_streams import TokenStream
from unilinattn.tracing.tokens import TokenArgument, TokenCall, replaced_at_call


@dataclass(frozen=True)
class Source:
    """Where the tokens of a stream get their vectors.

    Attributes:
        stream: the stream.
        origin: the call or the argument that has the vectors; None for the lookups of `ids`.
        ids: the name of the argument with the ids of the tokens, for lookups.
    """

    stream: TokenStream
    origin: TokenCall | TokenArgument | None
    ids: str | None = None


STRUCTURE = ("mask", "position", "type", "label", "size", "shape", "length", "grid", "thw", "index", "indices", "ratio")
"""Parts of the names of whole numbers that say where and how large an input is, but not what it is."""

STRUCTURE_WORDS = {
    *("pos", "bbox", "box", "boxes", "xpath", "alignment", "lang", "langs", "language", "languages", "speaker"),
    *("seg", "segment", "segments", "turn", "turns", "time", "timestep", "timesteps", "step", "steps"),
    *("count", "counts"),
}
"""Words between underscores that say so too."""

ROUNDING = 1000
"""Largest change of the numbers of a host that repeats them inexactly, in units of the machine epsilon."""

Read = Callable[[Any], list[Any]]
"""Returns the tensors of a model's output that are explained."""

Hold = Callable[[Mapping[str, Any]], AbstractContextManager[object]]
"""Makes the vectors of the tokens those of the traced inputs in a run on changed arguments."""


@runs_in_gradient_mode(False)
def require_alone(
    model: nn.Module, arguments: Mapping[str, Any], sources: Sequence[Source], layers: Sequence[Layer], read: Read
) -> None:
    """Raise `UncoveredError` if another input reaches what `read` returns of the output beside the tokens' vectors."""
    if reaching := list(inputs_beside(model, arguments, sources, layers, read)):
        verb = "reaches" if len(reaching) == 1 else "reach"
        raise UncoveredError(
            f"{' and '.join(reaching)} {verb} the output of {type(model).__name__} beside the vectors of its tokens, "
            "and shares are those of these vectors."
        )


def inputs_beside(
    model: nn.Module, arguments: Mapping[str, Any], sources: Sequence[Source], layers: Sequence[Layer], read: Read
) -> Iterator[str]:
    """Yield the inputs that change what `read` returns of the output although the tokens' vectors are held."""
    names_of_sources = {source.ids or getattr(source.origin, "name", None) for source in sources}
    others = {name: value for name, value in arguments.items() if name not in names_of_sources}
    # A model may call its ids otherwise, and write as many tokens.
    main = ids_name(arguments)
    names = [name for name, value in others.items() if name == main or _is_content(name, value)]
    if not names:
        return
    hold = _hold(model, arguments, layers, sources)
    before = _run(model, dict(arguments), hold, read)
    rounding: int | None = None
    for name in names:
        after = _run(model, changed_input(model, arguments, name), hold, read)
        if after is None and (mixed := mixed_channels(arguments[name])) is not None:
            # Some channels may be places, as in flattened patches: then their numbers are those of other tokens.
            after = _run(model, {**arguments, name: mixed}, hold, read)
        # The effect of the tokens may be as small as any that is more than rounding.
        if not _reaches(before, after, arguments[name]):
            continue
        if rounding is None:
            repeated = _run(model, dict(arguments), hold, read)
            # The host may repeat its numbers inexactly.
            rounding = ROUNDING if _reaches(before, repeated, None) else 0
        if not rounding or _reaches(before, after, arguments[name], rounding):
            yield name


def are_alone(
    model: nn.Module, arguments: Mapping[str, Any], sources: Sequence[Source], layers: Sequence[Layer], read: Read
) -> bool:
    """Tell whether no other input changes what `read` returns of the output while the tokens' vectors are held."""
    return next(inputs_beside(model, arguments, sources, layers, read), None) is None


def _is_content(name: str, value: Any) -> bool:
    """Tell whether an argument may carry content: numbers or codes, but no mask, no size and no place of a token.

    Of whole numbers, such as 0, 1, 2, only the name tells places from codes.
    """
    arrays = [t for t in tensors(value) if t.numel()]
    if not arrays:
        return False
    if any(t.is_floating_point() or t.is_complex() for t in arrays):
        return not ("mask" in name and all(map(_is_mask, arrays)))
    return not (is_structure(name) or all(t.ndim < 2 or t.dtype == torch.bool for t in arrays))


def is_structure(name: str) -> bool:
    """Tell whether the name of whole numbers says that they are no content, such as positions."""
    return any(word in name for word in STRUCTURE) or not STRUCTURE_WORDS.isdisjoint(name.lower().split("_"))


def _is_mask(t: Tensor) -> bool:
    """Tell whether numbers are 0 and 1, or 0 and large negative ones that are added to scores."""
    return bool(((t == 0) | (t == 1) | (t < -1000)).all())


def explained_numbers(output: Any) -> list[Any]:
    """Return the logits, or every tensor but losses of an output without logits."""
    logits = logits_in(output)
    if logits is not None:
        return [logits]
    return list(
        tensors({k: v for k, v in output.items() if "loss" not in k} if isinstance(output, Mapping) else output)
    )


@dataclass(frozen=True)
class ExplainedVectors:
    """Returns the vectors of an output without logits, whose length is explained by default, and logits of another.

    Attributes:
        tokens: the (batch, length) that a target counts.
    """

    tokens: tuple[int, int]

    def __call__(self, output: Any) -> list[Any]:
        """Return the tensor that is explained by default, none for an output without numbers."""
        logits, vectors = logits_in(output), vectors_in(output, self.tokens)
        if logits is not None:
            return [logits]
        return [] if vectors is None else [vectors[1]]


def _run(model: nn.Module, arguments: dict[str, Any], hold: Hold, read: Read) -> list[Tensor] | None:
    """Return what a run computes, None if it fails."""
    try:
        with checked_indices(model):
            values = run(
                model, lambda: read(call_host(model, arguments)), observer=hold(arguments), seed=torch.get_rng_state()
            )
    # The model may accept no other image or code.
    except Exception:
        return None
    return [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]


def _reaches(before: list[Tensor] | None, after: list[Tensor] | None, changed: Any, rounding: int = 0) -> bool:
    """Tell whether an input reaches the output; one that cannot be changed does if it is no code, such as a size.

    Changes of `rounding` times the machine epsilon do not count.
    """
    if before is None or after is None:
        return has_numbers(changed)
    return len(before) != len(after) or any(_moved(a, b, rounding) for a, b in zip(before, after, strict=True))


def _moved(before: Tensor, after: Tensor, rounding: int) -> bool:
    """Tell whether a number changed by more than rounding; some logits may be a large constant."""
    if before.shape != after.shape:
        return True
    allowed = rounding * torch.finfo(before.dtype).eps
    scale = torch.maximum(before.abs(), before.abs().nan_to_num(posinf=0).flatten().median())
    same = (before == after) | (before.isnan() & after.isnan())
    return not bool((same | ((before - after).abs() <= allowed * scale)).all())


def _hold(model: nn.Module, traced: Mapping[str, Any], layers: Sequence[Layer], sources: Sequence[Source]) -> Hold:
    """Return what holds the tokens' vectors; an argument with them, or with ids, does not change."""
    names = [layer.name for layer in layers]
    ids = [source.ids for source in sources if source.ids is not None]
    lookups: dict[str, Lookups] = {}
    if ids:
        lookups = run(model, lambda: {name: Lookups(model, traced, names, name) for name in ids})

    @contextmanager
    def hold(arguments: Mapping[str, Any]) -> Iterator[None]:
        with ExitStack() as stack:
            for source in sources:
                if source.ids is not None:
                    each = lookups[source.ids]
                    stack.enter_context(each.replaced(arguments, each.vectors))
                elif isinstance(source.origin, TokenCall):
                    stack.enter_context(replaced_at_call(source.origin, source.origin.vectors))
            yield

    return hold

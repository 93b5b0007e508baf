"""Where a model's tokens get their vectors, such that no other input reaches its output beside them."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn

from unilinattn.call.nested import mapped, tensors
from unilinattn.errors import UncoveredError
from unilinattn.host.inputs import call_host, token_ids
from unilinattn.host.isolation import runs_in_gradient_mode
from unilinattn.host.logits import logits_in
from unilinattn.host.observer import Functions
from unilinattn.host.run import run
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.lookups import Lookups
from unilinattn.tracing.perturbation import TOLERANCE
from unilinattn.tracing.tokens import TokenCall, find_tokens, require_own_tokens

Source = TokenCall | str | None
"""The call whose result enters the first block as the tokens, the name of the argument, or None for lookups of ids."""

STRUCTURE = ("mask", "position", "type", "label", "size", "shape", "length", "grid", "thw", "index", "indices")
"""Words in the names of whole numbers that say where and how large an input is, but not what it is."""

Read = Callable[[Any], list[Any]]
"""Returns the tensors of a model's output that are explained."""

Hold = Callable[[Mapping[str, Any]], AbstractContextManager[object]]
"""Makes the vectors of the tokens those of the traced inputs in a run on changed arguments."""


@runs_in_gradient_mode(False)
def find_source(model: nn.Module, arguments: Mapping[str, Any], layers: Sequence[Layer]) -> Source:
    """Return the source of the tokens' vectors: the lookups of their ids, or what enters the first block.

    The latter if there are no ids, and if another input, such as an image, gives some tokens their vectors. Runs of the
    model with those inputs perturbed and the tokens' vectors held tell what else reaches its logits.

    Raises `UncoveredError` if another input reaches the logits beside the tokens, since its part in them would stand in
    the bias, and the errors of `find_tokens`.
    """
    ids = token_ids(arguments)
    # Of several streams the last one may read all others, as a text with patches in place of some of its tokens does.
    streams = [layers_of_stream(layers, last) for last in (True, False)]
    if streams[0] != list(layers):
        batch = next((t.shape[0] for t in (ids, *tensors(arguments)) if t is not None and t.ndim), None)
        for stream in (stream for stream in streams if stream[0].output.shape[0] == batch):
            with suppress(UncoveredError):
                source = find_tokens(model, arguments, stream)
                require_alone(model, arguments, source, layers, _explained)
                return source
    require_own_tokens(model, arguments, ids, layers)
    if ids is not None and not _reaching(model, arguments, None, layers, _explained):
        return None
    source = find_tokens(model, arguments, layers)
    require_alone(model, arguments, source, layers, _explained)
    return source


def layers_of_stream(layers: Sequence[Layer], last: bool) -> list[Layer]:
    """Return the layers that have as many sequences and tokens as the last one, or as the first one."""
    shape = layers[-1 if last else 0].output.shape[:2]
    return [layer for layer in layers if layer.output.shape[:2] == shape]


@runs_in_gradient_mode(False)
def require_alone(
    model: nn.Module, arguments: Mapping[str, Any], source: Source, layers: Sequence[Layer], read: Read
) -> None:
    """Raise `UncoveredError` if another input reaches what `read` returns of the output beside the tokens' vectors."""
    reaching = _reaching(model, arguments, source, layers, read)
    if reaching:
        verb = "reaches" if len(reaching) == 1 else "reach"
        raise UncoveredError(
            f"{' and '.join(reaching)} {verb} the output of {type(model).__name__} beside the vectors of its tokens, "
            "and shares are those of these vectors."
        )


@runs_in_gradient_mode(False)
def find_vectors(model: nn.Module, arguments: Mapping[str, Any], layers: Sequence[Layer]) -> Source:
    """Return the source of the vectors of the last layer's tokens, whatever else reaches the output.

    Raises the errors of `find_tokens`.
    """
    stream = layers_of_stream(layers, True)
    if token_ids(arguments) is not None and not _reaching(model, arguments, None, layers, _explained):
        return None
    return find_tokens(model, arguments, stream)


def _reaching(
    model: nn.Module, arguments: Mapping[str, Any], source: Source, layers: Sequence[Layer], read: Read
) -> list[str]:
    """Return the inputs that change what `read` returns of the output although the tokens' vectors are held."""
    ids = token_ids(arguments) if source is None else None
    shape = layers[-1].output.shape[:2]
    others = {name: value for name, value in arguments.items() if value is not ids and name != source}
    names = [name for name, value in others.items() if _is_content(name, value, shape)]
    if not names:
        return []
    hold = _hold(model, arguments, layers, source)
    before = _run(model, dict(arguments), hold, read)
    return [
        name for name in names if _reaches(before, _run(model, _changed(arguments, name), hold, read), arguments[name])
    ]


def _is_content(name: str, value: Any, shape: torch.Size) -> bool:
    """Tell whether an argument may carry content: numbers or codes, but no mask, no size and no place of a token.

    `shape` is (batch, length) of the tokens; whole numbers for each of them say where it is, or of which type.
    """
    arrays = [t for t in tensors(value) if t.numel()]
    if not arrays:
        return False
    if any(t.is_floating_point() or t.is_complex() for t in arrays):
        return not ("mask" in name and all(map(_is_mask, arrays)))
    if any(word in name for word in STRUCTURE) or all(t.ndim < 2 or t.dtype == torch.bool for t in arrays):
        return False
    return name.endswith("input_ids") or not all(t.shape[:2] == shape for t in arrays)


def _is_mask(t: Tensor) -> bool:
    """Tell whether numbers are 0 and 1, or 0 and large negative ones that are added to scores."""
    return bool(((t == 0) | (t == 1) | (t < -1000)).all())


def _explained(output: Any) -> list[Any]:
    """Return the logits, or every tensor but losses of an output without logits."""
    logits = logits_in(output)
    if logits is not None:
        return [logits]
    return list(
        tensors({k: v for k, v in output.items() if "loss" not in k} if isinstance(output, Mapping) else output)
    )


def _run(model: nn.Module, arguments: dict[str, Any], hold: Hold, read: Read) -> list[Tensor] | None:
    """Return what a run computes, None if it fails."""
    try:
        values = run(
            model, lambda: read(call_host(model, arguments)), observer=hold(arguments), seed=torch.get_rng_state()
        )
    # The model may accept no other image or code.
    except Exception:
        return None
    return [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]


def _reaches(before: list[Tensor] | None, after: list[Tensor] | None, changed: Any) -> bool:
    """Tell whether an input reaches the output; one that cannot be changed does if it is no code, such as a size."""
    if before is None or after is None:
        return any(t.is_floating_point() for t in tensors(changed))
    return len(before) != len(after) or any(map(_moved, before, after))


def _moved(before: Tensor, after: Tensor) -> bool:
    """Tell whether a number changed by more than rounding; some logits may be a large constant."""
    if before.shape != after.shape:
        return True
    allowed = TOLERANCE.get(before.dtype, torch.finfo(before.dtype).eps)
    scale = torch.maximum(before.abs(), before.abs().nan_to_num(posinf=0).flatten().median())
    same = (before == after) | (before.isnan() & after.isnan())
    return not bool((same | ((before - after).abs() <= allowed * scale)).all())


def _changed(arguments: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {**arguments, name: mapped(arguments[name], _perturbed)}


def _perturbed(t: Tensor) -> Tensor:
    """Return numbers with noise of their root mean square, or other codes of the same vocabulary."""
    if not t.is_floating_point() and not t.is_complex():
        return t if t.dtype == torch.bool else torch.where(t > 0, t - 1, t + 1)
    if t.is_complex():
        return torch.complex(_perturbed(t.real), _perturbed(t.imag))
    wide = t.to(torch.promote_types(t.dtype, torch.float32))
    size = wide.square().mean().sqrt()
    noise = torch.randn(t.shape, generator=torch.Generator().manual_seed(0)).to(wide)
    return (wide + torch.where(size > 0, size, torch.ones_like(size)) * noise).to(t.dtype)


def _hold(model: nn.Module, traced: Mapping[str, Any], layers: Sequence[Layer], source: Source) -> Hold:
    """Return what holds the tokens' vectors; an argument with them, or with ids, does not change."""
    if isinstance(source, str):
        return lambda arguments: nullcontext()
    if source is not None:
        return lambda arguments: replaced_at_call(source, source.vectors)
    lookups: Lookups = run(model, lambda: Lookups(model, traced, [layer.name for layer in layers]))
    return lambda arguments: lookups.replaced(arguments, lookups.vectors)


def at_call(call: TokenCall, change: Callable[[Tensor], Tensor]) -> Functions:
    """Pass the result of the call that returns the tokens' vectors through a function, in one run."""
    is_call = call.finder()
    return Functions(lambda func, args, kwargs, result: change(result) if is_call(func, result) else result)


def replaced_at_call(call: TokenCall, vectors: Tensor) -> Functions:
    """Replace the result of the call that returns the tokens' vectors, in one run."""
    # The host may write into the copy.
    return at_call(call, lambda result: vectors.reshape(result.shape).to(result, copy=True))

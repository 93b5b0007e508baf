"""Where a model's tokens get their vectors, such that no other input reaches its output beside them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from unilinattn.errors import UncoveredError
from unilinattn.tracing.inputs import call_host, token_ids
from unilinattn.tracing.isolation import in_gradient_mode, isolated, with_own_random_numbers
from unilinattn.tracing.layer import Layer
from unilinattn.tracing.logits import logits_in
from unilinattn.tracing.lookups import Lookups
from unilinattn.tracing.nested import mapped, tensors
from unilinattn.tracing.perturbation import TOLERANCE
from unilinattn.tracing.tokens import TokenCall, find_tokens, require_own_tokens
from unilinattn.tracing.wrappers import plain_run

Source = TokenCall | str | None
"""The call whose result enters the first block as the tokens, the name of the argument, or None for lookups of ids."""

Hold = Callable[[dict[str, Any]], AbstractContextManager[object]]
"""Makes the vectors of the tokens those of the traced inputs in a run on changed arguments."""


def find_source(model: nn.Module, given: Mapping[str, Any], layers: Sequence[Layer]) -> Source:
    """Return the source of the tokens' vectors: the lookups of their ids, or what enters the first block.

    The latter if there are no ids, and if another input, such as an image, gives some tokens their vectors. Runs of the
    model with those inputs perturbed and the tokens' vectors held tell what else reaches its output.

    Raises `UncoveredError` if another input reaches the output beside the tokens, since its part in a logit would stand
    in the bias, and the errors of `find_tokens`.
    """
    ids = token_ids(given)
    require_own_tokens(model, given, ids, layers)
    return in_gradient_mode(False, lambda: _find(model, given, layers, ids))


def _find(model: nn.Module, given: Mapping[str, Any], layers: Sequence[Layer], ids: Tensor | None) -> Source:
    others = [name for name, value in given.items() if value is not ids and _is_content(name, value)]
    if ids is not None and (not others or not _reaching(model, given, others, _lookups(model, given))):
        return None
    source = find_tokens(model, given, layers)
    others = [name for name in others if name != source]
    reaching = _reaching(model, given, others, partial(_held, source, given)) if others else []
    if reaching:
        listed = " and ".join(reaching)
        verb = "reaches" if len(reaching) == 1 else "reach"
        raise UncoveredError(
            f"{listed} {verb} the output of {type(model).__name__} beside the vectors that enter its first block, and "
            "shares are those of these vectors."
        )
    return source


def _is_content(name: str, value: Any) -> bool:
    """Tell whether an argument may carry content: numbers, or the ids of other tokens, but no mask and no positions."""
    if "mask" in name or name.endswith("position_ids"):
        return False
    floating = any(t.is_floating_point() for t in tensors(value))
    return floating or (name.endswith("input_ids") and any(True for _ in tensors(value)))


def _reaching(model: nn.Module, given: Mapping[str, Any], names: Sequence[str], hold: Hold) -> list[str]:
    """Return the arguments that change the output although the tokens' vectors are held."""
    before = _run(model, dict(given), hold)
    together = _run(model, {**given, **{name: mapped(given[name], _perturbed) for name in names}}, hold)
    if len(names) == 1 or not _differ(before, together):
        return list(names) if _differ(before, together) else []
    alone = {name: _run(model, {**given, name: mapped(given[name], _perturbed)}, hold) for name in names}
    return [name for name, after in alone.items() if _differ(before, after)] or list(names)


def _run(model: nn.Module, given: dict[str, Any], hold: Hold) -> list[Tensor] | None:
    """Return the logits of a run, or every tensor of an output without logits; None for a run that fails."""

    def run() -> Any:
        with plain_run(model), hold(given):
            return call_host(model, given)

    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    try:
        output = with_own_random_numbers(devices, lambda: isolated(model, run))
    # The model may accept no other image or id: then nobody knows what they reach.
    except (RuntimeError, ValueError, IndexError, AssertionError):
        return None
    logits = logits_in(output)
    return [t for t in tensors(output) if t.is_floating_point()] if logits is None else [logits]


def _differ(before: list[Tensor] | None, after: list[Tensor] | None) -> bool:
    if before is None or after is None or len(before) != len(after):
        return True
    return any(map(_moved, before, after))


def _moved(before: Tensor, after: Tensor) -> bool:
    if before.shape != after.shape:
        return True
    kept = before.isfinite()
    allowed = TOLERANCE.get(before.dtype, 0.05) * before[kept].abs().amax() if bool(kept.any()) else 0
    return not torch.equal(kept, after.isfinite()) or bool(((before - after)[kept].abs() > allowed).any())


def _perturbed(t: Tensor) -> Tensor:
    """Return numbers with noise of their root mean square, or other ids of the same vocabulary."""
    if not t.is_floating_point():
        return torch.where(t > 0, t - 1, t + 1)
    wide = t.to(torch.promote_types(t.dtype, torch.float32))
    size = wide.square().mean().sqrt()
    noise = torch.randn(t.shape, generator=torch.Generator().manual_seed(0)).to(wide)
    return (wide + torch.where(size > 0, size, torch.ones_like(size)) * noise).to(t.dtype)


def _lookups(model: nn.Module, given: Mapping[str, Any]) -> Hold:
    """Return what holds the vectors of the ids; a model may read the ids themselves too, which do not change."""

    def find() -> Lookups:
        with plain_run(model):
            return Lookups(model, given)

    lookups = isolated(model, find)
    return lambda arguments: lookups.replaced(arguments, lookups.vectors)


@contextmanager
def _held(source: TokenCall | str, given: Mapping[str, Any], arguments: dict[str, Any]) -> Iterator[None]:
    if isinstance(source, str):
        arguments[source] = given[source]
        yield
        return
    with AtCall(source, source.vectors):
        yield


class AtCall(TorchFunctionMode):
    """Records the result of the call that returns the tokens' vectors, or replaces it.

    Attributes:
        vectors: the recorded result.
    """

    vectors: Tensor | None

    def __init__(self, place: TokenCall, replacement: Tensor | None) -> None:
        """Prepare for one run; None records."""
        super().__init__()
        self._is_place, self._replacement = place.finder(), replacement
        self.vectors = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, and return its result or the replacement."""
        result = func(*args, **(kwargs or {}))
        if not self._is_place(func, result):
            return result
        if self._replacement is None:
            self.vectors = result.detach().clone()
            return result
        # The host may write into the copy.
        return self._replacement.reshape(result.shape).to(result, copy=True)

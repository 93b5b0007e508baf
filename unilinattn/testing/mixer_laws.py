"""Laws of every core mixer, for any algebra; each raises `LawViolation` with its name."""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.call.exactness import tolerance
from unilinattn.mixers import CoreMixer
from unilinattn.testing.checks import fresh, matrix_free, require, require_close, require_identity, require_unmoved


def apply_is_the_matrix(mixer: CoreMixer, limit: float) -> None:
    """Check `apply` against the matrix: A v = materialize() @ v."""
    value = _value(mixer, seed=1)
    expected = torch.einsum("bhij,bjhp->bihp", mixer.materialize(), value)
    require_close("apply", mixer.apply(value), expected, limit, "apply(v) against materialize() @ v")


def adjoint_is_the_transpose(mixer: CoreMixer, limit: float) -> None:
    """Check <A v, g> = <v, A* g>, and `adjoint` against the transposed matrix."""
    value, grad = _value(mixer, seed=2), _grad(mixer, seed=3)
    mixed, passed = mixer.apply(value), mixer.adjoint(grad)
    require_identity(mixed, grad, value, passed, limit, "<A v, g> against <v, A* g>")
    expected = torch.einsum("bhij,bihp->bjhp", mixer.materialize(), grad)
    require_close("adjoint", passed, expected, limit, "adjoint(g) against the transposed matrix")


def tile_is_a_slice(mixer: CoreMixer, limit: float) -> None:
    """Check `tile` against slices of the matrix, also empty and stepped ones."""
    whole = mixer.materialize()
    require("tile", whole.shape == torch.Size(mixer.shape), f"materialize() has shape {tuple(whole.shape)}.")
    _, heads, queries, keys = mixer.shape
    everything = slice(None)
    blocks = [
        (slice(0, 1), everything, everything),
        (everything, slice(keys - 1, keys), everything),
        (slice(queries // 3, queries), slice(0, keys // 2 + 1), slice(0, 1)),
        (slice(None, None, 2), slice(1, None, 3), slice(heads // 2, heads)),
        (slice(0, 0), everything, everything),
        (slice(-2, None), everything, slice(None, None, 2)),
    ]
    for rows, cols, of in blocks:
        expected = whole[:, of, rows, cols]
        scale = whole.flatten(1).norm(dim=1)
        what = f"tile({_show(rows)}, {_show(cols)}, {_show(of)}) against the same slice of the matrix"
        require_close("tile", mixer.tile(rows, cols, of), expected, limit, what, scale=scale)


def rows_are_slices(mixer: CoreMixer, limit: float) -> None:
    """Check `rows` against the matrix, with different rows for each sequence."""
    batch, heads, queries, keys = mixer.shape
    whole = mixer.materialize()
    index = torch.stack(
        [torch.tensor([0, queries - 1, (b + 1) % queries, queries // 2], device="cpu") for b in range(batch)]
    )
    index = index.to(whole.device)
    expected = whole.gather(2, index[:, None, :, None].expand(batch, heads, -1, keys))
    require_close("rows", mixer.rows(index), expected, limit, "rows(index) against the matrix")


def diagonal_is_the_diagonal(mixer: CoreMixer, limit: float) -> None:
    """Check `diagonal` against the diagonal of the matrix, per head."""
    expected = mixer.materialize().diagonal(dim1=-2, dim2=-1)
    require_close("diagonal", mixer.diagonal(), expected, limit, "diagonal() against the matrix's diagonal")


def causal_mixer(mixer: CoreMixer, limit: float) -> None:
    """Check, bit for bit, that later tokens change no earlier output of a mixer with `causal`.

    The matrix must be exactly zero above the diagonal. If `apply` uses a Fourier transform, later tokens may change
    earlier outputs by rounding.
    """
    if not mixer.causal:
        return
    above = mixer.materialize().triu(1)
    require("causality", bool((above == 0).all()), "the matrix has weights above the diagonal.")
    length = mixer.shape[3]
    for cut in {1, length // 2, length - 1} - {0, length}:
        value, other = _value(mixer, seed=4), _value(mixer, seed=5)
        changed = torch.cat([value[:, :cut], other[:, cut:]], dim=1)
        earlier = partial(_part, mixer.apply, slice(cut))
        require_unmoved(earlier, value, changed, limit, "apply: tokens later")
        grad, later = _grad(mixer, seed=6), _grad(mixer, seed=7)
        changed = torch.cat([later[:, :cut], grad[:, cut:]], dim=1)
        after = partial(_part, mixer.adjoint, slice(cut, None))
        require_unmoved(after, grad, changed, limit, "adjoint: tokens earlier")


def passes_fill_no_matrix(mixer: CoreMixer, limit: float) -> None:
    """Check that `apply`, `adjoint` and `rows` call neither `tile` nor `materialize`."""
    free = matrix_free(mixer, "matrix-free")
    free.apply(_value(mixer, seed=8))
    free.adjoint(_grad(mixer, seed=9))
    free.rows(torch.zeros(mixer.shape[0], 1, dtype=torch.long, device=mixer.diagonal().device))


MIXER_LAWS: Mapping[str, Callable[[CoreMixer, float], None]] = {
    "apply": apply_is_the_matrix,
    "adjoint": adjoint_is_the_transpose,
    "tile": tile_is_a_slice,
    "rows": rows_are_slices,
    "diagonal": diagonal_is_the_diagonal,
    "causality": causal_mixer,
    "matrix-free": passes_fill_no_matrix,
}
"""Laws of a single mixer, by name."""


def check_mixer(mixer: CoreMixer) -> None:
    """Check a mixer against every law in `MIXER_LAWS`, to the tolerance of its dtype.

    Raises `LawViolation` at the first law that does not hold.
    """
    limit, whole = tolerance("law", mixer.diagonal().dtype), mixer.materialize()
    filled = copy.copy(mixer)
    # Every law needs the matrix, so it is filled once.
    vars(filled).update(materialize=lambda: whole)
    for law in MIXER_LAWS.values():
        law(filled, limit)


def batch_is_a_loop(mixer: CoreMixer, singles: Sequence[CoreMixer], limit: float) -> None:
    """Check a mixer against the mixers of its single sequences: no sequence affects another."""
    value, grad = _value(mixer, seed=10), _grad(mixer, seed=11)
    for name, whole, results in [
        ("apply", mixer.apply(value), [m.apply(value[b : b + 1]) for b, m in enumerate(singles)]),
        ("adjoint", mixer.adjoint(grad), [m.adjoint(grad[b : b + 1]) for b, m in enumerate(singles)]),
        ("materialize", mixer.materialize(), [m.materialize() for m in singles]),
        ("diagonal", mixer.diagonal(), [m.diagonal() for m in singles]),
    ]:
        require_close("batch", whole, torch.cat(results), limit, f"{name} of a batch against the single sequences")


def gradients_are_finite(build: Callable[..., CoreMixer], factors: Mapping[str, Tensor]) -> None:
    """Check that every operation of `build(**factors)` has finite values, and finite gradients in every factor."""
    for name, operation in {
        "apply": lambda m: m.apply(_value(m, seed=12)),
        "adjoint": lambda m: m.adjoint(_grad(m, seed=13)),
        "rows": lambda m: m.rows(torch.zeros(m.shape[0], 1, dtype=torch.long, device="cpu")),
        "materialize": lambda m: m.materialize(),
        "diagonal": lambda m: m.diagonal(),
    }.items():
        copies = {key: factor.detach().clone() for key, factor in factors.items()}
        leaves = {key: made.requires_grad_() for key, made in copies.items() if made.is_floating_point()}
        result = operation(build(**copies))
        require("gradient", bool(torch.isfinite(result).all()), f"{name} returns numbers that are not finite.")
        # The gradient of the sum, because that of a square would overflow where the result does not.
        grads = torch.autograd.grad(result.sum(), list(leaves.values()), allow_unused=True)
        bad = [key for key, g in zip(leaves, grads, strict=True) if g is not None and not torch.isfinite(g).all()]
        require("gradient", not bad, f"the gradient of {name} in {bad} is not finite.")


def _part(run: Callable[[Tensor], Tensor], tokens: slice, x: Tensor) -> Tensor:
    return run(x)[:, tokens]


def _value(mixer: CoreMixer, seed: int) -> Float[Tensor, "batch key head channel"]:
    batch, heads, _, keys = mixer.shape
    return fresh(mixer.diagonal().new_empty(batch, keys, heads, 3), seed)


def _grad(mixer: CoreMixer, seed: int) -> Float[Tensor, "batch query head channel"]:
    batch, heads, queries, _ = mixer.shape
    return fresh(mixer.diagonal().new_empty(batch, queries, heads, 3), seed)


def mixer_passes(mixer: CoreMixer) -> dict[str, Callable[[], Tensor]]:
    """Return the passes that are linear in time if the mixer's structure allows, as calls on fresh inputs, by name."""
    value, grad = _value(mixer, seed=14), _grad(mixer, seed=15)
    index = torch.zeros(mixer.shape[0], 1, dtype=torch.long, device=value.device)
    return {
        "apply": lambda: mixer.apply(value),
        "adjoint": lambda: mixer.adjoint(grad),
        "rows": lambda: mixer.rows(index),
    }


def _show(index: slice) -> str:
    start, stop = ("" if bound is None else str(bound) for bound in (index.start, index.stop))
    return f"{start}:{stop}" + ("" if index.step is None else f":{index.step}")

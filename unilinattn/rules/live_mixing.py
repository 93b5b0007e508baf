"""Rules of `rules.live` for functions that multiply values by a matrix."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from unilinattn.mixers.base import checked_factors
from unilinattn.rules.forms import carried


def _addmm(mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    names = ("input", "mat1", "mat2", "batch1", "batch2")
    x, left, right = (*args, *(kwargs.pop(name) for name in names if name in kwargs))
    if not (carried(left) and carried(right)):
        return func(x, left, right, **kwargs)
    product = mode.product(torch.matmul, (left, right), {})
    return torch.add(x * kwargs.get("beta", 1), product, alpha=kwargs.get("alpha", 1))


def _attention(
    mode: Any,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    # Scores are linear in the query and in the key, which share the matrix; a mask that is added to them has all of it.
    part = 0.5 if query.requires_grad and key.requires_grad else 1.0
    query, key = (mode.weighted(x, "matrix", part) if x.requires_grad else x for x in (query, key))
    value = mode.weighted(value, "values") if value.requires_grad else value
    if attn_mask is not None and attn_mask.requires_grad:
        attn_mask = mode.weighted(attn_mask, "matrix")
    return functional.scaled_dot_product_attention(query, key, value, attn_mask, *args, **kwargs)


# One of torch's arguments is called `mode`.
def _grid_sample(live: Any, func: Any, /, input: Tensor, grid: Tensor, *args: Any, **kwargs: Any) -> Any:
    if input.requires_grad and grid.requires_grad:
        input, grid = live.weighted(input, "values"), live.weighted(grid, "matrix")
    return functional.grid_sample(input, grid, *args, **kwargs)


def _solve(mode: Any, func: Any, matrix: Tensor, x: Tensor, **options: Any) -> Any:
    if matrix.requires_grad and x.requires_grad:
        matrix, x = mode.weighted(matrix, "matrix"), mode.weighted(x, "values")
    return func(matrix, x, **options)


def _factors(mode: Any, func: Any, **factors: Tensor | None) -> tuple[Any, ...]:
    live = {name: factor for name, factor in factors.items() if factor is not None and factor.requires_grad}
    # The matrix is linear in the query and in the key, and in a scale of the key such as the step size.
    keys = live.keys() & {"key", "key_scale"}
    part = 0.5 if keys and "query" in live else 1.0
    shares = {"query": part} | {name: part / len(keys) for name in keys}
    weighted = {name: mode.weighted(factor, "matrix", shares.get(name, 1.0)) for name, factor in live.items()}
    return checked_factors(**(factors | weighted))


MIXING: dict[str, Callable[..., Any]] = {
    "addmm": _addmm,
    "baddbmm": _addmm,
    "scaled_dot_product_attention": _attention,
    "grid_sample": _grid_sample,
    "linalg_solve": _solve,
    "linalg_solve_triangular": _solve,
    "checked_factors": _factors,
}
"""Rules by the name of torch's function; their first arguments are the mode and the function."""

"""The contribution norms on a GPU: vectors are made, multiplied and reduced in registers; see README.md."""

import torch
from jaxtyping import Float
from torch import Tensor

from unilinattn.kernels.contribution_norms.naive import Order, kind_of
from unilinattn.kernels.contribution_norms.triton_kernels import pair_norms
from unilinattn.kernels.launch import Precision, on


def norms(
    read: Float[Tensor, "batch row channel state"],
    write: Float[Tensor, "batch col channel state"],
    weight: Float[Tensor, "out channel"],
    *,
    order: Order,
    reference: Tensor | None = None,
    precision: Precision = "ieee",
) -> Float[Tensor, "batch row col"]:
    """Reduce T_ij = W v_ij for all pairs, v_ijc = sum_n read_icn write_jcn, in float32; nothing else is stored.

    `reference` is y, (batch, row, out), for `alti` and one vector (out) for `dot`.
    Time: the product (rows cols x channels)(channels x out), and a state's share of it for the vectors.
    """
    return _launch(read, write, None, weight, order, reference, precision, left=False)


def mapped_norms(
    alpha: Float[Tensor, "batch head row col"],
    value: Float[Tensor, "batch col channel"],
    weight: Float[Tensor, "out channel"],
    *,
    order: Order,
    left: Float[Tensor, "batch row channel"] | None = None,
    reference: Tensor | None = None,
    precision: Precision = "ieee",
) -> Float[Tensor, "batch row col"]:
    """Reduce T_ij = W v_ij for all pairs, v_ijc = left_ic alpha_hij value_jc, a head for consecutive channels."""
    read = value if left is None else left
    whole = read.unsqueeze(3), value.unsqueeze(3)
    return _launch(*whole, alpha, weight, order, reference, precision, left=left is not None)


def _launch(
    read: Tensor,
    write: Tensor,
    alpha: Tensor | None,
    weight: Tensor,
    order: Order,
    reference: Tensor | None,
    precision: Precision,
    *,
    left: bool,
) -> Tensor:
    kind, p = kind_of(order, reference)
    batch, cols, channels, states = write.shape
    rows = read.shape[1] if alpha is None else alpha.shape[2]
    out = torch.empty(batch, rows, cols, dtype=torch.float32, device=write.device)
    y = weight.expand(1, *weight.shape) if reference is None else reference
    y = y.expand(1, 1, -1) if y.dim() == 1 else y
    # One y for the whole batch has no stride along it.
    y_strides = (0, 0, y.stride(2)) if kind == "dot" else y.stride()
    each = write if alpha is None else alpha

    def grid(sizes: dict[str, int]) -> tuple[int, int]:
        return -(-rows // sizes["ROWS"]) * -(-cols // sizes["COLS"]), batch

    with on(out):
        pair_norms[grid](
            read,
            write,
            each,
            weight,
            y,
            out,
            rows,
            cols,
            channels,
            states,
            weight.shape[0],
            1 if alpha is None else channels // alpha.shape[1],
            p,
            *read.stride(),
            *write.stride(),
            *each.stride(),
            *weight.stride(),
            *y_strides,
            MAPPED=alpha is not None,
            LEFT=left,
            KIND=kind,
            PRECISION=precision,
        )
    return out

"""The contribution norms on a CPU with Numba: vectors of few channels are formed and reduced in vector registers."""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from unilinattn.kernels import loops
from unilinattn.kernels.contribution_norms import tiled
from unilinattn.kernels.contribution_norms.naive import Order, PairNorms, Products, kind_of
from unilinattn.kernels.contribution_norms.tiled import held_elements
from unilinattn.kernels.threads import in_pieces

__all__ = ["alti_norms", "held_elements", "norms"]

CHANNELS = 32
"""Most channels of a vector in a compiled loop: the product of more runs faster in a library's kernel."""


def norms(products: Products, *, order: Order, reference: Float[Tensor, "batch row out"] | None = None) -> PairNorms:
    """Reduce T = W v of each pair; "alti" and 1 by compiled loops if v has few channels, else by `tiled`."""
    kind, _ = kind_of(order, reference)
    vectors, weight = products
    if weight is None or vectors.shape[1] > CHANNELS or kind not in ("alti", "l1"):
        return tiled.norms(products, order=order, reference=reference)
    if reference is None:
        reference = vectors.new_zeros(1, vectors.shape[2], weight.shape[1])
    return _reduced(vectors, weight, reference)[kind == "l1"]


def alti_norms(products: Products, reference: Float[Tensor, "batch row out"]) -> tuple[PairNorms, PairNorms]:
    """Return the orders "alti" and 1 of `norms`, with one product W v for both."""
    vectors, weight = products
    if weight is None or vectors.shape[1] > CHANNELS:
        return tiled.alti_norms(products, reference)
    return _reduced(vectors, weight, reference)


def _reduced(vectors: Tensor, weight: Tensor, reference: Tensor) -> tuple[PairNorms, PairNorms]:
    scores = vectors.new_zeros(vectors.shape[0], *vectors.shape[2:])
    sizes = torch.zeros_like(scores)
    # The loop takes four channels at a time.
    matrix = weight.mT
    if missing := -vectors.shape[1] % 4:
        vectors, matrix = pad(vectors, (0, 0, 0, 0, 0, missing)), pad(matrix, (0, 0, 0, missing))
    tensors = (vectors.flatten(2), matrix, reference, scores.flatten(1), sizes.flatten(1))
    pieces = -(-len(scores) // loops.GROUPS)
    in_pieces(loops.alti_norms, pieces, *(np.ascontiguousarray(t.numpy()) for t in tensors))
    return scores, sizes

"""l2 norms of W v without the vectors: ||W v||^2 = v^T (W^T W) v, for fewer channels than outputs."""

from jaxtyping import Float
from torch import Tensor


def gram(weight: Float[Tensor, "group out channel"]) -> Float[Tensor, "group channel channel"]:
    """Return W^T W in float64, because squares lose half the digits where terms cancel."""
    wide = weight.double()
    return wide.mT @ wide


def norms(
    vectors: Float[Tensor, "group channel row col"], squared: Float[Tensor, "group channel channel"]
) -> Float[Tensor, "group row col"]:
    """Return ||W v||_2 of each pair, given `gram`: channels^2 multiplications instead of channels x outputs."""
    v = vectors.double().flatten(2)
    result = (squared @ v).mul_(v).sum(1).clamp_min_(0).sqrt_()
    return result.unflatten(1, vectors.shape[2:]).to(vectors.dtype)

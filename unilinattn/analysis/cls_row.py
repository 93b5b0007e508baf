"""CLS bias: the mean attention of the CLS token to each patch over a data set (HMA ACL Fig. 2)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unilinattn.aligned import aligned
from unilinattn.analysis.pictures import Figure, Where, draw, heat_map
from unilinattn.errors import InputError
from unilinattn.evaluation.metrics import rank_correlation
from unilinattn.methods.raw import raw
from unilinattn.tracing.trace import Trace


@dataclass(frozen=True, eq=False, repr=False)
class ClsBias:
    """The mean row of the CLS token over a data set, as maps of patches.

    Attributes:
        layers: names of the layers.
        images: number of images in the mean.
        maps: (layer, row, column).
        distance: distance in the token sequence from the CLS token to each patch, (row, column).
    """

    layers: tuple[str, ...]
    images: int
    maps: Float[Tensor, "layer row column"]
    distance: Int[Tensor, "row column"]

    @property
    def nearness(self) -> Float[Tensor, " layer"]:
        """Rank correlation of the absolute weight of a patch with its nearness to the CLS token in the sequence."""
        near = -self.distance.flatten().double()[None]
        values = [rank_correlation(weights.abs().flatten().double()[None], near).mean for weights in self.maps]
        return torch.tensor(values, dtype=torch.float64, device="cpu")

    def __repr__(self) -> str:
        """Show the nearness of each layer."""
        nearness = [f"{near:.2f}" for near in self.nearness.tolist()]
        rows = [("layer", "nearness"), *zip(self.layers, nearness, strict=True)]
        return f"ClsBias over {self.images} images\n" + aligned(rows, right=(1,))

    def plot(self, where: Where = None) -> Figure:
        """Draw one map of patches for each layer."""
        maps = zip(self.layers, self.maps, strict=True)
        panels = [heat_map(weights, name, rows="patch row", columns="patch column") for name, weights in maps]
        return draw(where, panels, size=(2.8, 2.4))


def cls_bias(
    traces: Iterable[Trace], *, cls: int, grid: tuple[int, int], special: Sequence[int] = (), **options: Any
) -> ClsBias:
    """Return the mean CLS row over the images of several traces, as one map of patches for each layer.

    Traces are read one at a time, so a generator of them takes the memory of one batch. Rows take time linear in
    length. `options` are those of `raw`: scope, heads, sign, normalize, layers.

    Args:
        traces: traces of one vision model on batches of images.
        cls: position of the CLS token, which reads the patches; negative ones count from the end.
        grid: (rows, columns) of the patches, which follow each other row by row.
        special: positions of other tokens that are not patches, such as a second CLS token.
        options: options of `raw`.

    Raises `InputError` without a trace, and if the tokens other than `cls` and `special` are not the patches of `grid`.
    Source: HMA ACL Fig. 2, section 4.1.
    """
    layers: tuple[str, ...] = ()
    total, images = torch.zeros((), device="cpu"), 0
    for trace in traces:
        result = raw(trace, target=cls, **options)
        scores = result.scores if "layer" in result.dims else result.scores[None]
        layers = result.layers if "layer" in result.dims else ("mean over layers",)
        total = total + scores.double().sum(1).cpu()
        images += scores.shape[1]
    if not images:
        raise InputError("there is no trace; pass the traces of one or more batches of images.")
    length = total.shape[-1]
    apart = {position % length for position in (cls, *special)}
    patches = torch.tensor([position for position in range(length) if position not in apart], device="cpu")
    if len(patches) != grid[0] * grid[1]:
        raise InputError(
            f"{length} tokens without the {len(apart)} at {sorted(apart)} leave {len(patches)} patches, and the grid "
            f"{grid} has {grid[0] * grid[1]}; name all tokens that are no patches in `special`."
        )
    maps = (total / images)[:, patches].unflatten(1, grid)
    return ClsBias(layers, images, maps, (patches - cls % length).abs().reshape(grid))

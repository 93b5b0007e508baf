"""Whether rows of vectors are windows of sequences, where the sizes of their axes leave it open."""

from typing import Any

import torch
from torch import Tensor, nn

from unilinattn.call.exactness import layer_tolerance
from unilinattn.call.nested import mapped
from unilinattn.host.isolation import isolated, outside_host
from unilinattn.host.observer import Inputs


def are_windows(module: nn.Module, inputs: Inputs, x: Tensor, output: Any, batch: int | None) -> bool:
    """Whether the vectors that a call reads, (row, token, channel), are windows and not (token, sequence, channel).

    Both are possible if their second axis has as many entries as the batch, such as the two frames of each patch in two
    videos. Then the module runs once more with noise in half of the rows: windows are computed one by one, so that no
    other row of the output moves.
    """
    if x.ndim != 3 or not batch or x.shape[1] != batch or x.shape[0] <= batch or x.shape[0] % batch:
        return False
    if not isinstance(output, Tensor) or output.shape[:2] != x.shape[:2] or batch < 2:
        return False
    generator = torch.Generator().manual_seed(0)
    half = torch.randperm(len(x), generator=generator, device="cpu").to(x.device) < len(x) // 2
    noise = torch.randn(x.shape, generator=generator, device="cpu").to(x)
    size = x.float().square().mean().sqrt().to(x)
    moved = x + (size + 1e-3) * noise * half[:, None, None]
    args, kwargs = mapped(inputs, lambda t: moved if t is x else t)
    try:
        after = outside_host(lambda: isolated(module, lambda: module.forward(*args, **kwargs)))
    # A host may raise any error, for instance on the second call of one run.
    except Exception:
        return False
    tensors = after if isinstance(after, (tuple, list)) else (after,)
    after = next((t for t in tensors if isinstance(t, Tensor) and t.shape == output.shape), None)
    if after is None:
        return False
    change, size = ((t[~half]).float().norm() for t in (after - output, output))
    return float(change) <= layer_tolerance(output.dtype) * float(size)

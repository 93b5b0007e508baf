"""Padded inputs for the tests of adapters."""

import torch
from torch import Tensor


def padded_inputs(ids: Tensor, side: str | None) -> dict[str, Tensor]:
    """Return ids and, if `side` is "left" or "right", a mask that pads a third of the last sequence on that side."""
    if side is None:
        return {"input_ids": ids}
    mask = torch.ones_like(ids)
    pads = ids.shape[1] // 3
    mask[-1, slice(0, pads) if side == "left" else slice(ids.shape[1] - pads, None)] = 0
    return {"input_ids": ids, "attention_mask": mask}

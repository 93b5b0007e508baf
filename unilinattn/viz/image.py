"""Pictures beneath the patches of a heat map: pixels from arrays and PIL images, and their PNG."""

import struct
import zlib
from typing import Any

import numpy as np
from torch import Tensor

from unilinattn.errors import InputError
from unilinattn.viz.colours import Array

ACCEPTED = "(height, width), (height, width, 3) or (3, height, width), uint8 or floats from 0 to 1, or a PIL image"


def pixels(image: Any, grid: tuple[int, int]) -> Array:
    """Return an image as uint8 (height, width, 3), for a grid of (rows, columns) of patches that divides its sides.

    Raises `InputError` for another shape, type or range, or if the grid does not divide the sides.
    """
    if isinstance(image, Tensor):
        image = image.detach().cpu().float().numpy() if image.is_floating_point() else image.cpu().numpy()
    if hasattr(image, "convert"):
        image = image.convert("RGB")
    values = np.asarray(image)
    if values.ndim == 3 and values.shape[0] in (1, 3) and values.shape[-1] not in (1, 3):
        values = values.transpose(1, 2, 0)
    if values.ndim == 3 and values.shape[-1] == 1:
        values = values[..., 0]
    if values.ndim == 2:
        values = np.repeat(values[..., None], 3, axis=2)
    if values.ndim != 3 or values.shape[-1] != 3 or values.dtype.kind not in "fu" or 0 in values.shape:
        came = f"has shape {values.shape} of {values.dtype}" if values.dtype.kind in "biuf" else f"is {image!r:.60}"
        raise InputError(f"image {came}; accepted: {ACCEPTED}.")
    height, width, _ = values.shape
    if height % grid[0] or width % grid[1]:
        raise InputError(
            f"The image of {height} x {width} pixels is not divided by the grid of {grid[0]} x {grid[1]} patches; give "
            "the resized and cropped image that the model read."
        )
    if values.dtype == np.uint8:
        return values
    if values.dtype.kind == "u" or not np.isfinite(values).all() or values.min() < 0 or values.max() > 1:
        raise InputError(
            f"image has values from {values.min():.3g} to {values.max():.3g} of {values.dtype}; accepted: {ACCEPTED}. "
            "Undo the processor's normalisation: image * std + mean."
        )
    return np.rint(values * 255).astype(np.uint8)


def png(image: Array) -> bytes:
    """Return uint8 pixels (height, width, 3) as a PNG."""
    height, width, _ = image.shape
    lines = np.pad(image.reshape(height, -1), ((0, 0), (1, 0))).tobytes()
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )

"""Pixels of images: accepted forms, refusals, and the PNG."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from unilinattn.errors import InputError
from unilinattn.viz.image import pixels, png

COLOURS = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)


@pytest.mark.parametrize(
    "image",
    [
        COLOURS,
        COLOURS.transpose(2, 0, 1),
        COLOURS / 255,
        torch.tensor(COLOURS),
        torch.tensor(COLOURS).permute(2, 0, 1).double() / 255,
        Image.fromarray(COLOURS),
    ],
    ids=["last", "first", "floats", "tensor", "floats of a tensor", "PIL"],
)
def test_every_form_gives_the_same_pixels(image: object) -> None:
    np.testing.assert_array_equal(pixels(image, (2, 3)), COLOURS)


def test_one_channel_is_grey() -> None:
    grey = pixels(COLOURS[..., 0], (2, 3))
    np.testing.assert_array_equal(grey, np.repeat(COLOURS[..., :1], 3, -1))
    np.testing.assert_array_equal(pixels(COLOURS[None, ..., 0], (2, 3)), grey)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.zeros((4, 7, 3)), r"4 x 7 pixels is not divided by the grid of 2 x 3"),
        (np.zeros((2, 4, 6, 3)), r"shape \(2, 4, 6, 3\)"),
        (np.zeros((4, 6, 4)), r"shape \(4, 6, 4\)"),
        (np.full((4, 6), 2.0), "from 2 to 2 of float64.*normalisation"),
        (np.full((4, 6), -0.5), "from -0.5"),
        (np.full((4, 6), np.nan), "nan"),
        (np.zeros((4, 6), dtype=np.int64), "int64"),
        (np.zeros((4, 6), dtype=np.uint16), "uint16"),
        ("picture.png", "image is 'picture.png'; accepted"),
    ],
)
def test_other_images_are_refused(image: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        pixels(image, (2, 3))


def test_the_png_has_the_pixels() -> None:
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(png(COLOURS)))), COLOURS)

"""Drawings of an HTML page, decoded: pixels, values, labels and outlines."""

import json
import re
import zlib
from html import unescape

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unilinattn.viz.colours import DIVERGING, SEQUENTIAL, mix
from unilinattn.viz.drawing import encoded, four_digits, heatmap, png, strip


def data(picture: str, name: str) -> str:
    attribute = re.search(rf'data-{name}="([^"]*)"', picture)
    assert attribute is not None
    return unescape(attribute[1])


def decoded(text: str, columns: int) -> np.ndarray:
    """Decode values like the script of the page."""
    rows = [[{"": "0", "n": "nan"}.get(cell, cell) for cell in row.split(",")] for row in text.split(";")]
    return np.array([[float(cell) for cell in row] + [0.0] * (columns - len(row)) for row in rows])


def read_png(content: bytes) -> tuple[np.ndarray, list[tuple[int, int, int]]]:
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    place, chunks = 8, {}
    while place < len(content):
        length, kind = int.from_bytes(content[place : place + 4], "big"), content[place + 4 : place + 8]
        body = content[place + 8 : place + 8 + length]
        assert zlib.crc32(kind + body) == int.from_bytes(content[place + 8 + length : place + 12 + length], "big")
        chunks[kind], place = body, place + 12 + length
    width, height = (int.from_bytes(chunks[b"IHDR"][k : k + 4], "big") for k in (0, 4))
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, width + 1)
    assert not lines[:, 0].any()
    palette = [tuple(chunks[b"PLTE"][3 * k : 3 * k + 3]) for k in range(256)]
    assert chunks[b"tRNS"][255] == 0
    return lines[:, 1:], palette


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pixels_have_the_colours_of_their_scores(theme: str) -> None:
    scores = np.array([[0.0, 0.25], [1.0, np.nan]])
    pixels, palette = read_png(png(scores, False, theme))
    assert pixels.shape == (320, 320)
    assert palette[pixels[0, 0]] == mix(SEQUENTIAL[theme], 0.0)
    assert palette[pixels[0, -1]] == mix(SEQUENTIAL[theme], 0.5)
    assert palette[pixels[-1, 0]] == mix(SEQUENTIAL[theme], 1.0)
    assert pixels[-1, -1] == 255
    place = 190 / 254  # an entry of the palette, so that its colour is exact
    pixels, palette = read_png(png(np.array([[-2.0, 0.0, 2 * (2 * place - 1) ** 2]]), True, theme))
    expected = [mix(DIVERGING[theme], place) for place in (0.0, 0.5, place)]
    assert [palette[pixel] for pixel in pixels[0, [0, 150, -1]]] == expected


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=6, max_size=6), st.integers(0, 3))
def test_values_are_encoded_to_four_digits(values: list[float], zeros: int) -> None:
    scores = np.array(values).reshape(2, 3)
    scores[:, 3 - zeros :] = 0.0
    read = decoded(encoded(scores), 3)
    np.testing.assert_allclose(read, scores, rtol=5.1e-4, atol=0)


def test_zeros_are_empty_and_nan_is_a_letter() -> None:
    assert encoded(np.array([[0.5, 0.0, 0.0], [0.0, -1e-7, np.nan]])) == "0.5;,-1e-7,n"
    assert (four_digits(123456.0), four_digits(-1e20), four_digits(0.0317)) == ("1.235e5", "-1e20", "0.0317")


def test_a_heat_map_contains_values_tokens_and_names() -> None:
    values = torch.randn(3, 3, dtype=torch.float64).tril()
    tokens = ['<b>"&', "]]>", "</script>"]
    picture = heatmap(values, title="<i>", notes=["a & b", ""], row_tokens=tokens, column_tokens=tokens)
    np.testing.assert_allclose(decoded(data(picture, "values"), 3), values.numpy(), rtol=5.1e-4)
    assert json.loads(data(picture, "rows")) == json.loads(data(picture, "columns")) == tokens
    assert json.loads(data(picture, "names")) == ["query", "key"]
    assert (data(picture, "width"), data(picture, "step")) == ("3", "1")
    assert "<i>" not in picture
    assert "</script>" not in picture
    assert "<b>&lt;i&gt;</b>a &amp; b</figcaption>" in picture
    assert "key</text>" in picture


def test_labels_are_tokens_for_few_rows_and_positions_for_many() -> None:
    few = heatmap(np.ones((3, 3)), row_tokens=list("abc"), column_tokens=["extraordinary", "b", "c"])
    assert "extraordi…</text>" in few
    assert few.count("rotate(-90") == 4
    many = heatmap(np.ones((64, 64)), row_tokens=["a"] * 64, column_tokens=["a"] * 64)
    labels = re.findall(r">([^<>]*)</text>", many)
    assert labels == [*map(str, range(0, 64, 8))] * 2 + ["key", "query"]


def test_the_expected_pattern_is_outlined() -> None:
    expected = torch.zeros(4, 4, dtype=torch.bool)
    assert 'class="expected"' not in heatmap(np.ones((4, 4)), expected=expected)
    expected[1, 2] = True
    drawn = heatmap(np.ones((4, 4)), expected=expected)
    path = re.search(r'class="expected" d="([^"]*)"', drawn)
    assert path is not None
    assert set(path[1].split("M")[1:]) == {
        "160 80L240 80",
        "160 160L240 160",
        "160 80L160 160",
        "240 80L240 160",
    }


def test_a_large_map_is_drawn_in_blocks_by_their_largest_score() -> None:
    values = torch.zeros(600, 600)
    values[10, 599], values[300, 301], values[301, 300], values[599, 0] = 1.0, -5.0, 2.0, torch.nan
    expected = torch.zeros(600, 600, dtype=torch.bool)
    expected[599, 599] = True
    picture = heatmap(values, row_tokens=["a"] * 600, column_tokens=["a"] * 600, expected=expected)
    assert "each cell the largest of 3 x 3" in picture
    assert (data(picture, "step"), data(picture, "width"), data(picture, "rows")) == ("3", "200", "")
    read = decoded(data(picture, "values"), 200)
    assert read.shape == (200, 200)
    assert (read[3, 199], read[100, 100], read[199, 0]) == (1.0, -5.0, 0.0)
    assert np.count_nonzero(read) == 2
    assert "M318.4 318.4L320 318.4" in picture


def test_heat_maps_of_nan_of_zeros_and_of_one_row() -> None:
    assert "nan" not in heatmap(np.full((2, 2), np.nan)).replace("data-names", "")
    assert "nan" not in heatmap(np.zeros((2, 2))).replace("data-names", "")
    row = heatmap(np.ones((1, 8)), names=("layer", "key"))
    assert "layer</text>" not in row
    assert 'height="40"' in row


def test_the_target_s_own_token_does_not_enter_the_scale() -> None:
    drawn = strip(torch.tensor([1.0, 4.0, 9.0]), ["a", "b", "c"], own=(2, 9.0))
    spans = re.findall(r'class="(\w*)" style="--a:([\d.]+)" data-value="(\d)"', drawn)
    assert spans == [("", "0.33", "1"), ("", "0.65", "4"), ("own", "0.00", "9")]


def test_a_strip_colours_each_token_by_its_score() -> None:
    scores = torch.tensor([4.0, -1.0, 0.0, float("nan")])
    drawn = strip(scores, ["<b>", "two", "", "four"], expected=torch.tensor([False, True, False, False]))
    spans = re.findall(r'<span class="([^"]*)" style="--a:([\d.]+)" data-value="([^"]*)"', drawn)
    assert spans == [("", "0.65", "4"), ("minus wanted", "0.33", "-1"), ("", "0.00", "0"), ("", "0.00", "no score")]
    assert "&lt;b&gt;</span>" in drawn
    assert "<b>" not in drawn.split("</figcaption>")[1]

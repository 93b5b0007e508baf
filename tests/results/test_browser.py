"""Pages in headless Chromium: hover, lock, pickers, keys, downloads, themes, widths, escaping."""

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image

from unilinattn.results.attribution import Attribution
from unilinattn.results.comparison import Comparison
from unilinattn.viz import blocks
from unilinattn.viz.board import Cell, Picture, board

pytestmark = pytest.mark.slow

LENGTH = 6
TOKENS = ["the", "cat", '=1+"2"', "漢", "\n", "end"]
SHOWN = ["the", "cat", '=1+"2"', "漢", r"\n", "end"]
SPITE = '</script><img src=x onerror="window.broken=1"><b>'

Open = Callable[..., Any]


def layers(**labels: Any) -> Attribution:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 2, LENGTH, LENGTH, generator=generator).tril()
    values: dict[str, Any] = {
        "scores": scores,
        "dims": ("layer", "batch", "query", "key"),
        "method": "raw",
        "tokens": [TOKENS, list("uvwxyz")],
        "layers": ("h.0", "h.1", "h.2"),
        "kinds": ("dense",) * 3,
        "model": "tiny",
        "extras": {"cancellation": torch.arange(36.0).view(3, 2, 6) + 1},
    }
    return Attribution(**(values | labels))


def compared() -> Comparison:
    composed = layers(scores=layers().scores.sum(0), dims=("batch", "query", "key"), method="rollout", extras={})
    return Comparison({name: {"raw": layers(), "rollout": composed} for name in ("a", "b", "c", "d")})


def move(page: Any, row: int, key: int, plot: int = 0, *, rows: int = LENGTH, columns: int = LENGTH) -> None:
    """Move the pointer to a cell, found through the mark of the shown row, which spans the cells."""
    page.mouse.move(*centre(page, row, key, plot, rows=rows, columns=columns))


def centre(page: Any, row: int, key: int, plot: int, *, rows: int, columns: int) -> tuple[float, float]:
    element = page.locator(".ula-plot").nth(plot)
    element.scroll_into_view_if_needed()
    box, mark = element.bounding_box(), element.locator(".mark.row").bounding_box()
    shown = page.evaluate("mark => [parseFloat(mark.style.top), parseFloat(mark.style.height)]", marks(page)[plot])
    height = shown[1]
    top = box["y"] + (shown[0] % height)
    return mark["x"] + (key + 0.5) * mark["width"] / columns, top + (row + 0.5) * height


def marks(page: Any) -> list[Any]:
    return page.query_selector_all(".mark.row")


def shown_rows(page: Any) -> list[int]:
    places = "marks => marks.map(m => Math.floor(parseFloat(m.style.top) / parseFloat(m.style.height)))"
    return page.eval_on_selector_all(".mark.row", places)


def ranked(scores: torch.Tensor, count: int) -> list[int]:
    order = scores.abs().argsort(descending=True).tolist()
    return [place for place in order if scores[place] != 0][:count]


def list_of(page: Any) -> list[str]:
    return page.locator(".ula-top li .of").all_inner_texts()


def test_the_pointer_shows_a_row_over_the_text(opened: Open) -> None:
    result, page = layers(), opened(layers())
    move(page, 4, 2)
    scores = result.scores[0, 0, 4]
    assert page.locator(".ula-tip b").inner_text() == f"{float(scores[2]):.3g}"
    assert page.locator(".ula-tip span").inner_text() == 'query 4 “\\n” ← key 2 “=1+"2"”'
    assert page.locator(".ula-reader h4 span").inner_text() == "query 4 “\\n”"
    assert page.locator(".facts").inner_text() == "cancellation 5"
    assert list_of(page) == [f"{key} “{SHOWN[key]}”" for key in ranked(scores, 6)]
    chips = page.locator(".tokens span")
    assert chips.all_inner_texts() == SHOWN
    shades = [float(a) for a in chips.evaluate_all("all => all.map(one => one.style.getPropertyValue('--a'))")]
    expected = 0.65 * (scores.abs() / scores.abs().max()).sqrt()
    np.testing.assert_allclose(shades, expected.tolist(), atol=0.006)
    classes = chips.evaluate_all("all => all.map(one => one.className)")
    assert ["minus" in name for name in classes] == (scores < 0).tolist()
    assert ["missing" in name for name in classes] == [False] * 5 + [True]


def test_a_cell_after_the_query_says_that_it_is_causal(opened: Open) -> None:
    page = opened(layers())
    move(page, 1, 4)
    assert page.locator(".ula-tip b").inner_text() == "causal: key after query"
    assert "causal: key after query" in page.locator(".ula-legend").inner_text()
    both = opened(layers(scores=torch.rand(3, 2, LENGTH, LENGTH)))
    move(both, 1, 4)
    assert "causal" not in both.locator("body").inner_text()


def test_panels_are_linked_and_a_click_locks(opened: Open) -> None:
    page = opened(compared())
    move(page, 3, 0)
    assert shown_rows(page) == [3] * 8
    page.mouse.click(*centre(page, 3, 0, 0, rows=LENGTH, columns=LENGTH))
    move(page, 1, 0, 1)
    assert shown_rows(page) == [3] * 8
    assert page.locator(".lock").get_attribute("aria-pressed") == "true"
    page.keyboard.press("Escape")
    move(page, 2, 0, 1)
    assert shown_rows(page) == [2] * 8
    # A click on a token locks its row.
    page.locator(".tokens span").nth(5).click()
    move(page, 1, 0, 1)
    assert shown_rows(page) == [5] * 8
    page.locator(".lock").click()
    move(page, 1, 1, 1)
    assert shown_rows(page) == [1] * 8


def test_the_pickers_of_layers_sequences_and_scales(opened: Open) -> None:
    result, page = layers(), opened(layers(), batch=[0, 1])
    top = page.locator(".ula-cell .top")
    last = LENGTH - 1
    first = top.inner_text()
    page.get_by_label("Layer of tiny raw").select_option(label="h.2")
    assert "h.2" in page.locator(".ula-reader h4").inner_text()
    scores = result.scores[2, 0, last]
    assert top.inner_text() != first and list_of(page)[0].startswith(f"{ranked(scores, 1)[0]} ")
    page.get_by_label("Sequence", exact=True).select_option("1")
    assert top.inner_text().startswith("query 5 “z”")
    assert page.locator(".tokens span").all_inner_texts() == list("uvwxyz")
    assert page.locator(".ula-thumbs button").count() == 3
    page.locator(".ula-thumbs button").nth(1).click()
    assert page.get_by_label("Layer of tiny raw").input_value() == "1"
    legend = page.locator(".ula-legend")
    assert "square root, share of each picture" in legend.inner_text()
    page.get_by_label("Colours").select_option("linear")
    page.get_by_label("Scale").select_option("all")
    assert "linear, one scale for all" in legend.inner_text()
    most = f"{float(result.scores[:, 1].abs().max()):.3g}"
    assert legend.locator(".marks span").last.inner_text() == most


def test_the_layers_of_all_models_change_together(opened: Open) -> None:
    page = opened(compared())
    page.get_by_label("Layer", exact=True).select_option(label="2")
    choices = page.locator(".ula-cell select").evaluate_all("all => all.map(one => one.value)")
    assert choices == ["2"] * 4
    page.get_by_label("Layer", exact=True).select_option(label="each its own")
    assert page.locator(".ula-cell select").first.input_value() == "0"


def test_the_own_token_is_apart_where_the_method_adds_the_stream(opened: Open) -> None:
    scores = torch.tensor([[9.0, 0.0, 0.0], [0.5, 8.0, 0.0], [0.25, 0.5, 7.0]])
    labels = {"scores": scores, "dims": ("query", "key"), "tokens": [list("abc")], "extras": {}}
    page = opened(layers(**labels, method="rollout"))
    assert list_of(page) == ["1 “b”", "0 “a”"]
    assert page.locator(".apart").inner_text() == "own token, apart: 7"
    page.get_by_label("query's own token apart").uncheck()
    assert list_of(page)[0] == "2 “c”"
    assert opened(layers(**labels, method="raw")).locator("input").is_checked() is False


def test_attention_sinks_are_apart_until_they_are_brought_in(opened: Open) -> None:
    scores = torch.tensor([[9.0, 0.0, 0.0], [90.0, 8.0, 0.0], [90.0, 0.5, 7.0]])
    labels = {"scores": scores, "dims": ("query", "key"), "tokens": [list("abc")], "extras": {}, "sinks": [[0]]}
    page = opened(layers(**labels))
    assert list_of(page) == ["2 “c”", "1 “b”"]
    assert page.locator(".apart").inner_text() == "attention sink 0 “a”, apart: 90"
    assert page.locator(".ula-legend").get_by_text("attention sink, apart").is_visible()
    assert [page.locator(".tokens span").nth(at).get_attribute("class") for at in range(3)] == ["own", "", ""]
    page.get_by_label("attention sinks apart").uncheck()
    assert list_of(page)[0] == "0 “a”" and page.locator(".apart").inner_text() == ""
    assert page.locator(".ula-legend").get_by_text("attention sink, apart").count() == 0
    assert opened(layers()).get_by_label("attention sinks apart").count() == 0


def test_a_page_without_a_mouse(opened: Open) -> None:
    page = opened(layers())
    plot = page.locator(".ula-plot")
    name = "tiny, raw, h.0: 6 x 6 scores, query by key."
    assert plot.get_attribute("aria-label").startswith(name) and plot.get_attribute("tabindex") == "0"
    plot.focus()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowRight")
    assert shown_rows(page) == [3]
    score = float(layers().scores[0, 0, 3, 0])
    assert page.locator(".ula-live").inner_text().startswith(f"h.0, query 3 “漢”, key 0 “the”: {score:.3g}. Largest: ")
    page.keyboard.press("PageDown")
    assert page.locator(".ula-live").inner_text().startswith("h.1, ")
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    assert page.locator(".lock").get_attribute("aria-pressed") == "true"
    for control in page.locator("button, select, input").all():
        assert control.evaluate("one => one.ariaLabel || one.innerText || one.closest('label').innerText")
    assert page.locator("details", has_text="Largest scores as a table").locator("td").count() == 18


@pytest.fixture
def download(opened: Open) -> Callable[..., bytes]:
    def of(page: Any, kind: str) -> bytes:
        with page.expect_download() as waiting:
            page.locator(".save").get_by_text(kind).click()
        assert waiting.value.suggested_filename == f"tiny-raw-h.0.{kind.lower()}"
        return Path(waiting.value.path()).read_bytes()

    return of


def test_downloads(opened: Open, download: Callable[..., bytes]) -> None:
    result = layers()
    page = opened(result)
    picture = Image.open(io.BytesIO(download(page, "PNG")))
    assert picture.format == "PNG" and min(picture.size) > 900
    assert len(set(picture.convert("RGB").resize((60, 60)).get_flattened_data())) > 20
    tree = ElementTree.fromstring(download(page, "SVG"))
    assert tree.tag == "{http://www.w3.org/2000/svg}svg"
    texts = [element.text for element in tree.iter() if element.tag.endswith("text")]
    assert texts[0] == "tiny · raw · h.0" and {"the", '=1+"2"', "query", "key"} <= set(texts)
    assert [e.get("href", "")[:22] for e in tree.iter() if e.tag.endswith("image")] == ["data:image/png;base64,"]
    rows = list(csv.DictReader(io.StringIO(download(page, "CSV").decode())))
    read = np.zeros((LENGTH, LENGTH))
    for row in rows:
        read[int(row["query"]), int(row["key"])] = float(row["score"])
    assert len(rows) == LENGTH * (LENGTH + 1) / 2
    np.testing.assert_allclose(read, result.scores[0, 0].numpy(), rtol=2.0**-11)
    # No spreadsheet takes a token for a formula.
    assert {row["key_token"] for row in rows} == {"the", "cat", '\'=1+"2"', "漢", "\\n", "end"}


def test_colours_follow_the_theme_and_print_is_light(opened: Open) -> None:
    def colours(page: Any) -> tuple[str, list[int]]:
        back = page.evaluate("getComputedStyle(document.querySelector('.ula')).backgroundColor")
        box, (x, y) = page.locator(".ula-plot").bounding_box(), centre(page, 0, 5, 0, rows=LENGTH, columns=LENGTH)
        pixel = "(canvas, [x, y]) => [...canvas.getContext('2d').getImageData(x, y, 1, 1).data]"
        return back, page.locator(".ula-plot canvas").evaluate(pixel, [x - box["x"], y - box["y"]])

    # The pixel lies in the cell of query 0 and key 5, which is zero: it has the colour of the background.
    scores = torch.zeros(3, 2, LENGTH, LENGTH)
    scores[..., 0, 4] = 1.0
    light, dark = opened(layers(scores=scores)), opened(layers(scores=scores), theme="dark")
    assert colours(light) == ("rgb(255, 255, 255)", [255, 255, 255, 255])
    assert colours(dark) == ("rgb(20, 23, 31)", [20, 23, 31, 255])
    dark.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert colours(dark) == colours(light)
    dark.evaluate("dispatchEvent(new Event('afterprint'))")
    assert colours(dark)[0] == "rgb(20, 23, 31)"


@pytest.mark.parametrize("kind", ["layers", "comparison", "long tokens", "image"])
def test_a_narrow_page_does_not_scroll_sideways(opened: Open, kind: str) -> None:
    results: dict[str, tuple[Any, dict[str, Any]]] = {
        "layers": (layers(), {"batch": [0, 1]}),
        "comparison": (compared(), {}),
        "long tokens": (layers(tokens=[["x" * 90] * 6] * 2, layers=tuple("y" * 80 + str(i) for i in range(3))), {}),
        "image": (patches(), {"image": torch.rand(28, 28, 3)}),
    }
    result, options = results[kind]
    page = opened(result, width=420, **options)
    assert page.evaluate("document.documentElement.scrollWidth") == 420
    assert page.locator(".ula-plot canvas").first.bounding_box()["width"] > 150


def test_the_first_picture_is_on_the_first_screen(opened: Open) -> None:
    page = opened(compared())
    plots = [plot.bounding_box() for plot in page.locator(".ula-plot").all()[:4]]
    assert len({box["y"] for box in plots}) == 1 and len({box["x"] for box in plots}) == 4
    reader = page.locator(".ula-reader").bounding_box()
    assert plots[0]["y"] + plots[0]["height"] <= reader["y"] < reader["y"] + reader["height"] <= 800


def test_texts_are_no_html(opened: Open) -> None:
    tokens = [[SPITE, "b", "c", "d", "e", "f"]] * 2
    spiteful = layers(tokens=tokens, layers=(SPITE, "h.1", "h.2"), model=SPITE, method=SPITE, kinds=(SPITE, "", ""))
    for result in (spiteful, Comparison({SPITE: {SPITE: spiteful}, "b": {SPITE: spiteful}})):
        page = opened(result)
        move(page, 2, 0)
        assert page.evaluate("[window.broken, document.images.length]") == [None, 0]
        assert page.locator(".tokens span").first.inner_text() == SPITE
        assert SPITE in page.locator(".ula-tip").inner_text()
        assert page.locator("select[aria-label^='Layer of']").first.locator("option").first.inner_text() == SPITE
    # The text does break a page that takes it for HTML.
    page.evaluate("text => document.body.insertAdjacentHTML('beforeend', text)", SPITE)
    page.wait_for_function("window.broken === 1")


def patches(**labels: Any) -> Attribution:
    scores = torch.linspace(0, 1, 5).repeat(2, 1)
    scores[:, 0] = 7.0
    values: dict[str, Any] = {
        "scores": scores,
        "dims": ("layer", "key"),
        "method": "raw",
        "tokens": [["[CLS]", "p0", "p1", "p2", "p3"]],
        "grid": (2, 2),
        "layers": ("h.0", "h.1"),
        "model": "vision",
    }
    return Attribution(**(values | labels))


def test_an_image_is_a_grid_of_patches_with_cls_apart(opened: Open) -> None:
    page = opened(patches(), image=torch.rand(28, 28, 3))
    box = page.locator(".ula-plot canvas").bounding_box()
    page.mouse.move(box["x"] + 0.75 * box["width"], box["y"] + 0.25 * box["width"])
    assert page.locator(".ula-tip").inner_text().split("\n") == ["0.5", "patch (0, 1)"]
    assert list_of(page) == ["patch (1, 1)", "patch (1, 0)", "patch (0, 1)", "patch (0, 0)"]
    assert page.locator(".apart").inner_text() == "[CLS], outside the image: 7"
    page.locator(".ula-plot").focus()
    page.keyboard.press("ArrowDown")
    assert "patch (1, 1): 1" in page.locator(".ula-live").inner_text()
    # The picture is beneath the scores: the cell of the smallest score is grey, not of one colour.
    pixels = "c => [...c.getContext('2d').getImageData(9, 9, 60, 1).data]"
    data = np.array(page.locator(".ula-plot canvas").evaluate(pixels)).reshape(-1, 4)
    assert len(np.unique(data[:, 0])) > 3


def test_the_row_of_a_map_over_patches_is_an_image(opened: Open) -> None:
    result = patches(scores=torch.rand(2, 5, 5), dims=("layer", "query", "key"))
    page = opened(result)
    assert page.locator(".ula-reader canvas.patches").count() == 1
    assert page.locator(".ula-reader h4 span").inner_text() == "query patch (1, 1)"
    assert "[CLS], outside the image" in page.locator(".apart").inner_text()


def test_a_board_has_an_image_for_each_picture(chromium: Any, tmp_path: Path) -> None:
    red, blue = np.zeros((4, 4, 3), np.uint8), np.zeros((4, 4, 3), np.uint8)
    red[..., 0], blue[:2] = 255, 255
    scores = np.array([[0.0, 1.0, 0.0, 0.0]])
    cells = [
        Cell("raw", model, [Picture(scores, "h.0", "", at, grid=(2, 2), places=range(4), image=image) for at in (0, 1)])
        for model, image in (("a", red), ("b", blue))
    ]
    path = tmp_path / "page.html"
    path.write_text(blocks.page("images", [], first=board(cells, sequences=("Image", ["cat.png", "dog.png"]))))
    page = chromium.new_page()
    page.goto(path.as_uri())
    page.wait_for_selector(".ula-board[data-ready]")
    page.wait_for_timeout(300)
    assert page.get_by_label("Image", exact=True).locator("option").all_inner_texts() == ["cat.png", "dog.png"]
    corner = "canvas => [...canvas.getContext('2d').getImageData(canvas.width - 4, 4, 1, 1).data].slice(0, 3)"
    lower = "canvas => [...canvas.getContext('2d').getImageData(4, canvas.height - 4, 1, 1).data].slice(0, 3)"
    a, b = page.query_selector_all(".ula-plot canvas")
    # The image of the second model is dark below, that of the first has one grey.
    assert sum(b.evaluate(lower)) < sum(a.evaluate(lower)) and a.evaluate(corner) != a.evaluate(lower)
    page.close()

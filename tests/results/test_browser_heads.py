"""Pages of results with heads in headless Chromium: pickers, keys, small maps, widths."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.results.test_browser import LENGTH, TOKENS, layers, list_of, ranked
from unilinattn.results.attribution import Attribution
from unilinattn.results.comparison import Comparison

pytestmark = pytest.mark.slow

Open = Callable[..., Any]


def heads(**labels: Any) -> Attribution:
    """Heads 1, 4 and 7 of three layers; of the last layer head 4 is the largest."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(3, 3, LENGTH, LENGTH, generator=generator).tril()
    values: dict[str, Any] = {
        "scores": scores,
        "dims": ("layer", "head", "query", "key"),
        "heads": (1, 4, 7),
        "tokens": [TOKENS],
        "extras": {"residual": torch.arange(18.0).view(3, 6) + 1},
    }
    return layers(**(values | labels))


def test_the_pickers_and_small_maps_of_heads(opened: Open) -> None:
    result, page = heads(), opened(heads())
    last = LENGTH - 1
    assert page.locator(".ula-reader h4").inner_text().startswith("h.0 · head 1 ")
    assert page.locator(".facts").inner_text() == "residual 6"
    picker = page.get_by_label("Head of tiny raw")
    assert picker.locator("option").all_inner_texts() == ["head 1", "head 4", "head 7"]
    picker.select_option(label="head 7")
    assert list_of(page)[0].startswith(f"{ranked(result.scores[0, 2, last], 1)[0]} ")
    # Another layer shows the same head.
    page.get_by_label("Layer of tiny raw").select_option(label="h.2")
    assert page.locator(".ula-reader h4").inner_text().startswith("h.2 · head 7 ")
    assert list_of(page)[0].startswith(f"{ranked(result.scores[2, 2, last], 1)[0]} ")
    assert page.locator(".facts").inner_text() == "residual 18"
    small = page.locator("details", has_text="Heads of h.2").locator(".ula-thumbs button")
    assert small.all_inner_texts() == ["head 1", "head 4", "head 7"]
    assert [one.get_attribute("aria-pressed") for one in small.all()] == ["false", "false", "true"]
    small.nth(1).click()
    assert picker.input_value() == "1"
    assert list_of(page)[0].startswith(f"{ranked(result.scores[2, 1, last], 1)[0]} ")
    others = page.locator("details", has_text="Every layer").locator(".ula-thumbs button")
    assert [one.get_attribute("title") for one in others.all()] == ["h.0 · head 4", "h.1 · head 4", "h.2 · head 4"]
    others.nth(1).click()
    assert page.locator(".ula-reader h4").inner_text().startswith("h.1 · head 4 ")


def test_page_keys_change_the_head(opened: Open) -> None:
    page = opened(heads(head_kind="channel"))
    plot = page.locator(".ula-plot")
    assert "page keys change the layer, with Shift the channel." in plot.get_attribute("aria-label")
    plot.focus()
    page.keyboard.press("Shift+PageDown")
    page.keyboard.press("Shift+PageDown")
    page.keyboard.press("Shift+PageDown")
    assert page.locator(".ula-live").inner_text().startswith("h.0 · channel 7, ")
    page.keyboard.press("PageDown")
    assert page.locator(".ula-live").inner_text().startswith("h.1 · channel 7, ")
    page.keyboard.press("Shift+PageUp")
    assert page.get_by_label("Channel of tiny raw").input_value() == "1"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_heads_fit_a_narrow_page(opened: Open, theme: str) -> None:
    scores = torch.rand(3, 40, LENGTH, LENGTH)
    page = opened(
        heads(scores=scores, heads=None, layers=tuple("y" * 80 + str(i) for i in range(3))), width=420, theme=theme
    )
    assert page.evaluate("document.documentElement.scrollWidth") == 420
    assert page.locator(".ula-thumbs").first.locator("button").count() == 24
    text = "In each layer: 24 of 40 heads, the largest by sum of absolute scores"
    assert text in page.locator("body").inner_text()


def test_the_heads_of_a_target_are_rows(opened: Open) -> None:
    result = heads(scores=heads().scores[..., -1, :], dims=("layer", "head", "key"), extras={})
    page = opened(result)
    page.locator(".ula-plot").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert page.locator(".ula-reader h4").inner_text() == "h.0 head 7"
    assert list_of(page)[0].startswith(f"{ranked(result.scores[0, 2], 1)[0]} ")
    assert page.get_by_label("Head of tiny raw").count() == 0


def test_models_with_heads_side_by_side(opened: Open) -> None:
    page = opened(Comparison({"a": {"raw": heads()}, "b": {"raw": layers()}}))
    page.get_by_label("Layer", exact=True).select_option(label="2")
    page.get_by_label("Head of a raw").select_option(label="head 4")
    assert page.locator(".ula-reader h4").inner_text().startswith("a · raw · h.2 · head 4")
    assert page.get_by_label("Layer of b raw").input_value() == "2"
    page.get_by_text("Heads of h.2, a · raw").click()
    page.locator("details[open] .ula-thumbs button").nth(2).wait_for()

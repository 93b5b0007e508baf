"""HTML pages and fragments: well-formed, self-contained, escaped and labelled."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from unilinattn.errors import InputError
from unilinattn.results import pages
from unilinattn.results.attribution import Attribution
from unilinattn.results.comparison import Comparison
from unilinattn.viz import blocks

VOID = {"meta", "image", "rect", "path", "br", "img"}
SPITE = '<script>alert("x")</script>&\'"'


class Outline(HTMLParser):
    """Checks that tags are balanced; collects references, words and tags of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.words: list[str] = []
        self.tags: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)


def make(**changes: object) -> Attribution:
    values: dict[str, object] = {
        "scores": torch.rand(2, 2, 4, 4).tril(),
        "dims": ("layer", "batch", "query", "key"),
        "method": "latim",
        "options": {"p": 2},
        "scope": "layer",
        "tokens": [["a", SPITE, "c", "d"]] * 2,
        "layers": ("h.0", SPITE),
        "kinds": ("dense", "Toeplitz"),
        "model": "tiny",
        "versions": {"torch": "2.13.0"},
        "reconstruction_error": {"h.0": 1.25e-7, SPITE: 3e-7},
        "completeness_gap": 4e-9,
    }
    return Attribution(**(values | changes))


def of_target(**changes: object) -> Attribution:
    return make(**({"scores": torch.randn(2, 4), "dims": ("batch", "key")} | changes))


def assert_self_contained(text: str) -> Outline:
    outline = Outline(text)
    assert [r for r in outline.references if not r.startswith(("data:image/png;base64,", "#"))] == []
    assert "http" not in text
    assert "url(" not in text
    assert "@import" not in text
    assert SPITE not in text
    assert text.count("<script>") == text.count("</script>") == 1
    return outline


def test_a_result_as_a_page(tmp_path: Path) -> None:
    page = make().to_html(tmp_path / "result.html", expected=torch.eye(4, dtype=torch.bool))
    assert (tmp_path / "result.html").read_text(encoding="utf-8") == page
    assert page.startswith("<!doctype html>")
    outline = assert_self_contained(page)
    words = " ".join(outline.words)
    for expected in ("latim of tiny", "p 2", "layer 2, batch 2, query 4, key 4", "torch 2.13.0"):
        assert expected in words
    for expected in ("1.2e-07", "3.0e-07", "4.0e-09", "dense", "Toeplitz", SPITE, "expected"):
        assert expected in words
    assert page.count('class="ula-map"') == 2
    assert page.count('class="expected"') == 2


def test_a_page_of_selected_sequences() -> None:
    assert pages.attribution(make(), batch=[0, 1]).count('class="ula-map"') == 4
    assert "Sequence 1" in pages.attribution(make(), batch=-1)
    with pytest.raises(InputError, match="out of range"):
        make().to_html(batch=2)


def test_a_notebook_gets_a_fragment() -> None:
    fragment = make()._repr_html_()
    assert fragment.startswith('<div class="ula">')
    assert "<body" not in fragment
    assert_self_contained(fragment)


def test_a_target_is_running_text_or_a_row_without_tokens() -> None:
    page = of_target().to_html(expected=torch.tensor([[True, False, False, False]] * 2))
    outline = assert_self_contained(page)
    assert page.count('class="ula-strip"') == 1
    assert "-strip)" in page.split("ula-legend")[-1]
    assert SPITE in outline.words
    assert of_target(tokens=None).to_html().count('class="ula-map"') == 1


def test_an_image_is_a_map_of_patches() -> None:
    page = of_target(tokens=None, grid=(2, 2)).to_html()
    assert "patch row</text>" in page


def test_the_table_of_many_layers_is_folded() -> None:
    names = tuple(f"h.{index}" for index in range(8))
    scores = torch.rand(8, 4, 4)
    eight = make(scores=scores, dims=("layer", "query", "key"), tokens=None, layers=names, kinds=("dense",) * 8)
    assert "<summary>8 layers and their errors</summary>" in pages.attribution(eight)
    assert_self_contained(pages.attribution_page(eight))


def test_one_negative_score_selects_the_diverging_colours_of_every_map() -> None:
    scores = torch.rand(2, 2, 4, 4)
    assert "var(--sequential)" in pages.attribution(make(scores=scores)).split("ula-legend")[1]
    scores[1, 0, 2, 2] = -0.1
    assert "var(--diverging)" in pages.attribution(make(scores=scores)).split("ula-legend")[1]


def test_a_comparison_lists_models_and_layers_in_order(tmp_path: Path) -> None:
    compared = Comparison(
        {"mamba": {"raw": make(), "rollout": make(scores=torch.rand(2, 4, 4), dims=("batch", "query", "key"))},
         SPITE: {"raw": make(), "strip": of_target()}}
    )  # fmt: skip
    page = compared.to_html(tmp_path / "page.html", expected=torch.ones(2, 4, 4, dtype=torch.bool))
    outline = assert_self_contained(page)
    assert page.count('class="ula-map"') == 5
    assert page.count('class="expected"') == 5
    assert page.count('class="ula-strip"') == 1
    titles = [word for word in outline.words if word.startswith(("raw: ", "rollout: "))]
    assert titles == ["raw: h.0", f"raw: {SPITE}", "rollout: 2 layers together", "raw: h.0", f"raw: {SPITE}"]
    assert pages.comparison(compared, batch=[0, 1]).count('class="ula-map"') == 10
    assert_self_contained(compared._repr_html_())


def test_a_page_of_blocks() -> None:
    sections = [
        (f"Part {SPITE}", blocks.paragraph(SPITE) + blocks.facts({"a": SPITE, "b": None, "c": 0})),
        ("Two", blocks.group("Three", blocks.grid(blocks.paragraph("x")), note=SPITE)),
        ("Four", blocks.details(SPITE, blocks.paragraph("y"))),
    ]
    outline = assert_self_contained(blocks.page(SPITE, iter(sections), lead=SPITE))
    assert outline.references == ["#part-0", "#part-1", "#part-2"]
    assert outline.words.count(SPITE) == 7
    assert "<nav>" not in blocks.page("t", sections[:2])
    assert "<dt>c</dt><dd>0</dd>" in sections[0][1]
    assert "<dt>b</dt>" not in sections[0][1]


def test_a_table_aligns_numbers_and_stresses_cells() -> None:
    rows = [("mamba", 0.98765, 3, 1.25e-7, True), (SPITE, 0.5, "-", 0.0, False)]
    table = blocks.table(("model", "AUC", "rows", "error", "exact"), rows, caption=SPITE, strong={(0, 1)})
    assert '<th class="num">AUC</th>' in table
    assert '<td class="num strong">0.988</td>' in table
    assert '<td class="num">-</td>' in table
    assert '<td class="num">1.2e-07</td>' in table
    assert '<td class="num">0.000</td>' in table
    assert "<td>True</td>" in table
    assert SPITE not in table
    Outline(table)


def test_both_themes_define_the_same_colours() -> None:
    style = re.search(r"<style>(.*?)</style>", blocks.fragment(), re.DOTALL)
    assert style is not None
    for name in ("sequential", "diverging", "expected", "ink", "back", "plus", "minus"):
        assert len(re.findall(rf"--{name}:", style[1])) == 2, name


def test_the_target_s_own_token_is_shown_apart() -> None:
    labels = {"method": "alti", "options": {"target": -1}, "tokens": [["a", "b", "c", "d"]] * 2}
    result = of_target(scores=torch.tensor([[0.1, 0.2, 0.0, 0.7]] * 2), **labels)
    text = result.to_html()
    assert "largest of the other tokens 0.2, the token itself and the residual stream 0.7" in text
    assert 'class="own" style="--a:0.00" data-value="0.7"' in text
    assert text.count('--a:0.65" data-value="0.2"') == 1
    drawn = result.plot().axes[0].images[0].get_array()
    assert drawn.mask.tolist() == [[False, False, False, True]] and drawn[0, 1] == 1

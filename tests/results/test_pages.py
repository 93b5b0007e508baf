"""HTML pages and fragments: well-formed, self-contained, escaped and labelled."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from unilinattn.errors import InputError
from unilinattn.results import pages
from unilinattn.results.attribution import Attribution
from unilinattn.results.comparison import Comparison
from unilinattn.viz import blocks

VOID = {"meta", "br", "img"}
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


def boards(text: str) -> list[dict[str, Any]]:
    found = re.findall(r'<script type="application/json">(.*?)</script>', text, re.DOTALL)
    return [json.loads(content) for content in found]


def pictures(text: str) -> list[dict[str, Any]]:
    return [picture for data in boards(text) for cell in data["cells"] for picture in cell["pictures"]]


def assert_self_contained(text: str) -> Outline:
    outline = Outline(text)
    assert [reference for reference in outline.references if not reference.startswith("#")] == []
    # Packed scores may spell any word.
    plain = re.sub(r'"scores":"[^"]*"', "", text)
    for word in ("http", "url(", "@import", SPITE):
        assert word not in plain
    assert text.count("<script>") == 1
    assert text.count("<script") == text.count("</script>") == 1 + len(boards(text))
    return outline


def test_a_result_as_a_page(tmp_path: Path) -> None:
    page = make().to_html(tmp_path / "result.html", expected=torch.eye(4, dtype=torch.bool))
    assert (tmp_path / "result.html").read_text(encoding="utf-8") == page
    assert page.startswith("<!doctype html>")
    outline = assert_self_contained(page)
    words = " ".join(outline.words)
    for expected in ("latim of tiny", "p 2", "layer 2, batch 2, query 4, key 4", "torch 2.13.0"):
        assert expected in words
    for expected in ("1.2e-07", "3.0e-07", "4.0e-09", "dense", "Toeplitz", SPITE):
        assert expected in words
    assert [picture["title"] for picture in pictures(page)] == ["h.0", SPITE]
    assert [picture["expected"] for picture in pictures(page)] == [[0, 1, 5, 1, 10, 1, 15, 1]] * 2
    assert pictures(page)[0]["notes"].startswith("dense, error 1.2e-07, largest 0.")


def test_the_picture_comes_first_and_the_other_tables_are_folded() -> None:
    for page in (make().to_html().replace("<table>", "", 1), Comparison({"a": {"raw": make()}}).to_html()):
        body = page.split("</style>")[1]
        assert body.index('class="ula-board"') < body.index("<details>") < body.index("<table>")
        assert body.count("<table>") == body.count("<details>") == 2


def head_of(result: Attribution, **options: Any) -> list[str]:
    """The words of a page above its board."""
    return Outline(result.to_html(**options).split('<div class="ula-board"')[0] + "</div></body></html>").words


def test_the_head_of_a_page_has_the_largest_scores_the_sums_and_the_sinks() -> None:
    scores = torch.tensor([[43.5, -40.25, 0.5, -2.75], [1.0, 2.0, 3.0, 0.0]])
    extras = {"content": scores / 2, "control": scores / 4, "logit": torch.ones(2)}
    extras |= {"bias": torch.tensor([0.0, -5.0]), "cancellation": torch.tensor([87.0, 11.0])}
    options = {"logit": None, "target": -1}
    result = of_target(scores=scores, extras=extras, options=options, sinks=[[], [0]], method="logit")
    words = head_of(result)
    ranked = ["key", "0 “a”", f"1 “{SPITE}”", "3 “d”", "2 “c”"]
    at = words.index("key")
    assert words[at : at + 5] == ranked and words[at - 1] == "Largest scores"
    numbers = words[at + 5 :]
    assert numbers[:5] == ["score", "43.500", "-40.250", "-2.750", "0.500"]
    assert numbers[5:10] == ["content", "21.750", "-20.125", "-1.375", "0.250"] and numbers[10] == "control"
    assert numbers[15:21] == ["bias", "0", "cancellation", "87", "completeness gap", "4.0e-09"]
    assert "Shares cancel: 43.5, -40.2 and -2.75 make a logit of 1." in numbers
    second = head_of(result, batch=[0, 1])
    assert "Largest scores of sequence 1" in second and "0 “a” 1 (content 0.5, control 0.25)" in second
    assert "Shares cancel: -5 (bias), 3 and 2 make a logit of 1." in second
    compared = Comparison({"m": {"logit": result}}).to_html()
    assert "m, logit: shares cancel: 43.5, -40.2 and -2.75 make a logit of 1." in compared
    assert "No scores but zero and those of attention sinks." in head_of(of_target(sinks=[[0, 1, 2, 3], []]))


def test_a_page_of_selected_sequences() -> None:
    assert [picture["sequence"] for picture in pictures(pages.attribution(make(), batch=[0, 1]))] == [0, 0, 1, 1]
    assert [picture["sequence"] for picture in pictures(pages.attribution(make(), batch=-1))] == [1, 1]
    with pytest.raises(InputError, match="out of range"):
        make().to_html(batch=2)


def test_a_notebook_gets_a_fragment() -> None:
    fragment = make()._repr_html_()
    assert fragment.startswith('<div class="ula">')
    assert "<body" not in fragment
    assert_self_contained(fragment)


def test_the_layers_of_a_target_are_the_rows_of_one_picture() -> None:
    result = of_target(scores=torch.rand(2, 2, 4), dims=("layer", "batch", "key"), options={"target": -1})
    page = result.to_html(expected=torch.tensor([[True, False, False, False]] * 2))
    assert_self_contained(page)
    (picture,) = pictures(page)
    assert (picture["rows"], picture["columns"], picture["names"]) == (2, 4, ["layer", "key"])
    assert (picture["title"], picture["query"], picture["expected"]) == ("2 layers", 3, [0, 1, 4, 1])
    (data,) = boards(page)
    assert data["texts"][picture["rowTitles"]] == ["h.0", SPITE]
    assert data["texts"][picture["columnTokens"]] == ["a", SPITE, "c", "d"]
    (plain,) = pictures(of_target(tokens=None).to_html())
    assert (plain["rows"], plain["title"]) == (1, "2 layers together") and "columnTokens" not in plain


def test_an_image_has_its_patches_and_its_picture() -> None:
    result = of_target(scores=torch.rand(2, 5), tokens=[["[CLS]", "a", "b", "c", "d"]] * 2, grid=(2, 2))
    page = result.to_html(image=torch.rand(3, 4, 6))
    (picture,) = pictures(page)
    assert (picture["rows"], picture["columns"], picture["grid"]) == (1, 5, [2, 2])
    assert picture["places"] == [1, 2, 3, 4]
    (image,) = boards(page)[0]["images"]
    assert image.startswith("data:image/png;base64,") and picture["image"] == 0
    assert boards(result.to_html())[0]["images"] == []
    both = Comparison({name: {"raw": result} for name in "ab"}).to_html(image=torch.rand(4, 6))
    assert len(boards(both)[0]["images"]) == 1 and [one["image"] for one in pictures(both)] == [0, 0]
    with pytest.raises(InputError, match="5 x 6 pixels"):
        result.to_html(image=torch.rand(3, 5, 6))
    with pytest.raises(InputError, match=r"batch=\[0, 1\]; write a page for each"):
        result.to_html(image=torch.rand(3, 4, 6), batch=[0, 1])
    with pytest.raises(InputError, match="names no sequence"):
        result.to_html(batch=[])
    with pytest.raises(InputError, match="no grid; leave it out"):
        make().to_html(image=torch.rand(3, 4, 6))


def test_a_pattern_of_an_image_is_one_of_patches() -> None:
    expected = torch.tensor([[False, True, False, False]] * 2)
    (picture,) = pictures(of_target(tokens=None, grid=(2, 2)).to_html(expected=expected))
    assert picture["expected"] == [1, 1]


def test_one_negative_score_selects_the_diverging_colours_of_every_map() -> None:
    scores = torch.rand(2, 2, 4, 4)
    assert boards(pages.attribution(make(scores=scores)))[0]["signed"] is False
    scores[1, 0, 2, 2] = -0.1
    assert boards(pages.attribution(make(scores=scores)))[0]["signed"] is True


def test_a_comparison_has_models_in_columns_and_methods_in_rows(tmp_path: Path) -> None:
    compared = Comparison(
        {"mamba": {"raw": make(), "rollout": make(scores=torch.rand(2, 4, 4), dims=("batch", "query", "key"))},
         SPITE: {"raw": make(), "strip": of_target()}}
    )  # fmt: skip
    page = compared.to_html(tmp_path / "page.html", expected=torch.ones(2, 4, 4, dtype=torch.bool))
    assert_self_contained(page)
    (data,) = boards(page)
    assert data["columns"] == {"mamba": "dense, Toeplitz", SPITE: "dense, Toeplitz"}
    found = [(cell["row"], cell["column"], [p["title"] for p in cell["pictures"]]) for cell in data["cells"]]
    assert found == [
        ("raw", "mamba", ["h.0", SPITE]),
        ("raw", SPITE, ["h.0", SPITE]),
        ("rollout", "mamba", ["2 layers together"]),
        ("strip", SPITE, ["2 layers together"]),
    ]
    # The pattern is one of queries, which the strip has not.
    assert ["expected" in picture for picture in pictures(page)] == [True] * 5 + [False]
    assert len(pictures(pages.comparison(compared, batch=[0, 1]))) == 12
    assert_self_contained(compared._repr_html_())


def test_the_heading_names_target_token_and_logit() -> None:
    labels = {"method": "logit", "tokens": [list("abcd")] * 2, "extras": {"logit": torch.tensor([1.5, 2.5])}}
    mine = of_target(options={"logit": None, "target": -2}, **labels)
    assert "Explains the logit of the model&#x27;s prediction at position 2 “c” = 1.5." in mine.to_html()
    assert "position 2 “c” = 2.5." in mine.to_html(batch=1)
    both = mine.to_html(batch=[0, 1])
    assert "Sequence 0: Explains" in both and "Sequence 1: Explains" in both
    named = of_target(options={"logit": 7, "target": [0, 3]}, **labels)
    assert "Explains the logit of token 7 at position 0 “a” = 1.5." in named.to_html()
    pair = of_target(options={"logit": [7, 9], "target": 1}, **(labels | {"extras": {}}))
    assert "the difference of the logits of tokens 7 and 9 at position 1 “b”." in pair.to_html()
    every = make(options={"logit": None, "target": None})
    assert "Explains the logit of the model&#x27;s prediction for each query." in every.to_html()
    assert "Scores of the keys for each query." in make().to_html()
    generated = Attribution(
        scores=torch.rand(1, 2, 4),
        dims=("batch", "query", "key"),
        method="logit",
        tokens=[list("abcd")],
        query_tokens=[list("cd")],
        options={"logit": [7, 9], "target": [1, 2]},
        extras={"logit": torch.tensor([[1.5, 2.5]])},
    )
    page = generated.to_html()
    assert "Explains the logit of the generated token for each query." in page
    assert boards(page)[0]["texts"] == [["c", "d"], ["a", "b", "c", "d"]]
    assert pictures(page)[0]["facts"] == {"logit": [1.5, 2.5]}


def test_the_target_of_padded_tokens_counts_real_ones() -> None:
    mask = torch.tensor([[False, False, True, True], [True, True, True, True]])
    result = of_target(options={"target": -1}, tokens=[list("__ab"), list("cdef")], mask=mask)
    assert "at position 1 “b”." in result.to_html()
    assert pictures(result.to_html())[0]["columns"] == 2


def test_extras_of_each_query_are_listed_with_their_row() -> None:
    extras = {"gap": torch.ones(2, 2, 4), "bias": torch.arange(16.0).view(2, 2, 4), "logit": torch.zeros(2, 2, 4)}
    first, second = pictures(make(extras=extras | {"other": torch.ones(3)}).to_html(batch=1))
    assert list(first["facts"]) == ["logit", "bias"]
    assert (first["facts"]["bias"], second["facts"]["bias"]) == ([4, 5, 6, 7], [12, 13, 14, 15])


def test_warnings_stand_above_the_pictures() -> None:
    page = make(warnings=("h.0 misses",), left_out=("moe",)).to_html()
    assert page.index("h.0 misses") < page.index("left out, no adapter knows them: moe") < page.index('"ula-board"')
    assert "a, raw: h.0 misses" in Comparison({"a": {"raw": make(warnings=("h.0 misses",))}}).to_html()


@pytest.mark.parametrize(
    ("layers", "length", "megabytes"),
    [
        (4, 256, 1),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((24, 256, 2), (4, 1024, 4), (24, 1024, 4))),
    ],
)
def test_pages_are_small(layers: int, length: int, megabytes: float) -> None:
    # Noise of a wide range deflates less than scores of models.
    scores = (torch.randn(layers, length, length) * torch.randn(layers, length, length).exp()).tril()
    tokens = [[f"token{index}" for index in range(length)]]
    names = tuple(f"model.layers.{index}.self_attn" for index in range(layers))
    result = Attribution(scores=scores, dims=("layer", "query", "key"), method="raw", tokens=tokens, layers=names)
    page = result.to_html()
    assert len(page.encode()) < megabytes * 1e6
    assert ("each cell of a map is the largest of 3 x 3" in page) == (layers * length > 8192)


def test_a_page_of_blocks() -> None:
    sections = [
        (f"Part {SPITE}", blocks.paragraph(SPITE) + blocks.facts({"a": SPITE, "b": None, "c": 0})),
        ("Two", blocks.group("Three", blocks.paragraph("x"), note=SPITE)),
        ("Four", blocks.details(SPITE, blocks.paragraph("y"))),
    ]
    outline = assert_self_contained(blocks.page(SPITE, iter(sections), lead=SPITE))
    assert outline.references == ["#part-0", "#part-1", "#part-2"]
    assert outline.words.count(SPITE) == 7
    assert "<nav" not in blocks.page("t", sections[:2])
    assert "<dt>c</dt><dd>0</dd>" in sections[0][1]
    assert "<dt>b</dt>" not in sections[0][1]


def test_a_table_aligns_numbers_and_stresses_cells() -> None:
    rows = [("mamba", 0.98765, 3, 1.25e-7, True), (SPITE, 0.5, "-", 0.0, False)]
    table = blocks.table(("model", "AUC", "rows", "error", "exact"), rows, caption=SPITE, strong={(0, 1)})
    assert '<th class="num">AUC</th>' in table
    assert '<td class="num strong">0.988</td>' in table
    assert '<td class="num">-</td>' in table
    assert '<td class="num">1.2e-07</td>' in table
    assert '<td class="num">0</td>' in table
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
    (data,) = boards(text)
    assert data["cells"][0]["apart"] is True
    # The stored scores are whole: the scale of the colours is the reader's choice.
    assert (pictures(text)[0]["query"], pictures(text)[0]["scale"]) == (3, pytest.approx(0.7))
    assert boards(make().to_html())[0]["cells"][0]["apart"] is False
    drawn = result.plot().axes[0].images[0].get_array()
    assert drawn.mask.tolist() == [[False, False, False, True]] and drawn[0, 1] == 1


def test_attention_sinks_are_apart_and_not_among_the_largest_scores() -> None:
    labels = {"method": "logit", "options": {"target": -1}, "tokens": [["a", "b", "c", "d"]] * 2}
    labels |= {"sinks": [[0], []], "layers": (), "kinds": (), "reconstruction_error": {}}
    result = of_target(scores=torch.tensor([[90.0, 0.1, 0.2, 0.7]] * 2), **labels)
    text = result.to_html(batch=[0, 1])
    assert [picture.get("sinks") for picture in pictures(text)] == [[0], None]
    cells = re.findall(r"<td>([^<]*)</td>", text)
    assert [one for one in cells if "“d” 0.7" in one] == [
        "3 “d” 0.7, 2 “c” 0.2, 1 “b” 0.1",
        "0 “a” 90, 3 “d” 0.7, 2 “c” 0.2, 1 “b” 0.1",
    ]
    # The stored scores are whole: the reader can bring the sinks in.
    assert pictures(text)[0]["scale"] == pytest.approx(90)
    axes = result.plot().axes[0]
    drawn, grey = (image.get_array() for image in axes.images)
    assert drawn.mask.tolist() == [[True, False, False, True]] and drawn[0, 2] == 1
    assert grey.mask.tolist() == [[False, True, True, True]]


@pytest.mark.long
def test_pooled_pages_leave_attention_sinks_out() -> None:
    scores = torch.ones(2600, 2600)
    scores[:, 0] = 90
    result = Attribution(scores=scores, dims=("query", "key"), method="raw", sinks=[[0]])
    (picture,) = pictures(result.to_html())
    assert picture["step"] > 1 and picture["scale"] == 1 and "sinks" not in picture


def test_the_heading_of_a_comparison_names_each_prediction_once() -> None:
    logit = of_target(scores=torch.rand(2, 4), options={"logit": None, "target": -1}, logit_names=[["Paris"], ["x"]])
    raw = of_target(scores=torch.rand(2, 4), options={"target": -1})
    same = Comparison({name: {"raw": raw, "logit": logit} for name in "ab"}).to_html()
    assert same.count("prediction “Paris”") == 1
    other = replace(logit, logit_names=[["London"], ["x"]])
    page = Comparison({"a": {"raw": raw, "logit": logit}, "b": {"logit": other}}).to_html()
    assert "a: Explains the logit of the model&#x27;s prediction “Paris”" in page
    assert "b: Explains the logit of the model&#x27;s prediction “London”" in page and "Scores of the keys" not in page

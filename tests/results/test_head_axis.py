"""Results with a head axis: labels, selections, files, tables, words, figures and pages."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.results.samples import BATCH, LAYERS, LENGTH, assert_same, make
from unilinattn.errors import InputError
from unilinattn.results.attribution import Attribution
from unilinattn.results.boards import cell
from unilinattn.results.comparison import Comparison
from unilinattn.results.labels import Header
from unilinattn.results.panels import counts_residual, largest_heads, panels
from unilinattn.viz.packing import MOST_CELLS

HEADS = (2, 5, 7)


def with_heads(**changes: Any) -> Attribution:
    extras = {"bias": torch.randn(LAYERS, BATCH, LENGTH), "by head": torch.randn(LAYERS, BATCH, 3, LENGTH)}
    values = {
        "scores": torch.randn(LAYERS, BATCH, 3, LENGTH, LENGTH),
        "dims": ("layer", "batch", "head", "query", "key"),
        "heads": HEADS,
        "extras": {**extras, "other": torch.arange(3)},
    }
    return make(**(values | changes))


def many(heads: int, length: int = LENGTH, layers: int = LAYERS, **changes: Any) -> Attribution:
    """A result whose head h has scores of about h + 1 in the first layer, and the reverse in the others."""
    size = torch.arange(1.0, heads + 1).expand(layers, heads).clone()
    size[1:] = size[1:].flip(1)
    scores = (size[:, :, None, None] * (1 + torch.rand(layers, heads, length, length) / 99)).tril()
    values = {
        "scores": scores,
        "dims": ("layer", "head", "query", "key"),
        "heads": None,
        "tokens": None,
        "mask": None,
        "extras": {},
        "layers": tuple(f"h.{k}" for k in range(layers)),
        "kinds": (),
        "reconstruction_error": {},
    }
    return make(**(values | changes))


def test_a_result_names_its_heads() -> None:
    result = with_heads()
    assert result.sizes["head"] == 3 and result.head_names == ("head 2", "head 5", "head 7")
    assert "batch 2, head 3, query 5" in repr(result)
    channels = with_heads(head_kind="channel", heads=None)
    assert channels.head_names == ("channel 0", "channel 1", "channel 2")
    assert "head 3 (channels)" in repr(channels)
    assert make().head_names == () and make().heads is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": (1, 2)}, r"The scores have 3 heads; got heads=\(1, 2\)"),
        ({"heads": (1, 1, 2)}, "different indices from 0"),
        ({"heads": (-1, 1, 2)}, "different indices from 0"),
        ({"head_kind": "neuron"}, "head_kind"),
        ({"dims": ("layer", "head", "batch", "query", "key")}, "in this order"),
    ],
)
def test_wrong_labels_of_heads_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        with_heads(**changes)
    with pytest.raises(InputError, match="no head axis, so that heads names one at most"):
        make(heads=(1, 2))


def test_a_head_is_selected_by_its_index_in_the_layer() -> None:
    result = with_heads()
    one = result.select(head=5)
    assert one.dims == ("layer", "batch", "query", "key") and one.heads == (5,)
    assert torch.equal(one.scores, result.scores[:, :, 1])
    assert torch.equal(one.extras["bias"], result.extras["bias"])
    assert torch.equal(one.extras["by head"], result.extras["by head"][:, :, 1])
    assert "other" not in one.extras
    every = result.select(layer=1, batch=0, head=7)
    assert every.dims == ("query", "key")
    assert torch.equal(every.scores, result.scores[1, 0, 2])
    assert torch.equal(every.extras["bias"], result.extras["bias"][1, 0])
    assert [panel.name for panel in panels(every)] == ["h.1 · head 7"]
    with pytest.raises(InputError, match="head 1 is not in this result; it has 2, 5, 7"):
        result.select(head=1)
    with pytest.raises(InputError, match="channel 3 is not in this result; it has 0 to 2"):
        with_heads(heads=None, head_kind="channel").select(head=3)
    with pytest.raises(InputError, match="no head axis"):
        make().select(head=0)


def test_files_keep_the_heads_and_those_without_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for result in (with_heads(), with_heads().select(head=2), with_heads(head_kind="channel")):
        assert_same(Attribution.load(result.save(tmp_path / "result.safetensors")), result)
    # A file written before results had heads.
    dump = Header.model_dump_json
    left_out = {"heads", "head_kind"}
    monkeypatch.setattr(Header, "model_dump_json", lambda header: dump(header, exclude=left_out))
    result = make()
    path = result.save(tmp_path / "old.safetensors")
    monkeypatch.undo()
    assert b"head_kind" not in path.read_bytes()
    assert_same(Attribution.load(path), result)


def test_tables_name_the_heads() -> None:
    result = with_heads()
    array = result.to_xarray()
    assert array.dims == result.dims and array.coords["head"].values.tolist() == [2, 5, 7]
    assert float(array.sel(head=5)[0, 0, 0, 0]) == result.scores[0, 0, 1, 0, 0].item()
    frame = result.to_dataframe()
    assert list(frame.columns)[:4] == ["layer", "kind", "batch", "head"]
    assert len(frame) == 3 * len(make().to_dataframe())
    for row in frame.sample(10, random_state=0).itertuples():
        place = result.layers.index(row.layer), row.batch, HEADS.index(row.head), row.query, row.key
        assert row.score == result.scores[place].item()
    assert np.asarray(result).shape == (2, 2, 3, 5, 5)


def test_words_and_spans_are_merged_in_each_head() -> None:
    ids = [[0, 0, 1, 1, 2], [0, 1, 1, None, None]]
    result = with_heads(word_ids=ids, extras={"bias": torch.randn(LAYERS, BATCH, LENGTH)})
    words = result.words()
    assert words.heads == HEADS and words.scores.shape == (2, 2, 3, 3, 3)
    for head in HEADS:
        one, merged = result.select(head=head).words(), words.select(head=head)
        assert torch.equal(one.scores, merged.scores)
        assert torch.equal(one.extras["bias"], merged.extras["bias"])
    spans = [[(0, 2)], [(1, 3)]]
    merged = result.spans(spans, unit="tokens")
    assert torch.equal(merged.select(head=5).scores, result.select(head=5).spans(spans, unit="tokens").scores)


def test_the_largest_heads_are_those_with_the_largest_sums() -> None:
    result = many(40)
    assert largest_heads(result, batch=0, each=24) == [list(range(16, 40)), list(range(24))]
    assert largest_heads(result, batch=0, total=2) == [[39], [0]]
    assert largest_heads(many(3), batch=0, each=24) == [[0, 1, 2]] * 2


def titles(figure: Any) -> list[str]:
    return [axes.get_title(loc="left") for axes in figure.axes if axes.get_title(loc="left")]


@pytest.mark.long
def test_a_layer_is_small_multiples_of_its_heads() -> None:
    figure = with_heads().plot(layer=0)
    assert titles(figure) == ["head 2", "head 5", "head 7"]
    assert figure.get_suptitle() == "latim of tiny, scope layer, h.0"
    both = with_heads().plot()
    assert titles(both)[::3] == ["h.0 · head 2", "h.1 · head 2"]
    capped = many(40, head_kind="channel").plot(layer=1)
    assert titles(capped) == [f"channel {k}" for k in range(24)]
    assert capped.get_suptitle().endswith("\n24 of 40 channels, the largest by sum of absolute scores")
    assert len(titles(many(40).plot())) == 24
    assert "24 of 80 heads" in many(40).plot().get_suptitle()
    with pytest.raises(
        InputError, match=r"the result has 3 heads; choose one by `result.select\(layer=..., head=...\)`"
    ):
        with_heads().plot(layer=0, ax=figure.axes[0])
    assert titles(with_heads().select(head=5).plot()) == ["h.0 · head 5", "h.1 · head 5"]


def test_the_heads_of_a_target_are_the_rows_of_one_picture() -> None:
    result = with_heads(scores=torch.rand(LAYERS, BATCH, 3, LENGTH), dims=("layer", "batch", "head", "key"), extras={})
    made = panels(result)
    assert [panel.values.shape for panel in made] == [(3, 5)] * 2
    assert made[0].row_tokens == ("head 2", "head 5", "head 7")
    axes = result.plot(layer=0).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["2", "5", "7"]
    assert axes.get_ylabel() == "head"
    pictures = cell(result, "latim", "tiny", batches=[0]).pictures
    assert [picture.row_titles for picture in pictures] == [("head 2", "head 5", "head 7")] * 2


def test_the_pictures_of_a_page_are_by_layer_and_head() -> None:
    result = with_heads()
    pictures = cell(result, "latim", "tiny", batches=[1]).pictures
    assert [(p.title, p.head) for p in pictures] == [(t, f"head {h}") for t in ("h.0", "h.1") for h in HEADS]
    np.testing.assert_array_equal(pictures[4].values, result.scores[1, 1, 1, :3, :3].numpy())
    # The extras of a layer stand with each of its heads.
    np.testing.assert_allclose(pictures[4].facts["bias"], result.extras["bias"][1, 1, :3].numpy())
    assert "by head" not in pictures[4].facts
    image = with_heads(
        scores=torch.rand(LAYERS, BATCH, 3, LENGTH), dims=("layer", "batch", "head", "key"), grid=(2, 2), mask=None
    )
    pictures = cell(image, "latim", "tiny", batches=[0]).pictures
    np.testing.assert_allclose(pictures[4].values[0], image.scores[1, 0, 1].numpy())


@pytest.mark.parametrize(("heads", "length", "layers", "shown"), [(40, 5, 2, 24), (30, 256, 2, 24), (12, 128, 24, 11)])
def test_a_page_has_the_largest_heads_and_says_so(heads: int, length: int, layers: int, shown: int) -> None:
    result = many(heads, length, layers)
    pictures = cell(result, "raw", "tiny", batches=[0]).pictures
    assert len(pictures) == shown * layers
    stored = length * (length + 1) // 2
    assert len(pictures) * stored <= MOST_CELLS < (shown + 1) * layers * stored or shown == 24
    page = result.to_html()
    assert f"In each layer: {shown} of {heads} heads, the largest by sum of absolute scores" in page
    assert ("draws 12 of one layer" in page) == (shown == 11)
    # No map is pooled: every token has its row.
    assert "each cell of a map is the largest" not in page
    if length == 128:
        assert len(page) < 4e6


def test_a_page_with_all_heads_says_nothing_of_them() -> None:
    assert "largest by sum" not in with_heads().to_html()
    text = Comparison({"a": {"raw": many(40)}, "b": {"raw": many(3)}}).to_html()
    assert re.findall(r"<p>(\w, raw): In each layer: 24 of 40", text) == ["a, raw"]


def test_the_stream_is_no_part_of_shares_by_head() -> None:
    assert counts_residual(make(method="alti"))
    for options in ({"by_head": True}, {"by_head": False, "heads": [1]}):
        assert not counts_residual(with_heads(method="alti", options=options))

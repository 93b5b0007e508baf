"""Matplotlib figures: arrays, colours, labels, outlines, and global state."""

import math
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.text import Text

from unilinattn.errors import InputError, OptionError
from unilinattn.results import plots as figures
from unilinattn.results.attribution import Attribution
from unilinattn.results.comparison import Comparison
from unilinattn.viz.colours import outline, relative


def make(**changes: object) -> Attribution:
    values: dict[str, object] = {
        "scores": torch.rand(2, 2, 4, 4).tril(),
        "dims": ("layer", "batch", "query", "key"),
        "method": "latim",
        "scope": "layer",
        "tokens": [["a", "$x_", "c", "a long token"], list("efgh")],
        "layers": ("h.0", "h.1"),
        "kinds": ("dense", "Toeplitz"),
        "model": "tiny",
        "reconstruction_error": {"h.0": 1e-7, "h.1": 3e-7},
    }
    return Attribution(**(values | changes))


def of_target(**changes: object) -> Attribution:
    return make(**({"scores": torch.rand(2, 2, 4), "dims": ("layer", "batch", "key")} | changes))


def images(figure: Figure) -> list[np.ndarray]:
    return [np.asarray(axes.images[0].get_array()) for axes in figure.axes if axes.images]


def lines(figure: Figure) -> list[LineCollection]:
    drawn = [axes for axes in figure.axes if axes.images]
    return [c for axes in drawn for c in axes.collections if isinstance(c, LineCollection)]


def assert_nothing_is_cut_off(figure: Figure) -> None:
    figure.draw_without_rendering()
    whole = figure.bbox.padded(1)
    for text in figure.findobj(Text):
        if text.get_visible() and text.get_text() and not math.isnan(text.get_window_extent().x0):
            box = text.get_window_extent()
            inside = whole.x0 <= box.x0 and whole.y0 <= box.y0 and box.x1 <= whole.x1 and box.y1 <= whole.y1
            assert inside, (text.get_text(), box)


def test_each_layer_is_a_heat_map() -> None:
    result = make()
    figure = result.plot(batch=1)
    figure.canvas.draw()
    drawn = images(figure)
    assert len(drawn) == 2
    for layer, image in enumerate(drawn):
        scores = result.scores[layer, 1].double().numpy()
        np.testing.assert_allclose(image, relative(scores))
    first = figure.axes[0]
    assert first.get_title(loc="left") == "h.0"
    assert [text.get_text() for text in first.get_xticklabels()] == list("efgh")
    assert [text.get_text() for text in first.get_yticklabels()] == list("efgh")
    assert any("dense, error 1.0e-07, largest" in text.get_text() for text in first.texts)


def test_tokens_are_drawn_verbatim() -> None:
    figure = make().plot()
    figure.canvas.draw()
    labels = [text.get_text() for text in figure.axes[0].get_xticklabels()]
    assert labels == ["a", r"\$x_", "c", "a long to…"]


def test_colours_diverge_around_zero_only_for_negative_scores() -> None:
    plain, scores = make().plot().axes[0].images[0], torch.randn(2, 2, 4, 4)
    assert plain.get_clim() == (0, 1)
    signed = make(scores=scores).plot().axes[0].images[0]
    assert signed.get_clim() == (-1, 1)
    assert np.allclose(signed.get_cmap()(0.5)[:3], 1.0, atol=0.02)
    assert plain.get_cmap()(0.0)[:3] == (1.0, 1.0, 1.0)


def test_the_expected_pattern_is_outlined() -> None:
    expected = torch.eye(4, dtype=torch.bool)
    figure = make().plot(expected=expected)
    (first, second) = lines(figure)
    assert len(first.get_segments()) == len(second.get_segments()) == len(outline(expected.numpy()))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["expected"]
    assert lines(make().plot()) == []
    with pytest.raises(InputError, match="expected"):
        make().plot(expected=torch.eye(3, dtype=torch.bool))


def test_a_target_is_one_strip_per_layer_with_tokens_below_the_last() -> None:
    figure = of_target().plot(expected=torch.eye(4, dtype=torch.bool)[:2])
    figure.canvas.draw()
    assert [image.shape for image in images(figure)] == [(1, 4), (1, 4)]
    assert list(figure.axes[0].get_xticks()) == []
    assert figure.axes[1].get_xticklabels()[0].get_text() == "a"
    assert len(lines(figure)) == 2


def test_the_title_of_a_target_names_its_logit() -> None:
    extras = {"logit": torch.tensor([[1.5, 2.5]] * 2)}
    options = {"logit": None, "target": 1}
    result = of_target(extras=extras, options=options, logit_names=[["$p"], ["q"]], tokens=[list("abcd")] * 2)
    for batch, words in enumerate((r"'\$p' at position 1 'b' = 1.5", "'q' at position 1 'b' = 2.5")):
        title = result.plot(batch=batch).get_suptitle()
        assert "logit of the model's prediction " + words in " ".join(title.split())
    assert "position" not in make(options=options | {"target": None}).plot().get_suptitle()
    long = result.plot()
    long.canvas.draw()
    (box,) = [text.get_window_extent() for text in long.findobj(Text) if text.get_text() == long.get_suptitle()]
    assert box.x1 <= long.bbox.x1


def test_an_image_is_a_map_of_patches() -> None:
    result = of_target(grid=(2, 2), tokens=None)
    patches = result.scores[1, 0].view(2, 2).double().numpy()
    np.testing.assert_allclose(images(result.plot())[1], relative(patches))


def test_many_layers_fill_a_grid_and_leave_the_rest_empty() -> None:
    figure = Attribution(scores=torch.rand(9, 50, 50), dims=("layer", "query", "key"), method="raw").plot()
    figure.canvas.draw()
    assert len(images(figure)) == 9
    panels = figure.axes[:12]
    assert [axes.axison for axes in panels] == [True] * 9 + [False] * 3
    assert [text.get_text() for text in panels[0].get_xticklabels()] == [str(k) for k in range(0, 50, 8)]


def test_nan_and_zero_are_blank() -> None:
    scores = torch.zeros(3, 3)
    Attribution(scores=scores, dims=("query", "key"), method="raw").plot().canvas.draw()
    scores[0, 0] = torch.nan
    figure = Attribution(scores=scores, dims=("query", "key"), method="raw").plot()
    figure.canvas.draw()
    assert np.ma.getmaskarray(figure.axes[0].images[0].get_array())[0, 0]


def test_a_comparison_has_models_as_columns_and_methods_and_layers_as_rows() -> None:
    composed = make(scores=torch.rand(2, 4, 4), dims=("batch", "query", "key"), method="rollout")
    compared = Comparison(
        {"mamba": {"raw": make(method="raw"), "rollout": composed}, "gpt": {"raw": make(method="raw")}}
    )
    figure = compared.plot(expected=torch.ones(2, 4, 4, dtype=torch.bool))
    figure.canvas.draw()
    grid = np.array(figure.axes[:6]).reshape(3, 2)
    assert [[bool(axes.images) for axes in row] for row in grid] == [[True, True], [True, True], [True, False]]
    assert [axes.get_title(loc="left") for axes in grid[:, 0]] == ["h.0", "h.1", "2 layers together"]
    assert "mamba" in [text.get_text() for text in grid[0, 0].texts]
    names = [text for axes in figure.axes[6:9] for text in axes.texts]
    assert [name.get_text() for name in names] == ["raw", "raw", "rollout"]
    assert_nothing_is_cut_off(figure)
    for name, row in zip(names, grid, strict=True):
        box, beside = name.get_window_extent(), row[0].get_window_extent()
        assert beside.y0 <= box.y0 and box.y1 <= beside.y1 and box.x1 <= beside.x0
    assert len(lines(figure)) == 5


def test_a_comparison_of_targets_outlines_a_pattern_of_keys() -> None:
    pattern = torch.tensor([[False, True, False, False], [False] * 4])
    one = of_target(scores=torch.rand(2, 4), dims=("batch", "key"))
    for expected in (pattern, pattern[0]):
        assert len(lines(Comparison({"a": {"logit": one}, "b": {"logit": one}}).plot(expected=expected))) == 2
    page = Comparison({"a": {"logit": one}}).to_html(expected=pattern)
    assert '"expected":[1,1]' in page


def test_a_comparison_of_targets_ignores_a_pattern_of_queries() -> None:
    figure = Comparison({"a": {"latim": of_target()}}).plot(expected=torch.ones(2, 4, 4, dtype=torch.bool))
    assert lines(figure) == []
    assert figure.legends == []


def test_a_notebook_shows_the_figure() -> None:
    figure = make().plot()
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert isinstance(pickle.loads(pickle.dumps(figure)), Figure)


@pytest.mark.slow
def test_global_state_is_unchanged(tmp_path: Path) -> None:
    code = f"""
import sys, torch, matplotlib
before = matplotlib.rcParams.copy()
from unilinattn.results.attribution import Attribution
Attribution(scores=torch.rand(3, 3), dims=("query", "key"), method="raw").plot().savefig({str(tmp_path / "a.png")!r})
assert "matplotlib.pyplot" not in sys.modules
assert matplotlib.rcParams.copy() == before
"""
    root = str(Path(figures.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_the_scale_is_labelled_at_square_roots() -> None:
    bar = make().plot().axes[-1]
    assert [text.get_text() for text in bar.get_yticklabels()] == ["0%", "1%", "10%", "25%", "50%", "100%"]
    np.testing.assert_allclose(bar.get_yticks(), np.sqrt([0, 0.01, 0.1, 0.25, 0.5, 1]))


def test_the_colour_bar_of_one_row_is_not_cut_off() -> None:
    one = of_target(scores=torch.randn(2, 4), dims=("batch", "key"))
    for figure in (one.plot(), of_target().plot(), Comparison({"a": {"logit": one}, "b": {"logit": one}}).plot()):
        assert_nothing_is_cut_off(figure)
        assert any("largest score" in text.get_text() for text in figure.findobj(Text))


def test_models_of_different_depth_keep_the_names_of_rows_and_axes() -> None:
    shallow = make().select(layer=0)
    figure = Comparison({"shallow": {"raw": shallow}, "deep": {"raw": make()}}).plot()
    assert_nothing_is_cut_off(figure)
    first, second, empty, last = figure.axes[:4]
    assert not empty.axison and last.images
    # The outer panel of each row and column has the tokens.
    assert [t.get_text() for t in first.get_yticklabels()] == ["a", r"\$x_", "c", "a long to…"]
    assert (first.get_ylabel(), second.get_ylabel(), last.get_ylabel()) == ("query", "", "query")
    assert (first.get_xlabel(), second.get_xlabel(), last.get_xlabel()) == ("key", "", "key")


def test_models_with_different_tokens_have_each_their_own() -> None:
    other = make(tokens=[list("wxyz")] * 2)
    figure = Comparison({"a": {"raw": make()}, "b": {"raw": other}}).plot()
    figure.canvas.draw()
    assert [t.get_text() for t in figure.axes[1].get_yticklabels()] == list("wxyz")
    assert [t.get_text() for t in figure.axes[1].get_xticklabels()] == list("wxyz")


def test_one_layer_by_position_or_name() -> None:
    result = make()
    for layer in (1, -1, "h.1"):
        (drawn,) = images(result.plot(layer=layer))
        np.testing.assert_allclose(drawn, relative(result.scores[1, 0].double().numpy()))
    with pytest.raises(OptionError, match=r"no layer 'h.2'"):
        result.plot(layer="h.2")
    compared = Comparison(
        {"a": {"raw": result, "rollout": make(scores=torch.rand(2, 4, 4), dims=("batch", "query", "key"))}}
    )
    assert len(images(compared.plot(layer=1))) == 2


def test_a_picture_in_given_axes() -> None:
    figure = Figure()
    left, right = figure.subplots(1, 2)
    assert make().plot(ax=right, layer=0) is figure
    assert not left.images and len(right.images) == 1
    with pytest.raises(InputError, match="has 2 layers; choose one by `layer`"):
        make().plot(ax=left)


def test_a_colour_map_and_a_limit_of_all_panels() -> None:
    result = make()
    figure = result.plot(cmap="viridis", vmax=0.5)
    first = figure.axes[0].images[0]
    assert first.get_cmap().name == "viridis" and first.get_clim() == (0, 1)
    np.testing.assert_allclose(images(figure)[1], np.sqrt(result.scores[1, 0].double().numpy() / 0.5))
    labels = [text.get_text() for text in figure.axes[-1].get_yticklabels()]
    assert labels == ["0", "0.005", "0.05", "0.125", "0.25", "0.5"]
    assert make().plot(cmap=first.get_cmap()).axes[0].images[0].get_cmap() == first.get_cmap()
    with pytest.raises(OptionError, match="did you mean 'viridis'"):
        result.plot(cmap="virids")
    for vmax in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(OptionError, match="`vmax` must be a positive number"):
            result.plot(vmax=vmax)


def test_the_picture_is_beneath_the_patches() -> None:
    result = of_target(grid=(2, 2), tokens=None)
    axes = result.plot(image=torch.rand(4, 4)).axes[0]
    below, above = axes.images
    assert below.get_array().shape == (4, 4) and below.get_extent() == above.get_extent()
    np.testing.assert_allclose(above.get_alpha(), 0.9 * relative(result.scores[0, 0].view(2, 2).double().numpy()))
    with pytest.raises(InputError, match="divided"):
        result.plot(image=torch.rand(3, 5))
    with pytest.raises(InputError, match="no grid"):
        make().plot(image=torch.rand(4, 4))
    compared = Comparison({"a": {"raw": result}})
    assert len(compared.plot(image=torch.rand(4, 4)).axes[0].images) == 2

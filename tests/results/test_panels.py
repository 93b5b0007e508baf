"""Panels: scores without padding, titles, notes, scales and outlines."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from unilinattn.errors import InputError
from unilinattn.results.attribution import Attribution
from unilinattn.results.panels import panels
from unilinattn.viz.colours import DIVERGING, SEQUENTIAL, largest, mix, outline, relative, shown


def result(shape: tuple[int, ...], *dims: str, **labels: object) -> Attribution:
    return Attribution(scores=torch.randn(shape), dims=dims, method="latim", **labels)


def test_each_layer_has_a_panel_with_name_mixer_and_error() -> None:
    two = result(
        (2, 3, 3),
        *("layer", "query", "key"),
        layers=("a", "b"),
        kinds=("dense", "Toeplitz"),
        reconstruction_error={"b": 2e-7},
    )
    first, second = panels(two)
    assert (first.kind, first.title, first.mixer, first.error) == ("matrix", "a", "dense", None)
    assert (second.title, second.error) == ("b", 2e-7)
    np.testing.assert_array_equal(second.values, two.scores[1].double().numpy())
    assert second.notes == ["error 2.0e-07", f"largest {two.scores[1].abs().max():.3g}"]


def test_composed_layers_are_one_panel_with_their_worst_error() -> None:
    labels = {"layers": ("a", "b"), "kinds": ("dense", "dense"), "reconstruction_error": {"a": 1e-7, "b": 3e-7}}
    (panel,) = panels(result((3, 3), "query", "key", **labels))
    assert (panel.title, panel.mixer, panel.error) == ("2 layers together", "dense x2", 3e-7)
    (chosen,) = panels(result((2, 3, 3), "layer", "query", "key", **labels).select(layer=0))
    assert (chosen.title, chosen.error) == ("a", 1e-7)


def test_padding_is_omitted_on_both_axes() -> None:
    mask = torch.tensor([[False, True, True, True], [True, True, False, False]])
    padded = result((2, 4, 4), "batch", "query", "key", mask=mask, tokens=[list("_abc"), list("de__")])
    expected = torch.eye(4, dtype=torch.bool)
    (left,), (right,) = panels(padded, batch=0, expected=expected), panels(padded, batch=1)
    np.testing.assert_array_equal(left.values, padded.scores[0, 1:, 1:].double().numpy())
    np.testing.assert_array_equal(right.values, padded.scores[1, :2, :2].double().numpy())
    assert (left.row_tokens, left.column_tokens) == (("a", "b", "c"), ("a", "b", "c"))
    assert left.expected is not None
    assert left.expected.tolist() == np.eye(3, dtype=bool).tolist()


def test_a_target_is_a_strip_or_a_grid_of_patches() -> None:
    strip = result((2, 4), "batch", "key", tokens=[list("abcd"), list("efgh")])
    (panel,) = panels(strip, batch=1, expected=torch.tensor([[False] * 4, [True, False, False, True]]))
    assert (panel.kind, panel.values.shape, panel.column_tokens) == ("strip", (1, 4), tuple("efgh"))
    assert panel.expected is not None
    assert panel.expected.tolist() == [[True, False, False, True]]

    image = result((7,), "key", grid=(2, 3))
    (patches,) = panels(image)
    assert patches.kind == "image"
    np.testing.assert_array_equal(patches.values, image.scores[1:].view(2, 3).double().numpy())
    middle = result((7,), "key", grid=(2, 3), tokens=[["", "", "", "[CLS]", "", "", ""]])
    np.testing.assert_array_equal(panels(middle)[0].values.ravel(), middle.scores[[0, 1, 2, 4, 5, 6]].double().numpy())


def test_the_target_s_own_key_is_apart_if_its_score_contains_the_residual_stream() -> None:
    mask = torch.tensor([[False, True, True, True], [True, True, True, True]])
    scores = torch.tensor([[0.0, 0.1, 0.2, 9.0], [0.3, 8.0, 0.1, 0.0]])
    labels = {"dims": ("batch", "key"), "mask": mask, "options": {"target": [-1, 1]}}
    composed = Attribution(scores=scores, method="rollout", **labels)
    (padded,), (second,) = panels(composed, batch=0), panels(composed, batch=1)
    np.testing.assert_allclose(padded.values, [[0.1, 0.2, np.nan]], rtol=1e-6)
    np.testing.assert_allclose(second.values, [[0.3, np.nan, 0.1, 0.0]], rtol=1e-6)
    assert (padded.own, second.own) == ((2, 9.0), (1, 8.0))
    assert padded.notes == ["largest of the other tokens 0.2", "the token itself and the residual stream 9"]
    assert composed.scores[0, 3] == 9.0
    for method, options in (
        ("latim", {"target": -1, "residual": False}),
        ("raw", {"target": -1}),
        ("rollout", {"target": None}),
        ("rollout", {}),
    ):
        plain = Attribution(scores=scores, method=method, **(labels | {"options": options}))
        assert panels(plain)[0].own is None
        assert panels(plain)[0].notes == ["largest 9"]
    (latim,) = panels(
        Attribution(scores=scores, method="latim", **(labels | {"options": {"target": -1, "residual": True}}))
    )
    assert latim.own == (2, 9.0)
    selected = composed.select(batch=1)
    assert selected.options["target"] == 1 and panels(selected)[0].own == (1, 8.0)


def test_attention_sinks_do_not_set_the_scale() -> None:
    mask = torch.tensor([[False, True, True, True]])
    row = torch.tensor([0.0, -90.0, 2.0, 1.0])
    (strip,) = panels(Attribution(scores=row, dims=("key",), method="logit", mask=mask, sinks=[[1]]))
    assert strip.values.tolist() == [[-90.0, 2.0, 1.0]]
    np.testing.assert_array_equal(strip.ranked, [[np.nan, 2.0, 1.0]])
    assert strip.notes == ["attention sinks in grey", "largest of the others 2"] and not strip.signed
    square = Attribution(scores=row.expand(4, 4), dims=("query", "key"), method="raw", mask=mask, sinks=[[1]])
    assert panels(square)[0].sinks.tolist() == [[True, False, False]] * 3
    # A register among the patches, and a class token outside of them.
    image = Attribution(
        scores=torch.arange(5.0), dims=("key",), method="raw", grid=(2, 2), patches=[1, 2, 3, 4], sinks=[[0, 3]]
    )
    assert panels(image)[0].sinks.tolist() == [[False, False], [True, False]]
    assert panels(Attribution(scores=row, dims=("key",), method="logit", sinks=[[]]))[0].sinks is None


def test_queries_and_keys_may_be_different_tokens() -> None:
    crossed = result((2, 4), "query", "key", tokens=[list("abcd")], mask=torch.tensor([[True, True, True, False]]))
    (panel,) = panels(crossed)
    assert panel.values.shape == (2, 3)
    assert (panel.row_tokens, panel.column_tokens) == (None, tuple("abc"))


def test_wrong_batches_and_shapes_are_refused() -> None:
    batched = result((2, 3, 3), "batch", "query", "key")
    with pytest.raises(InputError, match="out of range"):
        panels(batched, batch=2)
    with pytest.raises(InputError, match="one sequence"):
        panels(batched.select(batch=0), batch=1)
    with pytest.raises(InputError, match=r"\(2, 3, 3\) .batch, query, key.* \(3, 3\); got \(3, 2\)"):
        panels(batched, expected=torch.ones(3, 2, dtype=torch.bool))


@given(arrays(np.bool_, st.tuples(st.integers(1, 6), st.integers(1, 6))))
def test_the_outline_has_every_edge_of_the_pattern_once(pattern: np.ndarray) -> None:
    counts: dict[tuple[int, int, int, int], int] = {}
    for x0, y0, x1, y1 in outline(pattern):
        assert (x0 == x1) != (y0 == y1)
        pieces = (
            [(x, y0, x + 1, y0) for x in range(x0, x1)] if y0 == y1 else [(x0, y, x0, y + 1) for y in range(y0, y1)]
        )
        for piece in pieces:
            counts[piece] = counts.get(piece, 0) + 1
    edges = set()
    padded = np.pad(pattern, 1)
    for row in range(pattern.shape[0] + 1):
        for column in range(pattern.shape[1] + 1):
            here, left, above = (
                padded[row + 1, column + 1],
                padded[row + 1, column],
                padded[row, column + 1],
            )
            if here != above:
                edges.add((column, row, column + 1, row))
            if here != left:
                edges.add((column, row, column, row + 1))
    assert counts == dict.fromkeys(edges, 1)


def test_the_scale_keeps_sign_and_order() -> None:
    values = np.array([[-4.0, -1.0, 0.0, 1.0, 4.0, np.nan]])
    np.testing.assert_array_equal(relative(values), [[-1.0, -0.5, 0.0, 0.5, 1.0, np.nan]])
    np.testing.assert_array_equal(relative(np.zeros((1, 2))), [[0.0, 0.0]])
    assert largest(values) == 4.0
    assert largest(np.array([np.nan, np.inf, -1.0])) == 1.0


def test_colours_start_at_the_background_and_diverge_around_it() -> None:
    for theme, background in (("light", (255, 255, 255)), ("dark", (20, 23, 31))):
        assert mix(SEQUENTIAL[theme], 0.0) == background
        assert mix(DIVERGING[theme], 0.5) == background
    assert mix(("#000000", "#102030"), 0.5) == (8, 16, 24)
    assert mix(("#000000", "#102030"), 1.0) == (16, 32, 48)
    lightness = [sum(mix(SEQUENTIAL["light"], place / 50)) for place in range(51)]
    assert lightness == sorted(lightness, reverse=True)
    lightness = [sum(mix(SEQUENTIAL["dark"], place / 50)) for place in range(51)]
    assert lightness == sorted(lightness)


def test_unprintable_characters_are_escaped() -> None:
    assert shown("a\n\tb\x00") == r"a\n\tb\x00"
    assert shown("Ġthe 漢") == "Ġthe 漢"

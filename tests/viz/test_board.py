"""Boards: their JSON, escaping, tables and messages; tests/results/test_browser.py has their script."""

import json
import re
from typing import Any

import numpy as np
import pytest

from unilinattn.viz import packing
from unilinattn.viz.board import Cell, Picture, board

SPITE = "</script><img src=x onerror=alert(1)>&\"'"


def content(text: str) -> dict[str, Any]:
    scripts = re.findall(r'<script type="application/json">(.*?)</script>', text, re.DOTALL)
    assert len(scripts) == 1
    return json.loads(scripts[0])


def one(values: np.ndarray, **labels: Any) -> dict[str, Any]:
    ((picture,),) = (
        cell["pictures"] for cell in content(board([Cell("r", "c", [Picture(values, "t", **labels)])]))["cells"]
    )
    return picture


def test_labels_are_json_that_no_element_ends() -> None:
    picture = Picture(np.ones((2, 2)), SPITE, SPITE, row_tokens=[SPITE, "b"], column_tokens=[SPITE, "b"])
    text = board([Cell(SPITE, SPITE, [picture], notes=[SPITE])], columns={SPITE: SPITE})
    assert "<img" not in text and text.count("</script>") == text.count("<script") == 1
    data = content(text)
    (cell,) = data["cells"]
    assert (cell["row"], cell["column"], cell["notes"], data["columns"]) == (SPITE, SPITE, [SPITE], {SPITE: SPITE})
    (drawn,) = cell["pictures"]
    assert (drawn["title"], drawn["notes"]) == (SPITE, SPITE)
    # Equal texts of the two axes are stored once.
    assert data["texts"] == [[SPITE, "b"]] and drawn["rowTokens"] == drawn["columnTokens"] == 0


def test_a_picture_has_its_shape_scale_and_kind() -> None:
    values = np.tril(np.arange(9.0).reshape(3, 3))
    drawn = one(values, query=1, facts={"logit": [1.23456789, np.nan, 0.0]}, sequence=2)
    assert (drawn["rows"], drawn["columns"], drawn["scale"], drawn["step"]) == (3, 3, 8.0, 1)
    assert (drawn["causal"], drawn["query"], drawn["sequence"]) == (True, 1, 2)
    assert drawn["facts"] == {"logit": [1.2346, None, 0.0]}
    assert "causal" not in one(np.ones((3, 3))) and "later" not in one(values)
    assert one(np.ones((3, 3)), query=0)["query"] == 0


def test_rows_of_layers_that_read_no_later_key_say_so() -> None:
    values = np.array([[1.0, 2.0, 0.0], [3.0, 1.0, 0.0]])
    labels = {"row_titles": ["a", "b"], "column_tokens": list("xyz")}
    assert one(values, query=1, **labels)["later"]
    assert "later" not in one(values, query=0, **labels)
    assert "later" not in one(values, query=2, **labels)
    assert "later" not in one(values, **labels)
    # As many layers as tokens are no causal map.
    assert "causal" not in one(np.tril(np.ones((3, 3))), query=0, row_titles=list("abc"))


def test_the_expected_pattern_is_stored_as_runs() -> None:
    pattern = np.zeros((3, 3), dtype=bool)
    pattern[0, 1:] = pattern[1, 0] = pattern[2, 2] = True
    assert one(np.ones((3, 3)), expected=pattern)["expected"] == [1, 3, 8, 1]
    assert "expected" not in one(np.ones((3, 3)))


def test_the_table_ranks_by_absolute_score() -> None:
    values = np.array([[1.0, 0.0, 0.0], [0.5, -4.0, 0.0], [np.nan, 0.0, 0.0]])
    picture = Picture(values, "h.0", row_tokens=list("abc"), column_tokens=list("abc"))
    text = board([Cell("raw", "mamba", [picture])])
    assert "<td>1 “b”</td><td>1 “b” -4, 0 “a” 0.5</td>" in text
    layers = Picture(values, "3 layers", row_titles=["x", "y", "z"], column_tokens=list("abc"), query=1)
    text = board([Cell("raw", "mamba", [layers])])
    assert "<td>y</td>" in text and "<td>none</td>" in text and text.count("<td>1 “b”</td>") == 3


def test_the_precision_is_stated() -> None:
    text = board([Cell("r", "c", [Picture(np.ones((4, 5)), "t")])])
    assert "20 scores with a relative error of at most 0.0005" in text
    assert "largest of" not in text


def test_large_maps_are_pooled_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MOST_CELLS", 100)
    values, pattern = np.zeros((20, 20)), np.zeros((20, 20), dtype=bool)
    values[3, 2], pattern[3, 2] = -5.0, True
    tokens = [str(index) for index in range(20)]
    picture = Picture(
        values, "t", row_tokens=tokens, column_tokens=tokens, expected=pattern, facts={"logit": [1.0] * 20}
    )
    text = board([Cell("r", "c", [picture])], layer_hint="draw less")
    assert "each cell of a map is the largest of 2 x 2; draw less." in text
    data = content(text)
    ((drawn,),) = (cell["pictures"] for cell in data["cells"])
    assert (drawn["rows"], drawn["step"], drawn["expected"], data["texts"]) == (10, 2, [11, 1], [])
    assert "facts" not in drawn and data["count"] == 55
    # The table still has all scores.
    assert "<td>2 “2” -5</td>" in text

"""Formulas in plain text, as TeX."""

import pytest

from tools.typeset import markdown, typeset


@pytest.mark.parametrize(
    ("text", "formula"),
    [
        ("frozen: y_i = sum_j T_ij x_j + b_i, linear", r"frozen: $y_i = \sum_j T_{ij} x_j + b_i$, linear"),
        ("the part sum_i g_i . T_ij x_j of it", r"the part $\sum_i g_i \cdot T_{ij} x_j$ of it"),
        ("g_i abar_ij (Eq. 24) or y_i", r"$g_i \bar\alpha_{ij}$ (Eq. 24) or $y_i$"),
        ("alpha_ij = q_in exp(G_in - G_jn)", r"$\alpha_{ij} = q_{in} \exp(G_{in} - G_{jn})$"),
        ("p_ij = |a_ij| / sum_j |a_ij|", r"$p_{ij} = \lvert a_{ij} \rvert / \sum_j \lvert a_{ij} \rvert$"),
        ("||op(x) - y|| / ||y||", r"$\lVert \mathrm{op}(x) - y \rVert / \lVert y \rVert$"),
        ("[||y_i||_1 - ||T^h_i(x_j)||_1]^+", r"[$\lVert y_i \rVert_1 - \lVert T^h_i(x_j) \rVert_1$]^+"),
        ("so\n\n    y_i = x_i\n\nof y_i", "so\n\n    y_i = x_i\n\nof $y_i$"),
        ("exp(g_t) S_{t-1}, g_(j+1)n, H_t^T q_t", r"$\exp(g_t) S_{t-1}$, $g_{(j+1)n}$, $H_t^\top q_t$"),
    ],
)
def test_indexed_symbols_are_typeset(text: str, formula: str) -> None:
    assert typeset(text) == formula


@pytest.mark.parametrize("text", ["`T_ij x_j`", "```python\ny_i\n```", "so\n\n    y_i = x_i\n", "by_head and row_i"])
def test_code_and_names_are_left_as_they_are(text: str) -> None:
    assert typeset(text) == text


def test_an_example_of_a_docstring_is_a_block_of_code() -> None:
    docstring = "Return x_i.\n\n>>> x_i = 1\n>>> x_i\n1\n\nArgs:\n    x: x_i."
    assert markdown(docstring) == "Return $x_i$.\n\n```pycon\n>>> x_i = 1\n>>> x_i\n1\n```\n\nArgs:\n    x: $x_i$."

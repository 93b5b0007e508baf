"""Formulas and examples of docstrings, which are plain text in a terminal, as Markdown for the documentation."""

import re

_GREEK = ("alpha", "delta", "rho", "phi")
_NAMES = {"sum": r"\sum", "prod": r"\prod", "exp": r"\exp", "abar": r"\bar\alpha", **{n: rf"\{n}" for n in _GREEK}}
_INDEX = r"_(?:\{[^{}]+\}|\([^()]+\)[a-z]?|\d|[ijlt](?!\w)|[a-z]{1,3}(?![\w(]))"
_POWER = r"\^(?:\{[^{}]+\}|-?\w)"
_MARKS = rf"(?:{_INDEX}(?:{_POWER})?|{_POWER}(?:{_INDEX})?)"
_SYMBOL = rf"(?:sum|prod|abar|{'|'.join(_GREEK)}|[A-Za-z])'?{_MARKS}"
_NORM = r"\|\|[^|`\n]{1,40}\|\|(?:_\w)?"
_TERM = rf"(?:{_NORM}|\|{_SYMBOL}\||exp\({_SYMBOL}(?: [+-] {_SYMBOL})*\)|{_SYMBOL}(?:\({_SYMBOL}\))?)"
_FORMULA = re.compile(rf"(?<![\w`.'/|]){_TERM}(?:(?: [.=+/-])? {_TERM})*")
_CODE = re.compile(r"(```.*?```|`[^`]*`|\n\n(?: {4}[^\n]*\n?)+)", re.S)
_EXAMPLE = re.compile(r"(?:^>>> .*\n(?:.+\n?)*)+", re.M)


def markdown(docstring: str) -> str:
    """Return a docstring with its examples as blocks of code and its formulas as TeX."""
    return typeset(_EXAMPLE.sub(lambda example: f"```pycon\n{example[0].rstrip()}\n```\n", docstring))


def typeset(text: str) -> str:
    """Return Markdown with its products, sums, norms and equations of indexed symbols as TeX.

    `y_i = sum_j T_ij x_j + b_i` becomes a formula, and so does each run of such symbols inside of other text. Code
    does not change.
    """
    pieces = _CODE.split(text)
    pieces[::2] = [_FORMULA.sub(_tex, prose) for prose in pieces[::2]]
    return "".join(pieces)


def _tex(match: re.Match[str]) -> str:
    tex = re.sub(r"_(\([^()]+\)[a-z]?|\w{2,})", r"_{\1}", match[0])
    tex = re.sub(r"\^(-\w)", r"^{\1}", tex).replace("^T", r"^\top").replace(" . ", r" \cdot ")
    tex = re.sub(r"(?<![_{\\\w])[a-z]{2,}", lambda word: _NAMES.get(word[0], rf"\mathrm{{{word[0]}}}"), tex)
    tex = re.sub(r"\|\|(.*?)\|\|", r"\\lVert \1 \\rVert", tex)
    return "$" + re.sub(r"\|(.*?)\|", r"\\lvert \1 \\rvert", tex) + "$"

"""Formulas of docstrings and of descriptions, which are plain text in a terminal, as TeX in the documentation."""

import re

_NAMES = {"sum": r"\sum", "prod": r"\prod", "abar": r"\bar\alpha"}
_NAMES |= {name: rf"\{name}" for name in ("alpha", "delta", "rho", "phi", "exp")}
_INDEX = r"_(?:\{[^{}]+\}|\([^()]+\)[a-z]?|\d|[a-z]{1,3}(?![\w(]))"
_POWER = r"\^(?:\{[^{}]+\}|-?\w)"
_SYMBOL = rf"(?:sum|prod|alpha|abar|delta|rho|phi|[A-Za-z])'?(?:{_INDEX}(?:{_POWER})?|{_POWER}(?:{_INDEX})?)"
_TERM = rf"(?:exp\({_SYMBOL}(?: [+-] {_SYMBOL})*\)|{_SYMBOL})"
_FORMULA = re.compile(rf"(?<![\w`.'/]){_TERM}(?:(?: [.=+-])? {_TERM})*")
_CODE = re.compile(r"(```.*?```|`[^`]*`|^ *>>>.*$)", re.S | re.M)


def typeset(text: str) -> str:
    """Return Markdown with its products, sums and equations of indexed symbols as TeX.

    `y_i = sum_j T_ij x_j + b_i` becomes a formula, and so does each run of such symbols inside of other text. Code is
    left as it is.
    """
    parts = _CODE.split(text)
    parts[::2] = [_FORMULA.sub(_tex, part) for part in parts[::2]]
    return "".join(parts)


def _tex(match: re.Match[str]) -> str:
    tex = re.sub(r"_(\([^()]+\)[a-z]?|\w{2,})", r"_{\1}", match[0])
    tex = re.sub(r"\^(-\w)", r"^{\1}", tex).replace("^T", r"^\top").replace(" . ", r" \cdot ")
    return "$" + re.sub(r"[a-z]{3,}(?=[_^'(])", lambda name: _NAMES.get(name[0], name[0]), tex) + "$"

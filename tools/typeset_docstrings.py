"""An extension of griffe, which mkdocs loads: the API reference sets the formulas of docstrings."""

from typing import Any

import griffe

from tools.typeset import typeset


class TypesetDocstrings(griffe.Extension):
    """Replaces the formulas of each docstring by TeX."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Typeset the docstring of an object."""
        if obj.docstring:
            obj.docstring.value = typeset(obj.docstring.value)

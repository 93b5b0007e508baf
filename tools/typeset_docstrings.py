"""An extension of griffe, which mkdocs loads: the API reference sets the formulas and the examples of docstrings."""

from typing import Any

import griffe

from tools.typeset import markdown


class TypesetDocstrings(griffe.Extension):
    """Replaces each docstring by its Markdown."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Typeset the docstring of an object."""
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)

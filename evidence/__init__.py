"""Which method finds the truth, on which architecture: studies on trained models with known answers."""

import importlib

from evidence.study import Study
from unilinattn.errors import OptionError, nearest

NAMES = (
    "vision",
    "alignment",
    "retrieval",
    "copying",
    "induction",
    "reasoning",
    "theorems",
    "removal",
    "edges",
    "ablation",
)
"""The studies, in the order of the page; each is a module with a `STUDY`."""


def study(name: str) -> Study:
    """Return a study by name.

    Raises `OptionError` for an unknown name, and `MissingExtraError` if a package that the study needs is missing.
    """
    if name not in NAMES:
        raise OptionError(f"unknown study {name!r}{nearest(name, NAMES)}")
    return importlib.import_module(f"evidence.{name}").STUDY

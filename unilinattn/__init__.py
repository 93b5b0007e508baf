"""unilinattn: the attention matrix hidden in linear RNNs and Transformers, extracted exactly and explained.

`trace` runs a model once and returns its token-mixing layers, each an exact `MixerOperator`; `explain` and `compare`
turn them into scores, `evaluate` measures methods on a data set, and `estimate` returns the memory and operations of
`explain` beforehand. `explain_generation` explains every token that a model generates. `cut` runs a model without some
edges between tokens. `list_architectures` and `list_methods` return the registry. `analysis` has measurements of layers
and models beyond scores.
"""

import importlib

# Imported first: torch takes seconds to import, and Ctrl-C may arrive meanwhile.
from unilinattn import startup as _startup  # noqa: F401  the import installs the handler

# isort: split
from typing import TYPE_CHECKING, Any

from unilinattn import architectures, methods  # noqa: F401  importing them registers the adapters and the methods
from unilinattn.errors import UnilinattnError
from unilinattn.methods.generation import explain_generation
from unilinattn.methods.run import compare, estimate, explain
from unilinattn.operator.flow import Flow
from unilinattn.operator.operator import MixerOperator
from unilinattn.registry import list_architectures, list_methods, register_architecture, register_method
from unilinattn.results.attribution import Attribution
from unilinattn.results.comparison import Comparison
from unilinattn.tracing.cutting import cut
from unilinattn.tracing.substitution import through_operators
from unilinattn.tracing.trace import Trace, trace

if TYPE_CHECKING:
    from unilinattn.evaluation.evaluate import evaluate

__version__ = "0.1.0"

__all__ = [
    "Attribution",
    "Comparison",
    "Flow",
    "MixerOperator",
    "Trace",
    "UnilinattnError",
    "compare",
    "cut",
    "estimate",
    "evaluate",
    "explain",
    "explain_generation",
    "list_architectures",
    "list_methods",
    "register_architecture",
    "register_method",
    "through_operators",
    "trace",
]


def __getattr__(name: str) -> Any:
    # Imported on first use, so that the import of the package stays quick.
    if name == "analysis":
        return importlib.import_module("unilinattn.analysis")
    if name == "evaluate":
        return importlib.import_module("unilinattn.evaluation.evaluate").evaluate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "analysis"})

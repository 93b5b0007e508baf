"""unilinattn: the attention matrix hidden in linear RNNs and Transformers, extracted exactly and explained.

`trace` runs a model once and returns its token-mixing layers, each an exact `MixerOperator`; `explain` and `compare`
turn them into scores, `evaluate` measures methods on a data set, and `estimate` returns the memory of `explain`
beforehand. `explain_generation` explains every token that a model generates. `effects` replaces tokens and tells what
they sent from what they decided. `cut` runs a model without some edges between tokens. `list_architectures` and
`list_methods` return the registry. `analysis` has measurements of layers and models beyond scores.
"""

import importlib
import importlib.util

# Imported first: torch takes seconds to import, and Ctrl-C may arrive meanwhile.
from unilinattn import startup as _startup  # noqa: F401  the import installs the handler

# isort: split
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unilinattn import analysis, methods
    from unilinattn.errors import UnilinattnError
    from unilinattn.evaluation.evaluate import evaluate
    from unilinattn.host.substitution import through_operators
    from unilinattn.methods.effects import effects
    from unilinattn.methods.generation import explain_generation
    from unilinattn.methods.run import compare, estimate, explain
    from unilinattn.operator.flow import Flow
    from unilinattn.operator.operator import MixerOperator
    from unilinattn.registry import list_architectures, list_methods, register_architecture, register_method
    from unilinattn.reruns.cut import cut
    from unilinattn.results.attribution import Attribution
    from unilinattn.results.comparison import Comparison
    from unilinattn.rules.mixing_functions import register_mixing_function
    from unilinattn.tracing.trace import Trace, trace

__version__ = "0.1.0"

__all__ = [
    "Attribution",
    "Comparison",
    "Flow",
    "MixerOperator",
    "Trace",
    "UnilinattnError",
    "analysis",
    "compare",
    "cut",
    "effects",
    "estimate",
    "evaluate",
    "explain",
    "explain_generation",
    "list_architectures",
    "list_methods",
    "methods",
    "register_architecture",
    "register_method",
    "register_mixing_function",
    "through_operators",
    "trace",
]

_HOMES = {
    "errors": ("UnilinattnError",),
    "evaluation.evaluate": ("evaluate",),
    "methods.effects": ("effects",),
    "methods.generation": ("explain_generation",),
    "methods.run": ("compare", "estimate", "explain"),
    "operator.flow": ("Flow",),
    "operator.operator": ("MixerOperator",),
    "registry": ("list_architectures", "list_methods", "register_architecture", "register_method"),
    "rules.mixing_functions": ("register_mixing_function",),
    "results.attribution": ("Attribution",),
    "results.comparison": ("Comparison",),
    "reruns.cut": ("cut",),
    "host.substitution": ("through_operators",),
    "tracing.trace": ("Trace", "trace"),
}
"""The public names by the module that defines them, which is imported with torch when a name is first used."""


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            # Importing these registers the adapters and the methods of this package, before those of a user.
            importlib.import_module("unilinattn.architectures")
            importlib.import_module("unilinattn.methods")
            value = getattr(importlib.import_module(f"unilinattn.{home}"), name)
            globals()[name] = value
            return value
    if not name.startswith("_") and importlib.util.find_spec(f"unilinattn.{name}"):
        return importlib.import_module(f"unilinattn.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

"""unilinattn: the attention matrix hidden in linear RNNs and Transformers, extracted exactly and explained.

`trace` runs a model once and hands over its token-mixing layers, each an exact `MixerOperator`; `explain` and
`compare` turn them into scores, and `estimate` says beforehand what that takes. `architectures` and `methods` tell
what is registered.
"""

# The modules `architectures`, `methods` and `trace` share their names with functions of the public surface: they
# are imported first, which registers what they define, so that the functions keep the names.
from unilinattn import architectures as _architectures  # noqa: F401  imported for what it registers
from unilinattn import methods as _methods  # noqa: F401  imported for what it registers
from unilinattn.attribution import Attribution, Comparison
from unilinattn.errors import UnilinattnError
from unilinattn.flow import Flow
from unilinattn.methods.run import compare, estimate, explain
from unilinattn.operator import MixerOperator
from unilinattn.registry import architectures, methods, register_architecture, register_method
from unilinattn.standins import through_operators
from unilinattn.trace import Trace, trace

__version__ = "0.1.0"

__all__ = [
    "Attribution",
    "Comparison",
    "Flow",
    "MixerOperator",
    "Trace",
    "UnilinattnError",
    "architectures",
    "compare",
    "estimate",
    "explain",
    "methods",
    "register_architecture",
    "register_method",
    "through_operators",
    "trace",
]

"""unilinattn: the attention matrix hidden in linear RNNs and Transformers, extracted exactly and explained."""

from unilinattn import architectures as _adapters  # noqa: F401  importing them registers them
from unilinattn.errors import UnilinattnError
from unilinattn.flow import Flow
from unilinattn.operator import MixerOperator
from unilinattn.registry import architectures, methods, register_architecture, register_method
from unilinattn.trace import Trace, through_operators, trace

__version__ = "0.1.0"

__all__ = [
    "Flow",
    "MixerOperator",
    "Trace",
    "UnilinattnError",
    "architectures",
    "methods",
    "register_architecture",
    "register_method",
    "through_operators",
    "trace",
]
